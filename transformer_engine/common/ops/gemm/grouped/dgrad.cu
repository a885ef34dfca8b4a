// grouped gemm, CUDA path: the kernels of DGRAD.
#include "ops/gemm/grouped/start.cuh"
#include "ops/gemm/grouped/traits.cuh"

namespace te::gemm::grouped::cuda {

template void Gpu::start<RowKernelTraits<bf16, Major::kMN, EachWeight>>(const RowParams<EachWeight>&, int32_t) const;
template void Gpu::start<RowKernelTraits<bf16, Major::kMN, StackedWeights>>(const RowParams<StackedWeights>&,
                                                                            int32_t) const;
template void Gpu::start<RowKernelTraits<fp16, Major::kMN, EachWeight>>(const RowParams<EachWeight>&, int32_t) const;
template void Gpu::start<RowKernelTraits<fp16, Major::kMN, StackedWeights>>(const RowParams<StackedWeights>&,
                                                                            int32_t) const;

}  // namespace te::gemm::grouped::cuda
