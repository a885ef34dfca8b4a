// grouped gemm, CUDA path: the kernels of DGRAD.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits.cuh"

namespace te::gemm::grouped::cuda {

void launch_dgrad(te_dtype operands, const RowParams& params, const Launch& launch) {
  if (operands == TE_BFLOAT16) return start<RowKernelTraits<bf16, sm90::Major::kMN>>(params, launch);
  start<RowKernelTraits<fp16, sm90::Major::kMN>>(params, launch);
}

}  // namespace te::gemm::grouped::cuda
