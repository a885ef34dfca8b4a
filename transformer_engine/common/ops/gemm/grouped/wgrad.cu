// grouped gemm, CUDA path: the kernels of WGRAD, results of float32 and of the operands' dtype.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits.cuh"

namespace te::gemm::grouped::cuda {

void launch_wgrad(te_dtype operands, bool float_results, const WgradParams& params, const Launch& launch) {
  if (operands == TE_BFLOAT16) {
    if (float_results) return start<WgradKernelTraits<bf16, float>>(params, launch);
    return start<WgradKernelTraits<bf16, bf16>>(params, launch);
  }
  if (float_results) return start<WgradKernelTraits<fp16, float>>(params, launch);
  start<WgradKernelTraits<fp16, fp16>>(params, launch);
}

}  // namespace te::gemm::grouped::cuda
