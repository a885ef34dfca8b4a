// grouped gemm, CUDA path: the kernels of DGRAD.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits.cuh"

namespace te::gemm::grouped::cuda {

void Gpu::dgrad(const RowParams& params, int32_t ctas) const {
  if (operands == TE_BFLOAT16) return start<RowKernelTraits<bf16, sm90::Major::kMN>>(params, ctas, *this);
  start<RowKernelTraits<fp16, sm90::Major::kMN>>(params, ctas, *this);
}

}  // namespace te::gemm::grouped::cuda
