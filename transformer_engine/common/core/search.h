// Which of several runs of numbers one is in.
#pragma once

#include "core/dtype.h"

namespace te {

// Runs follow one another, run i begins at before[i]: the last of `runs` that begins no later than `number`, which is
// no lower than before[0]. Empty runs come before the one that is found.
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
