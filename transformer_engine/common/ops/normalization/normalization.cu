// normalization, CUDA forward. A row stays packed in the registers of its threads: every load of the row is issued
// before the first is used, and gamma's before the reduction is waited for. Rows that are not aligned to 16 bytes, or
// too wide, are read again for each pass. The work is bound by memory: 4 bytes an element in bf16, 8 with a residual.
#include "ops/normalization/normalization.cuh"

namespace te::normalization::cuda {

namespace {

constexpr const char* kOp = "te_normalization_forward";

template <class T, class G>
struct ForwardArgs {
  Rows<const T> x, residual;
  Rows<T> residual_out;
  const G* gamma;
  const G* beta;  // NULL: none
  float* mean;    // NULL: not wanted
  float* rstd;    // NULL: not wanted
  int64_t rows;
  int hidden;
  float eps;
  float shift;  // added to gamma

  ForwardArgs(const Plan& plan, const ForwardTensors& t)
      : x(t.x),
        residual(t.residual),
        residual_out(t.residual_out),
        gamma(static_cast<const G*>(t.gamma.data)),
        beta(static_cast<const G*>(t.beta.data)),
        mean(static_cast<float*>(t.mean.data)),
        rstd(static_cast<float*>(t.rstd.data)),
        rows(t.x.rows),
        hidden(int(t.x.cols)),
        eps(plan.eps),
        shift(plan.zero_centered_gamma ? 1.f : 0.f) {}
};

// Where the statistics alone are wanted.
struct NoStore {};
template <class Store>
constexpr bool kStores = !std::is_same_v<Store, NoStore>;

// Vectors that a thread holds: 4 up to 512 threads a row, 8 beyond (2^16 columns of a 16-bit type, 2^15 of float).
template <int V>
constexpr int kMaxLanes = V == 4 ? 512 : 1024;

template <class T, class G, int V, bool kRms, bool kResidual, class Store>
__global__ void __launch_bounds__(kMaxLanes<V>) forward_kernel(ForwardArgs<T, G> a, Store y) {
  constexpr int N = kVec<T>;
  constexpr bool kRoomy = V == 4;  // 8 vectors a thread leave no registers for anything beside x
  constexpr bool kEarlyGamma =
      kRoomy && sizeof(G) == sizeof(T) && kStores<Store>;  // a float gamma beside 16-bit rows takes twice as many
  __shared__ float scratch[2][kWarp];
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int vectors = row < a.rows ? a.hidden / N : 0;
  const auto vector_of = [](int i) { return int(threadIdx.x + i * blockDim.x); };

  Packed<T, N> h[V], residual[kResidual ? V : 1];
#pragma unroll
  for (int i = 0; i < V; ++i) {
    h[i] = {};
    if (vector_of(i) < vectors) h[i] = load_packed<T, N>(a.x.at(row) + vector_of(i) * N);
  }
  const auto load_residual = [&](int i) {
    residual[i] = {};
    if (vector_of(i) < vectors) residual[i] = load_packed<T, N>(a.residual.at(row) + vector_of(i) * N);
  };
  if constexpr (kResidual && kRoomy) {
#pragma unroll
    for (int i = 0; i < V; ++i) load_residual(i);
  }
  Packed<G, N> gamma[kEarlyGamma ? V : 1];
  if constexpr (kEarlyGamma) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (vector_of(i) < vectors) gamma[i] = load_packed<G, N>(a.gamma + vector_of(i) * N);
    }
  }
  if constexpr (kResidual) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if constexpr (!kRoomy) load_residual(i);
      float sum[N], other[N];
      widen<T, N>(h[i], sum);
      widen<T, N>(residual[i], other);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += other[j];
      h[i] = narrow<T, N>(sum);
      if (vector_of(i) < vectors) store_packed<T, N>(a.residual_out.at(row) + vector_of(i) * N, h[i]);
    }
    forget(h);
  }

  float mean = 0.f;
  if constexpr (!kRms) {
    float sum[1] = {0.f};
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float v[N];
      widen<T, N>(h[i], v);
      sum[0] += vector_sum(v);
    }
    row_sum(sum, scratch[0]);
    forget(h);
    mean = sum[0] / float(a.hidden);
  }
  float squares[1] = {0.f};
