// grouped gemm, CUDA path: the kernels of WGRAD, results of float32 and of the operands' dtype.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits.cuh"

namespace te::gemm::grouped::cuda {

template void Gpu::start<WgradKernelTraits<bf16, float>>(const WgradParams&, int32_t) const;
template void Gpu::start<WgradKernelTraits<bf16, bf16>>(const WgradParams&, int32_t) const;
template void Gpu::start<WgradKernelTraits<fp16, float>>(const WgradParams&, int32_t) const;
template void Gpu::start<WgradKernelTraits<fp16, fp16>>(const WgradParams&, int32_t) const;

}  // namespace te::gemm::grouped::cuda
