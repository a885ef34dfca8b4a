// normalization, CUDA: the forward of one row, held by its threads. The Store consumes y; the kernels assign rows to
// blocks.
#pragma once

#include "ops/normalization/row_layout.cuh"

namespace te::normalization::cuda {

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

// For the statistics alone.
struct NoStore {};
template <class Store>
constexpr bool kStores = !std::is_same_v<Store, NoStore>;

// The `lanes` threads of a row hold V vectors each, thread x vectors x, x + lanes, ... of `vectors` (0 for a thread or
// a row that does not exist). All threads of the block call it. There is one barrier for each scratch, so that a caller
// with another row alternates between two.
template <class T, class G, int V, bool kRms, bool kResidual, class Store>
__device__ __forceinline__ void forward_row(const ForwardArgs<T, G>& a, Store& y, int64_t row, int lanes, int vectors,
                                            float (&scratch)[2][kWarp]) {
  constexpr int N = kVec<T>;
  constexpr bool kRoomy = V == 4;  // with 8 vectors a thread, x takes all registers
  constexpr bool kEarlyGamma =
      kRoomy && sizeof(G) == sizeof(T) && kStores<Store>;  // a float gamma with 16-bit rows needs twice as many
  const auto vector_of = [&](int i) { return int(threadIdx.x) + i * lanes; };

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
    if (kRms || vector_of(i) < vectors) squares[0] += vector_sum(v);  // x beyond the row is 0, its deviation is not
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

// Calls launch(rms, residual), both as types: kernels have them as template arguments.
template <class Launch>
void by_form(const Plan& plan, const ForwardTensors& t, const Launch& launch) {
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

}  // namespace te::normalization::cuda
