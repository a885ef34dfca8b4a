// activation, CUDA path: one thread per 16-byte vector of the output (one element where rows are not aligned), no
// shared memory. Memory-bound: 6 bytes an element for a gated bf16 forward, 12 for its backward that recomputes the
// activation.
#include "core/device.h"
#include "ops/activation/activation.cuh"
#include "ops/quantize/store.cuh"

namespace te::activation::cuda {

namespace {

constexpr int kThreads = 256;

struct Place {
  int64_t row;
  int64_t col;
};

// Vector number -> row and first column; with 32-bit division if the numbers allow, which is several times cheaper.
template <int N>
__device__ __forceinline__ Place place_of(int64_t vector, int64_t vectors_per_row, bool small) {
  const int64_t row = small ? int64_t(uint32_t(vector) / uint32_t(vectors_per_row)) : vector / vectors_per_row;
  return {row, (vector - row * vectors_per_row) * N};
}

template <class Op, class T, int N, class Store>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(Params params, const T* x, int64_t x_pitch, Store y, int64_t cols, int64_t vectors,
                   int64_t vectors_per_row, bool small) {
  const int64_t vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  const Place at = place_of<N>(vector, vectors_per_row, small);
  const T* source = x + at.row * x_pitch + at.col;
  float a[N], b[N], out[N];
  load_floats<T, N>(source, a);
  if constexpr (Op::kGated) load_floats<T, N>(source + cols, b);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    out[i] = Op::template forward<CudaExp<T>>(a[i], Op::kGated ? b[i] : 0.f, params);
  }
  y.store(at.row, at.col, out);
}

template <class Op, class T, int N, class Store>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(Params params, const T* dy, int64_t dy_pitch, const T* x, int64_t x_pitch, Store dx, Store y,
                    int64_t cols, int64_t vectors, int64_t vectors_per_row, bool small) {
  const int64_t vector = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (vector >= vectors) return;
  const Place at = place_of<N>(vector, vectors_per_row, small);
  const T* source = x + at.row * x_pitch + at.col;
  float g[N], a[N], b[N], out[N];
  load_floats<T, N>(dy + at.row * dy_pitch + at.col, g);
  load_floats<T, N>(source, a);
  if constexpr (Op::kGated) load_floats<T, N>(source + cols, b);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Gradients r = Op::template backward<CudaExp<T>>(g[i], a[i], Op::kGated ? b[i] : 0.f, params);
    a[i] = r.da;
    b[i] = r.db;
    out[i] = r.y;
  }
  dx.store(at.row, at.col, a);
  if constexpr (Op::kGated) dx.store(at.row, at.col + cols, b);
  if (y.data != nullptr) y.store(at.row, at.col, out);
}

// Calls launch(N, vectors, vectors_per_row, small, blocks) with the access width that the tensors allow.
template <class T, class Launch>
void for_width(int64_t rows, int64_t cols, bool aligned, Launch&& launch) {
  if (rows == 0 || cols == 0) return;
  const auto go = [&](auto width) {
    const int64_t per_row = cols / width();
    const int64_t vectors = rows * per_row;
    const int64_t blocks = (vectors + kThreads - 1) / kThreads;
    if (blocks > INT32_MAX) throw Error(TE_NOT_IMPLEMENTED, "te_activation: more than 2^39 vectors in one call.");
    launch(width, vectors, per_row, vectors <= UINT32_MAX, dim3(static_cast<unsigned>(blocks)));
  };
  note_width(aligned, cols % kVec<T> == 0);
  if (aligned && cols % kVec<T> == 0) {
    go(std::integral_constant<int, kVec<T>>{});
  } else {
    go(std::integral_constant<int, 1>{});
  }
}

}  // namespace

void forward(int kind, const Params& params, const te_tensor& x, const te_tensor& y, te_stream stream) {
  dispatch(kind, [&](auto op) {
    dispatch_float(x.dtype, "te_activation_forward", "x", [&](auto t) {
      using T = decltype(t);
      for_width<T>(y.rows, y.cols, aligned16(x) && aligned16(y),
                   [&](auto width, int64_t vectors, int64_t per_row, bool small, dim3 blocks) {
                     forward_kernel<decltype(op), T, width()><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(
                         params, static_cast<const T*>(x.data), x.row_pitch, quantize::PlainStore<T>(y), y.cols,
                         vectors, per_row, small);
                   });
    });
  });
  check_launch("te_activation_forward");
}

void backward(int kind, const Params& params, const te_tensor& dy, const te_tensor& x, const te_tensor& dx,
              const te_tensor& y, te_stream stream) {
  dispatch(kind, [&](auto op) {
    dispatch_float(x.dtype, "te_activation_backward", "x", [&](auto t) {
      using T = decltype(t);
      const bool aligned = aligned16(dy) && aligned16(x) && aligned16(dx) && aligned16(y);
      for_width<T>(
          dy.rows, dy.cols, aligned, [&](auto width, int64_t vectors, int64_t per_row, bool small, dim3 blocks) {
            backward_kernel<decltype(op), T, width()><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(
                params, static_cast<const T*>(dy.data), dy.row_pitch, static_cast<const T*>(x.data), x.row_pitch,
                quantize::PlainStore<T>(dx), quantize::PlainStore<T>(y), dy.cols, vectors, per_row, small);
          });
    });
  });
  check_launch("te_activation_backward");
}

}  // namespace te::activation::cuda
