// Adam, CUDA path: the types of lists that training uses most have their own kernels, all others use adam_any.cu.
// Memory-bound: 28 bytes a parameter in float32, 30 with a bfloat16 weight and its master, 28 with a remainder, 14 with
// everything in bfloat16.
#include "ops/optimizer/adam.cuh"

namespace te::optimizer::cuda {

namespace {

template <class G, class P, class W>
void step(const te_adam_plan& plan, Tensors tensors, int64_t count, te_stream stream) {
  if (plan.exp_avg == TE_FLOAT32) {
    launch_adam<Types<G, P, float, W>, false>(plan, tensors, count, no_extra(), stream);
  } else {
    launch_adam<Types<G, P, bf16, W>, false>(plan, tensors, count, no_extra(), stream);
  }
}

template <class W>
void step_bf16(const te_adam_plan& plan, Tensors tensors, int64_t count, te_stream stream) {
  if (plan.grad == TE_FLOAT32) {
    step<float, bf16, W>(plan, tensors, count, stream);
  } else {
    step<bf16, bf16, W>(plan, tensors, count, stream);
  }
}

}  // namespace

void adam(const te_adam_plan& plan, Tensors tensors, const te_adam_scales* scales, int64_t count, te_stream stream) {
  const bool moments = plan.exp_avg == plan.exp_avg_sq && (plan.exp_avg == TE_FLOAT32 || plan.exp_avg == TE_BFLOAT16);
  const bool grad_bf16 = plan.grad == TE_FLOAT32 || plan.grad == TE_BFLOAT16;
  if (moments && plan.master == TE_MASTER_NONE && plan.param == TE_FLOAT32 && plan.grad == TE_FLOAT32) {
    step<float, float, Absent>(plan, tensors, count, stream);
  } else if (moments && grad_bf16 && plan.master == TE_MASTER_FLOAT32 && plan.param == TE_BFLOAT16) {
    step_bf16<float>(plan, tensors, count, stream);
  } else if (moments && grad_bf16 && plan.master == TE_MASTER_NONE && plan.param == TE_BFLOAT16) {
    step_bf16<Absent>(plan, tensors, count, stream);
  } else if (moments && grad_bf16 && plan.master == TE_MASTER_REMAINDER) {
    step_bf16<Remainder>(plan, tensors, count, stream);
  } else {
    adam_any(plan, tensors, scales, count, stream);
  }
}

}  // namespace te::optimizer::cuda
