// Contracts of lists, whose items are checked like single matrices.
#pragma once

#include <initializer_list>

#include "core/tensor.h"

namespace te::quantize {

// Calls check(i) for each item. A refusal has the item's number.
template <class Check>
void check_items(const char* op, int32_t count, std::initializer_list<const void*> arrays, Check&& check) {
  if (count < 0) bad_argument(op, "count", count, "a number >= 0");
  for (const void* array : arrays) {
    if (count > 0 && array == nullptr) bad_argument(op, "list", "one with an array that is NULL", "all its arrays");
  }
  int32_t i = 0;
  try {
    for (; i < count; ++i) check(i);
  } catch (const Error& e) {
    throw Error(e.status(), concat(e.what(), " It is item ", i, " of the list."));
  }
}

inline void check_one_device(const char* op, const char* argument, const te_tensor& t, const te_tensor& first) {
  if (t.device == first.device) return;
  bad_argument(op, argument, concat("on ", device_of(t)), concat(device_of(first), ", as the first one"));
}

}  // namespace te::quantize