#pragma unroll
  for (int i = 0; i < V; ++i) {
    float v[N];
    widen<T, N>(h[i], v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = (v[j] - mean) * (v[j] - mean);
    if (kRms || vector_of(i) < vectors)
      squares[0] += vector_sum(v);  // what lies past the row is 0, its deviation is not
  }
  row_sum(squares, scratch[1]);
  forget(h);
  const float rstd = rsqrtf(squares[0] / float(a.hidden) + a.eps);

  if constexpr (kStores<Store>) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (vector_of(i) >= vectors) continue;
      if constexpr (!kEarlyGamma) gamma[0] = load_packed<G, N>(a.gamma + vector_of(i) * N);
      float v[N], g[N];
      widen<T, N>(h[i], v);
      widen<G, N>(gamma[kEarlyGamma ? i : 0], g);
      if (!kRms && a.beta != nullptr) {
        float b[N];
        load_floats<G, N>(a.beta + vector_of(i) * N, b);
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] = normalized(v[j], mean, rstd, g[j] + a.shift, b[j]);
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] = normalized(v[j], mean, rstd, g[j] + a.shift);
      }
      y.store(row, vector_of(i) * N, v);
    }
  }
  if (threadIdx.x == 0 && vectors > 0) {
    if (a.mean != nullptr) a.mean[row] = mean;
    if (a.rstd != nullptr) a.rstd[row] = rstd;
  }
}

// Any alignment and width, one element at a time. A thread reads back from residual_out what it wrote there itself.
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
}

template <class T, class G, int V, class Store>
void launch_held(const Plan& plan, const ForwardTensors& t, const Store& y, cudaStream_t stream) {
  const ForwardArgs<T, G> args(plan, t);
  const Layout layout = layout_for(t.x.cols / kVec<T>, V, kMaxLanes<V>);
  const auto launch = [&](auto rms, auto residual) {
    forward_kernel<T, G, V, rms(), residual(), Store>
        <<<blocks_for(t.x.rows, layout, kOp), layout.block(), 0, stream>>>(args, y);
  };
  const auto with_residual = [&](auto rms) {
    if (t.residual.data != nullptr) {
      launch(rms, std::true_type{});
    } else {
      launch(rms, std::false_type{});
    }
  };
  if (plan.rms) {
    with_residual(std::true_type{});
  } else {
    with_residual(std::false_type{});
  }
}

template <class T, class G, class Store>
void launch_any(const Plan& plan, const ForwardTensors& t, const Store& y, cudaStream_t stream) {
  const Layout layout = layout_for(t.x.cols, 8, 512);
  forward_any_kernel<<<blocks_for(t.x.rows, layout, kOp), layout.block(), 0, stream>>>(ForwardArgs<T, G>(plan, t),
                                                                                       plan.rms != 0, y);
}

// Which kernel a row takes follows from x, gamma and beta alone, so that statistics have the same bits with and
// without a y (one that is there is aligned as x is, or it goes one element at a time).
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

void forward(const Plan& plan, const ForwardTensors& t, te_stream stream) {
  if (t.x.rows == 0) return;
  bool aligned = true;
  for (const te_tensor* tensor : {&t.x, &t.residual, &t.gamma, &t.beta, &t.y, &t.residual_out}) {
    aligned = aligned && aligned16(*tensor);
  }
  if (t.y.data == nullptr) {  // gamma is not read, so that its dtype is all the same
    dispatch_float(t.x.dtype, kOp, "x", [&](auto type) {
      using T = decltype(type);
      launch<T, T>(plan, t, aligned, NoStore{}, stream);
    });
  } else {
    dispatch_types(t.x, t.gamma, kOp, [&](auto x_type, auto gamma_type) {
      using T = decltype(x_type);
      launch<T, decltype(gamma_type)>(plan, t, aligned, quantize::PlainStore<T>(t.y), stream);
    });
  }
  check_launch(kOp);
}

}  // namespace te::normalization::cuda
