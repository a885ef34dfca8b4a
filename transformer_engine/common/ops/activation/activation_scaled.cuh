// activation with a scale for each row, the kernels: a warp computes a row, each lane up to 16 bytes of it at a time.
// The scale's gradient is a sum of each lane, in the order of its columns, then one over the lanes. Rows after the live
// ones, which the device counts, are neither read nor written: their warps end.
#pragma once

#include "core/vec.cuh"
#include "ops/activation/activation_math.h"

namespace te::activation {

// The value that a tensor of T holds.
template <class T>
TE_HOST_DEVICE float rounded(float x) {
  return to_float(from_float<T>(x));
}

constexpr int kScaledThreads = 256, kScaledRows = kScaledThreads / 32;  // rows of a block

template <class T, class S>
struct ScaledInput {
  using Value = T;
  using Scale = S;

  const T* x;
  int64_t x_pitch;
  const S* scale;
  const int32_t* live;  // null: all rows
  int64_t rows, cols;   // of y

  // The row of this warp, or -1.
  __device__ __forceinline__ int64_t row() const {
    const int64_t row = int64_t(blockIdx.x) * kScaledRows + threadIdx.x / 32;
    return row < rows && (live == nullptr || row < *live) ? row : -1;
  }
};

template <class Op, class Exp, int N, class T, class S, class Store>
__global__ void __launch_bounds__(kScaledThreads) scaled_forward_kernel(Params params, ScaledInput<T, S> in, Store y) {
  const int64_t row = in.row();
  if (row < 0) return;
  const float scale = to_float(in.scale[row]);
  const T* x = in.x + row * in.x_pitch;
  for (int64_t c = int64_t(threadIdx.x % 32) * N; c < in.cols; c += 32 * N) {
    float a[N], b[N], out[N];
    load_floats<T, N>(x + c, a);
    if constexpr (Op::kGated) load_floats<T, N>(x + in.cols + c, b);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out[i] = rounded<T>(Op::template forward<Exp>(a[i], Op::kGated ? b[i] : 0.f, params)) * scale;
    }
    y.store(row, c, out);
  }
}

// dscale: null if it is not wanted; y likewise.
template <class Op, class Exp, int N, class T, class S, class Store>
__global__ void __launch_bounds__(kScaledThreads)
    scaled_backward_kernel(Params params, ScaledInput<T, S> in, const T* dy, int64_t dy_pitch, Store dx, S* dscale,
                           Store y) {
  const int64_t row = in.row();
  if (row < 0) return;
  const float scale = to_float(in.scale[row]);
  const T* x = in.x + row * in.x_pitch;
  float sum = 0.f;
  for (int64_t c = int64_t(threadIdx.x % 32) * N; c < in.cols; c += 32 * N) {
    float g[N], a[N], b[N], out[N];
    load_floats<T, N>(dy + row * dy_pitch + c, g);
    load_floats<T, N>(x + c, a);
    if constexpr (Op::kGated) load_floats<T, N>(x + in.cols + c, b);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Gradients r = Op::template backward<Exp>(rounded<T>(g[i] * scale), a[i], Op::kGated ? b[i] : 0.f, params);
      const float value = rounded<T>(r.y);
      a[i] = r.da;
      b[i] = r.db;
      out[i] = value * scale;
      sum += g[i] * value;
    }
    dx.store(row, c, a);
    if constexpr (Op::kGated) dx.store(row, c + in.cols, b);
    if (y.data != nullptr) y.store(row, c, out);
  }
  if (dscale == nullptr) return;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) dscale[row] = from_float<S>(sum);
}

}  // namespace te::activation
