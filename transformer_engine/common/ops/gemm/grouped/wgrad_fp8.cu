// grouped gemm of FP8 operands, CUDA path: the kernels of WGRAD.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits_fp8.cuh"

namespace te::gemm::grouped::cuda {

void Gpu::wgrad_fp8(const Fp8WgradParams& params, int32_t ctas) const {
  if (scaling == TE_SCALING_BLOCK_1D) {
    if (operands == TE_FLOAT8_E4M3) return start<Fp8WgradKernelTraits<e4m3, PanelScales<Fp8WgradParams>>>(params, ctas);
    return start<Fp8WgradKernelTraits<e5m2, PanelScales<Fp8WgradParams>>>(params, ctas);
  }
  if (operands == TE_FLOAT8_E4M3) return start<Fp8WgradKernelTraits<e4m3, GroupScale>>(params, ctas);
  start<Fp8WgradKernelTraits<e5m2, GroupScale>>(params, ctas);
}

}  // namespace te::gemm::grouped::cuda
