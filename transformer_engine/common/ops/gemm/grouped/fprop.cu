// grouped gemm, CUDA path: the kernels of FPROP.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits.cuh"

namespace te::gemm::grouped::cuda {

void launch_fprop(te_dtype operands, const RowParams& params, const Launch& launch) {
  if (operands == TE_BFLOAT16) return start<RowKernelTraits<bf16, sm90::Major::kK>>(params, launch);
  start<RowKernelTraits<fp16, sm90::Major::kK>>(params, launch);
}

}  // namespace te::gemm::grouped::cuda
