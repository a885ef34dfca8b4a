// Adam, CUDA path of lists whose types have no kernel of their own: scaled states, FP8 weights, float16, mixtures.
#include "ops/optimizer/adam.cuh"

namespace te::optimizer::cuda {

namespace {

using AnyTypes = Types<Any, Any, Any, Any>;

struct Pairs {
  te_dtype exp_avg, exp_avg_sq;
  te_master master;
  Flag noop;
  Table<1, te_adam_scales> table;
};

__device__ void end_pair(float* pair, te_dtype dtype) {
  pair[0] = state_scale(pair[1], dtype == TE_FLOAT16 ? kHalfRange : kFp8Range);
  pair[1] = 0.f;
}

// A thread for each tensor: replaces the old scales by the new ones, after every block has read them.
__global__ void __launch_bounds__(kThreads) end_scales_kernel(const __grid_constant__ Pairs pairs) {
  const int tensor = int(blockIdx.x * kThreads + threadIdx.x);
  if (tensor >= pairs.table.count || pairs.noop.is_set()) return;
  const te_adam_scales& s = pairs.table.extra[tensor];
  if (pairs.exp_avg == TE_FLOAT16 || pairs.exp_avg == TE_FLOAT8_E4M3) end_pair(s.exp_avg, pairs.exp_avg);
  if (pairs.exp_avg_sq == TE_FLOAT16 || pairs.exp_avg_sq == TE_FLOAT8_E4M3) end_pair(s.exp_avg_sq, pairs.exp_avg_sq);
  if (pairs.master == TE_MASTER_FLOAT16) end_pair(s.master, TE_FLOAT16);
}

}  // namespace

void adam_any(const te_adam_plan& plan, Tensors tensors, const te_adam_scales* scales, int64_t count,
              te_stream stream) {
  const auto extra = [&](int64_t i) { return scales == nullptr ? te_adam_scales{} : scales[i]; };
  const bool scaled = has_scaled_states(plan);
  if (scaled) launch_adam<AnyTypes, true>(plan, tensors, count, extra, stream);
  launch_adam<AnyTypes, false>(plan, tensors, count, extra, stream);
  if (!scaled) return;
  Pairs pairs{plan.exp_avg, plan.exp_avg_sq, plan.master, Flag(plan.noop), {}};
  for_tables("te_optimizer_adam", pairs, tensors, count, INT64_MAX / 2, extra, [&](const Pairs& full, unsigned) {
    const auto blocks = unsigned((full.table.count + kThreads - 1) / kThreads);
    end_scales_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(full);
  });
}

}  // namespace te::optimizer::cuda
