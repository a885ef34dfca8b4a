// optimizer, CUDA path of the ops other than Adam: SGD, scaling, FP8 scales from amaxes, the step count. One kernel
// each for lists of any float types.
#include "ops/optimizer/multi_tensor.cuh"
#include "ops/optimizer/optimizer_math.h"

namespace te::optimizer::cuda {

namespace {

// ---- SGD ----

struct SgdLaunch {
  Sgd sgd;
  te_dtype grad, param, momentum_buffer, copy;
  bool has_momentum, has_copy;
  Flag noop;
  Table<4> table;
};

struct SgdBody {
  template <int N>
  struct Raw {
    List<Any>::Raw<N> g, p, b;
  };

  const SgdLaunch& launch;
  const int tensor;

  __device__ __forceinline__ void* list(int k) const { return launch.table.data[k][tensor]; }
  __device__ __forceinline__ bool is_wide() const {
    return List<Any>::is_wide(list(0), launch.grad) && List<Any>::is_wide(list(1), launch.param) &&
           (!launch.has_momentum || List<Any>::is_wide(list(2), launch.momentum_buffer)) &&
           (!launch.has_copy || List<Any>::is_wide(list(3), launch.copy));
  }
  template <int N>
  __device__ __forceinline__ Raw<N> load(int64_t i) const {
    Raw<N> raw;
    raw.g = List<Any>::load<N>(list(0), i, launch.grad);
    raw.p = List<Any>::load<N>(list(1), i, launch.param);
    if (launch.has_momentum) raw.b = List<Any>::load<N>(list(2), i, launch.momentum_buffer);
    return raw;
  }
  __device__ __forceinline__ bool begin() const { return !launch.noop.is_set(); }
  template <int N>
  __device__ __forceinline__ void finish(const Raw<N>& raw, int64_t i) const {
    float g[N], p[N], b[N] = {};
    List<Any>::open<N>(raw.g, launch.grad, g);
    List<Any>::open<N>(raw.p, launch.param, p);
    if (launch.has_momentum) {
      List<Any>::open<N>(raw.b, launch.momentum_buffer, b);
#pragma unroll
      for (int k = 0; k < N; ++k) sgd_step<true>(launch.sgd, g[k], p[k], b[k]);
      List<Any>::store<N>(list(2), i, launch.momentum_buffer, b);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) sgd_step<false>(launch.sgd, g[k], p[k], b[k]);
    }
    List<Any>::store<N>(list(1), i, launch.param, p);
    if (launch.has_copy) List<Any>::store<N>(list(3), i, launch.copy, p);
  }
};

__global__ void __launch_bounds__(kThreads) sgd_kernel(const __grid_constant__ SgdLaunch launch) {
  const Place at = place_of(launch.table, kChunk);
  SgdBody body{launch, at.tensor};
  run_chunk(body, at, body.is_wide());
}

// ---- scaling ----

template <class TableOf>
struct ScaleLaunch {
  float factor;
  const float* factor_device;
  te_dtype in, out;
  Flag noop;
  TableOf table;
};

// For a few tensors: a launch with 32 KiB of arguments takes the host about 10 us longer.
constexpr int kFew = 8;
using FewTensors = Table<2, Nothing, kArgumentBytes - 64 - kFew*(2 * 8 + 8 + 4)>;
static_assert(FewTensors::kMost == kFew);

template <class Launch>
struct ScaleBody {
  template <int N>
  using Raw = List<Any>::Raw<N>;

  const Launch& launch;
  const int tensor;
  float factor = 1.f;
  bool finite = true;

