// The fused-store header of quantize: how a fused producer stores its float results. A policy is a small object passed
// by value to a kernel; the producer calls store(row, col, values) with N consecutive elements of one row, independent
// of the format. The plain policy rounds to the output's dtype. For FP8 tiles a producer passes its values to the
// kernel of tile.cuh instead.
#pragma once

#include "core/vec.cuh"
#include "ops/quantize/tile.cuh"

namespace te::quantize {

template <class T>
struct PlainStore {
  T* data;
  int64_t row_pitch;  // elements

  explicit PlainStore(const te_tensor& t) : data(static_cast<T*>(t.data)), row_pitch(t.row_pitch) {}

  template <int N>
  __device__ __forceinline__ void store(int64_t row, int64_t col, const float (&values)[N]) const {
    store_packed<T, N>(data + row * row_pitch + col, narrow<T, N>(values));
  }
};

}  // namespace te::quantize
