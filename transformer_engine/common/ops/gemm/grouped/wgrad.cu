// grouped gemm, CUDA path: the kernels of WGRAD, results of float32 and of the operands' dtype.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits.cuh"

namespace te::gemm::grouped::cuda {

void Gpu::wgrad(const WgradParams& params, bool float_results, int32_t ctas) const {
  if (operands == TE_BFLOAT16) {
    if (float_results) return start<WgradKernelTraits<bf16, float>>(params, ctas, *this);
    return start<WgradKernelTraits<bf16, bf16>>(params, ctas, *this);
  }
  if (float_results) return start<WgradKernelTraits<fp16, float>>(params, ctas, *this);
  start<WgradKernelTraits<fp16, fp16>>(params, ctas, *this);
}

}  // namespace te::gemm::grouped::cuda
