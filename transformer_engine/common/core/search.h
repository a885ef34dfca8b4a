// Finds the run that contains a number.
#pragma once

#include "core/dtype.h"

namespace te {

// Run i begins at before[i]: returns the last of `runs` that begins at or before `number`, which is at least before[0].
// Empty runs precede the one that is returned.
TE_HOST_DEVICE int32_t run_of(const int32_t* before, int32_t runs, int32_t number) {
  int32_t low = 0, high = runs - 1;
  while (low < high) {
    const int32_t middle = (low + high + 1) / 2;
    if (before[middle] <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

}  // namespace te
