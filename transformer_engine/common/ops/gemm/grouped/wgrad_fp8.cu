// grouped gemm of FP8 operands, CUDA path: the kernels of WGRAD.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits_fp8.cuh"

namespace te::gemm::grouped::cuda {

void launch_wgrad_fp8(te_dtype rows, te_scaling scaling, const Fp8WgradParams& params, const Launch& launch) {
  if (scaling == TE_SCALING_BLOCK_1D) {
    if (rows == TE_FLOAT8_E4M3) return start<Fp8WgradKernelTraits<e4m3, PanelScales<Fp8WgradParams>>>(params, launch);
    return start<Fp8WgradKernelTraits<e5m2, PanelScales<Fp8WgradParams>>>(params, launch);
  }
  if (rows == TE_FLOAT8_E4M3) return start<Fp8WgradKernelTraits<e4m3, GroupScale>>(params, launch);
  start<Fp8WgradKernelTraits<e5m2, GroupScale>>(params, launch);
}

}  // namespace te::gemm::grouped::cuda
