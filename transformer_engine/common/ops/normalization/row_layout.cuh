// normalization, declarations that its CUDA files share: the layout of rows over threads, and access to gamma. One row
// belongs to the blockDim.x threads of one threadIdx.y; thread x of a row owns its vectors x, x + blockDim.x, ...
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/device.h"
#include "core/reduce.cuh"
#include "ops/normalization/tensors.h"
#include "ops/quantize/store.cuh"

namespace te::normalization::cuda {

struct Layout {
  int lanes;  // threads of a row
  int rows;   // rows of a block

  dim3 block() const { return dim3(unsigned(lanes), unsigned(rows)); }
  int threads() const { return lanes * rows; }
};

// About per_thread items for each thread of a row, in a shape that row_sum accepts: narrow rows share a warp, wide ones
// have a block.
inline Layout layout_for(int64_t items, int per_thread, int max_lanes) {
  constexpr int kNarrowBlock = 128;
  const int64_t wanted = std::min<int64_t>(max_lanes, (items + per_thread - 1) / per_thread);
  if (wanted > kWarp) return {int((wanted + kWarp - 1) / kWarp * kWarp), 1};
  int lanes = 1;
  while (lanes < wanted) lanes *= 2;
  return {lanes, kNarrowBlock / lanes};
}

inline unsigned blocks_for(int64_t rows, const Layout& layout, const char* op) {
  const int64_t blocks = (rows + layout.rows - 1) / layout.rows;
  if (blocks > INT32_MAX)
    throw Error(TE_NOT_IMPLEMENTED, concat(op, ": more than 2^31 - 1 blocks of rows in one call."));
  return unsigned(blocks);
}

// Calls f(T{}, G{}) with the types of x and gamma.
template <class F>
void dispatch_types(const te_tensor& x, const te_tensor& gamma, const char* op, F&& f) {
  dispatch_float(x.dtype, op, "x", [&](auto t) {
    if (gamma.dtype == x.dtype) {
      f(t, t);
    } else {
      f(t, float{});
    }
  });
}

template <class T>
struct Rows {
  T* data;
  int64_t pitch;

  explicit Rows(const te_tensor& t) : data(static_cast<T*>(t.data)), pitch(t.row_pitch) {}
  __device__ __forceinline__ T* at(int64_t row) const { return data + row * pitch; }
};

// The same bits, opaque to the compiler: values that were widened from them are widened again instead of being kept in
// twice as many registers.
template <class T, int N, int V>
__device__ __forceinline__ void forget(Packed<T, N> (&x)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    for (auto& word : x[i].v) {
      static_assert(sizeof(word) == 4, "vectors of 32-bit words");
      if constexpr (std::is_same_v<T, float>) {
        asm volatile("" : "+f"(word));
      } else {
        asm volatile("" : "+r"(word));
      }
    }
  }
}

// y of one element; g is gamma with its shift. All kernels that compute y round in this way, so that the quantized y
// has the values of the plain one.
__device__ __forceinline__ float normalized(float h, float mean, float rstd, float g) {
  return __fmul_rn(__fmul_rn(h - mean, rstd), g);
}
__device__ __forceinline__ float normalized(float h, float mean, float rstd, float g, float beta) {
  return __fmaf_rn(__fmul_rn(h - mean, rstd), g, beta);
}

// Pairwise, so that a vector adds log2(N) roundings instead of N.
template <int N>
__device__ __forceinline__ float vector_sum(const float (&x)[N]) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    float half[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) half[i] = x[2 * i] + x[2 * i + 1];
    return vector_sum(half);
  }
}

// Records (te_note_path) which of a pass's two kernels runs, and why not the one that reads a row once.
inline void note_row_path(bool aligned, bool divides, bool held) {
  if (held || !aligned || !divides) return note_width(aligned, divides, "CUDA, each row read once, held on the chip");
  te_note_path("CUDA, one element at a time", "a row is longer than what the threads of a block hold");
}

}  // namespace te::normalization::cuda
