// grouped gemm of FP8 operands, CUDA path: the kernels of WGRAD whose results are staged.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits_fp8.cuh"

namespace te::gemm::grouped::cuda {

void Gpu::staged_wgrad_fp8(const StagedFp8WgradParams& params, int32_t ctas) const {
  using Panels = PanelScales<Fp8WgradParams>;
  if (scaling == TE_SCALING_BLOCK_1D) {
    if (operands == TE_FLOAT8_E4M3) return start<StagedFp8WgradKernelTraits<e4m3, Panels>>(params, ctas);
    return start<StagedFp8WgradKernelTraits<e5m2, Panels>>(params, ctas);
  }
  if (operands == TE_FLOAT8_E4M3) return start<StagedFp8WgradKernelTraits<e4m3, GroupScale>>(params, ctas);
  start<StagedFp8WgradKernelTraits<e5m2, GroupScale>>(params, ctas);
}

}  // namespace te::gemm::grouped::cuda