  __device__ __forceinline__ void* list(int k) const { return launch.table.data[k][tensor]; }
  __device__ __forceinline__ bool is_wide() const {
    return List<Any>::is_wide(list(0), launch.in) && List<Any>::is_wide(list(1), launch.out);
  }
  template <int N>
  __device__ __forceinline__ Raw<N> load(int64_t i) const {
    return List<Any>::load<N>(list(0), i, launch.in);
  }
  __device__ __forceinline__ bool begin() {
    factor = value_or(launch.factor_device, launch.factor);
    return true;
  }
  template <int N>
  __device__ __forceinline__ void finish(const Raw<N>& raw, int64_t i) {
    float x[N];
    List<Any>::open<N>(raw, launch.in, x);
#pragma unroll
    for (int k = 0; k < N; ++k) {
      x[k] *= factor;
      finite = finite && is_finite(x[k]);
    }
    List<Any>::store<N>(list(1), i, launch.out, x);
  }
};

template <class Launch>
__global__ void __launch_bounds__(kThreads) scale_kernel(const __grid_constant__ Launch launch) {
  const Place at = place_of(launch.table, kChunk);
  ScaleBody<Launch> body{launch, at.tensor};
  run_chunk(body, at, body.is_wide());
  if (!body.finite) launch.noop.set();
}

// ---- scales and the step count ----

struct ScalesLaunch {
  float max_fp8, epsilon;
  bool pow_2;
  Table<3> table;
};

__global__ void __launch_bounds__(kThreads) compute_scales_kernel(const __grid_constant__ ScalesLaunch launch) {
  const Place at = place_of(launch.table, kChunk);
  const auto list = [&](int k) { return static_cast<float*>(launch.table.data[k][at.tensor]) + at.first; };
  for (int i = int(threadIdx.x); i < at.n; i += kThreads) {
    const float scale = quantize::scale_of(list(0)[i], launch.epsilon, launch.max_fp8, launch.pow_2);
    list(1)[i] = scale;
    list(2)[i] = 1.f / scale;
  }
}

__global__ void count_step_kernel(int32_t* step, Flag noop) {
  if (!noop.is_set()) ++*step;
}

}  // namespace

void sgd(const te_sgd_plan& plan, Tensors tensors, int64_t count, te_stream stream) {
  SgdLaunch launch{
      Sgd(plan),          plan.grad,       plan.param, plan.momentum_buffer, plan.copy, plan.momentum != 0.0,
      plan.has_copy != 0, Flag(plan.noop), {}};
  for_tables(
      "te_optimizer_sgd", launch, tensors, count, kChunk, no_extra(),
      [&](const SgdLaunch& full, unsigned blocks) { sgd_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(full); });
}

namespace {
template <class TableOf>
void scale_by_tables(const te_scale_plan& plan, Tensors tensors, int64_t count, te_stream stream) {
  using Launch = ScaleLaunch<TableOf>;
  Launch launch{float(plan.scale), floats_at(plan.scale_device), plan.in, plan.out, Flag(plan.noop), {}};
  for_tables(
      "te_optimizer_scale", launch, tensors, count, kChunk, no_extra(),
      [&](const Launch& full, unsigned blocks) { scale_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(full); });
}
}  // namespace

void scale(const te_scale_plan& plan, Tensors tensors, int64_t count, te_stream stream) {
  count <= kFew ? scale_by_tables<FewTensors>(plan, tensors, count, stream)
                : scale_by_tables<Table<2>>(plan, tensors, count, stream);
}

void compute_scales(Tensors tensors, int64_t count, float max_fp8, bool pow_2, float epsilon, te_stream stream) {
  ScalesLaunch launch{max_fp8, epsilon, pow_2, {}};
  for_tables("te_optimizer_compute_scales", launch, tensors, count, kChunk, no_extra(),
             [&](const ScalesLaunch& full, unsigned blocks) {
               compute_scales_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(full);
             });
}

void count_step(const te_tensor& step, const te_tensor& noop, te_stream stream) {
  count_step_kernel<<<1, 1, 0, cudaStream_t(stream)>>>(static_cast<int32_t*>(step.data), Flag(noop));
  check_launch("te_optimizer_count_step");
}

}  // namespace te::optimizer::cuda
