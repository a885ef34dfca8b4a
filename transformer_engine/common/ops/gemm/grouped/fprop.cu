// grouped gemm, CUDA path: the kernels of FPROP.
#include "ops/gemm/grouped/start.cuh"

namespace te::gemm::grouped::cuda {

void launch_fprop(te_dtype operands, const RowParams& params, const Launch& launch) {
  if (operands == TE_BFLOAT16) return start<RowJob<bf16, wgmma::Major::kDepth>>(params, launch);
  start<RowJob<fp16, wgmma::Major::kDepth>>(params, launch);
}

}  // namespace te::gemm::grouped::cuda
