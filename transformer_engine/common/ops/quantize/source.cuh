// The producer for tile.cuh that reads its values from a tensor.
#pragma once

#include "ops/quantize/tile.cuh"

namespace te::quantize::cuda {

template <class T>
struct Source {
  using Type = T;
  using Row = NoRow;
  static constexpr int kInputs = 1, kOutputs = 1, kAmaxOutputs = 1, kBatch = kRows;
  static constexpr int kBlocksPerSm = sizeof(T) == 4 ? 2 : 3;
  static constexpr bool kStaged = false;

  const T* x;
  int64_t row_pitch;

  explicit Source(const te_tensor& t) : x(static_cast<const T*>(t.data)), row_pitch(t.row_pitch) {}

  __device__ __forceinline__ const T* input(int, int64_t row, int64_t col) const { return x + row * row_pitch + col; }
  __device__ __forceinline__ int64_t pitch(int) const { return row_pitch; }
  __device__ __forceinline__ Row of(int64_t) const { return {}; }
  __device__ __forceinline__ void compute(const Vector<T> (&in)[1], Row, int64_t, Vector<T> (&out)[1]) const {
    out[0] = in[0];
  }
};

inline bool is_wide(const te_tensor& x) {
  const bool aligned = aligned16(x), divides = x.cols % kColumns == 0;
  note_width(aligned, divides);
  return aligned && divides;
}

}  // namespace te::quantize::cuda
