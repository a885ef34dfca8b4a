// grouped gemm of FP8 operands, CUDA path: the kernels of FPROP and DGRAD whose results are staged.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits_fp8.cuh"

namespace te::gemm::grouped::cuda {

void Gpu::staged_rows_fp8(const StagedFp8RowParams& params, int32_t ctas) const {
  if (scaling == TE_SCALING_BLOCK_1D) {
    if (operands == TE_FLOAT8_E4M3) return start<StagedFp8RowKernelTraits<e4m3, BlockScales>>(params, ctas);
    return start<StagedFp8RowKernelTraits<e5m2, BlockScales>>(params, ctas);
  }
  if (operands == TE_FLOAT8_E4M3) return start<StagedFp8RowKernelTraits<e4m3, GroupScale>>(params, ctas);
  start<StagedFp8RowKernelTraits<e5m2, GroupScale>>(params, ctas);
}

}  // namespace te::gemm::grouped::cuda
