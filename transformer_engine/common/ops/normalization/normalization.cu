// normalization, CUDA forward. A row stays packed in the registers of its threads: every load of the row is issued
// before the first is used, and gamma's before the reduction completes. Rows that are not aligned to 16 bytes, or too
// wide, are read again for each pass. Memory-bound: 4 bytes an element in bf16, 8 with a residual.
#include "ops/normalization/normalization_forward.cuh"

namespace te::normalization::cuda {

namespace {

constexpr const char* kOp = "te_normalization_forward";

// Instead of writing y: the largest |y|, after the same rounding, goes into one of the parts, ignoring NaN; parts are
// zeros at first. Magnitudes compare as integers, and a maximum does not depend on order.
template <class T>
struct AmaxStore {
  unsigned* parts;
  int n_parts;
  float largest = 0.f;

  explicit AmaxStore(const te_tensor& t) : parts(static_cast<unsigned*>(t.data)), n_parts(int(t.cols)) {}

  template <int N>
  __device__ __forceinline__ void store(int64_t, int64_t, const float (&values)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) largest = fmaxf(largest, fabsf(to_float(from_float<T>(values[j]))));
  }

  __device__ __forceinline__ void finish() const {
    const unsigned warp = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    unsigned* part = parts + blockIdx.x % n_parts;
    const unsigned thread = threadIdx.y * blockDim.x + threadIdx.x;
    if (thread % kWarp == 0 && warp > *static_cast<volatile unsigned*>(part)) atomicMax(part, warp);
  }
};

template <class Store>
__device__ __forceinline__ void finish(const Store&) {}
template <class T>
__device__ __forceinline__ void finish(const AmaxStore<T>& y) {
  y.finish();
}

// Vectors of a thread: 4 up to 512 threads a row, 8 beyond (2^16 columns of a 16-bit type, 2^15 of float).
template <int V>
constexpr int kMaxLanes = V == 4 ? 512 : 1024;

template <class T, class G, int V, bool kRms, bool kResidual, class Store>
__global__ void __launch_bounds__(kMaxLanes<V>) forward_kernel(ForwardArgs<T, G> a, Store y) {
  __shared__ float scratch[2][kWarp];
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int vectors = row < a.rows ? a.hidden / kVec<T> : 0;
  forward_row<T, G, V, kRms, kResidual>(a, y, row, int(blockDim.x), vectors, scratch);
  finish(y);
}

// Any alignment and width, one element at a time. A thread reads back from residual_out the values that it wrote.
template <class T, class G, class Store>
__global__ void __launch_bounds__(512) forward_any_kernel(ForwardArgs<T, G> a, bool rms, Store y) {
  __shared__ float scratch[2][kWarp];
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int hidden = row < a.rows ? a.hidden : 0;
  const T* h = a.x.at(row);
  if (a.residual.data != nullptr) {
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
      a.residual_out.at(row)[c] = from_float<T>(to_float(h[c]) + to_float(a.residual.at(row)[c]));
    }
    h = a.residual_out.at(row);
  }
  float mean[1] = {0.f};
  if (!rms) {
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) mean[0] += to_float(h[c]);
    row_sum(mean, scratch[0]);
    mean[0] /= float(a.hidden);
  }
  float squares[1] = {0.f};
  for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
    const float v = to_float(h[c]) - mean[0];
    squares[0] += v * v;
  }
  row_sum(squares, scratch[1]);
  const float rstd = rsqrtf(squares[0] / float(a.hidden) + a.eps);
  if constexpr (kStores<Store>) {
    for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
      const float x = to_float(h[c]), g = to_float(a.gamma[c]) + a.shift;
      const float v[1] = {a.beta != nullptr ? normalized(x, mean[0], rstd, g, to_float(a.beta[c]))
                                            : normalized(x, mean[0], rstd, g)};
      y.store(row, c, v);
    }
  }
  if (threadIdx.x == 0 && hidden > 0) {
    if (a.mean != nullptr) a.mean[row] = mean[0];
    if (a.rstd != nullptr) a.rstd[row] = rstd;
  }
  finish(y);
}

template <class T, class G, int V, class Store>
void launch_held(const Plan& plan, const ForwardTensors& t, const Store& y, cudaStream_t stream) {
  const ForwardArgs<T, G> args(plan, t);
  const Layout layout = layout_for(t.x.cols / kVec<T>, V, kMaxLanes<V>);
  by_form(plan, t, [&](auto rms, auto residual) {
    forward_kernel<T, G, V, rms(), residual(), Store>
        <<<blocks_for(t.x.rows, layout, kOp), layout.block(), 0, stream>>>(args, y);
  });
}

template <class T, class G, class Store>
void launch_any(const Plan& plan, const ForwardTensors& t, const Store& y, cudaStream_t stream) {
  const Layout layout = layout_for(t.x.cols, 8, 512);
  forward_any_kernel<<<blocks_for(t.x.rows, layout, kOp), layout.block(), 0, stream>>>(ForwardArgs<T, G>(plan, t),
                                                                                       plan.rms != 0, y);
}

// The kernel of a row depends on x, gamma and beta alone, so that statistics have the same bits with and without a y (a
// y that is aligned unlike x is written one element at a time).
template <class T, class G, class Store>
void launch(const Plan& plan, const ForwardTensors& t, bool aligned, const Store& y, te_stream stream) {
  const int64_t vectors = t.x.cols / kVec<T>;
  const bool divides = t.x.cols % kVec<T> == 0;
  const bool held = aligned && divides && vectors <= 8 * kMaxLanes<8>;
  note_row_path(aligned, divides, held);
  if (!held) {
    launch_any<T, G>(plan, t, y, cudaStream_t(stream));
  } else if (vectors <= 4 * kMaxLanes<4>) {
    launch_held<T, G, 4>(plan, t, y, cudaStream_t(stream));
  } else {
    launch_held<T, G, 8>(plan, t, y, cudaStream_t(stream));
  }
}

}  // namespace

void forward(const Plan& plan, const ForwardTensors& t, const te_tensor& amax_parts, te_stream stream) {
  if (amax_parts.data != nullptr) {
    check_cuda(cudaMemsetAsync(amax_parts.data, 0, size_t(amax_parts.cols) * sizeof(float), cudaStream_t(stream)), kOp);
  }
  if (t.x.rows == 0) return;
  bool aligned = true;
  for (const te_tensor* tensor : {&t.x, &t.residual, &t.gamma, &t.beta, &t.y, &t.residual_out}) {
    aligned = aligned && aligned16(*tensor);
  }
  if (t.y.data == nullptr && amax_parts.data == nullptr) {  // gamma is not read, so that any dtype will do
    dispatch_float(t.x.dtype, kOp, "x", [&](auto type) {
      using T = decltype(type);
      launch<T, T>(plan, t, aligned, NoStore{}, stream);
    });
  } else {
    dispatch_types(t.x, t.gamma, kOp, [&](auto x_type, auto gamma_type) {
      using T = decltype(x_type);
      using G = decltype(gamma_type);
      if (t.y.data != nullptr) {
        launch<T, G>(plan, t, aligned, quantize::PlainStore<T>(t.y), stream);
      } else {
        launch<T, G>(plan, t, aligned, AmaxStore<T>(amax_parts), stream);
      }
    });
  }
  check_launch(kOp);
}

}  // namespace te::normalization::cuda
