// The launch of a grouped kernel (gpu.h).
#pragma once

#include <atomic>
#include <type_traits>

#include "core/device.h"
#include "ops/gemm/grouped/gpu.h"
#include "ops/gemm/sm90/kernel.cuh"

namespace te::gemm::grouped {

namespace cuda {

// The kernel's shared memory is above the default limit, which is raised once on each device, also during a capture.
template <class Traits, class Params>
void Gpu::start(const Params& params, int32_t ctas) const {
  static_assert(std::is_same_v<Params, typename Traits::Params>);
  static std::atomic<uint64_t> ready{0};
  const uint64_t bit = uint64_t(1) << (device % 64);
  if ((ready.load(std::memory_order_acquire) & bit) == 0) {
    const RelaxedCapture relaxed;
    check_cuda(
        cudaFuncSetAttribute(grouped_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Traits>),
        "te_grouped_gemm");
    ready.fetch_or(bit, std::memory_order_release);
  }
  grouped_kernel<Traits><<<ctas, sm90::kThreads, kSharedBytes<Traits>, cudaStream_t(stream)>>>(params);
  check_launch("te_grouped_gemm");
}

}  // namespace cuda

}  // namespace te::gemm::grouped
