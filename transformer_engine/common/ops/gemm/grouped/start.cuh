// Launches a grouped kernel, on a stream that may be capturing.
#pragma once

#include <atomic>

#include "core/device.h"
#include "ops/gemm/grouped/gpu.h"
#include "ops/gemm/sm90/kernel.cuh"

namespace te::gemm::grouped {

namespace cuda {

// The kernel's shared memory is above the default limit, which is raised once on each device, also during a capture.
template <class Traits>
void start(const typename Traits::Params& params, int32_t ctas, const Gpu& gpu) {
  static std::atomic<uint64_t> ready{0};
  const uint64_t bit = uint64_t(1) << (gpu.device % 64);
  if ((ready.load(std::memory_order_acquire) & bit) == 0) {
    const RelaxedCapture relaxed;
    check_cuda(
        cudaFuncSetAttribute(grouped_kernel<Traits>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Traits>),
        "te_grouped_gemm");
    ready.fetch_or(bit, std::memory_order_release);
  }
  grouped_kernel<Traits><<<ctas, sm90::kThreads, kSharedBytes<Traits>, cudaStream_t(gpu.stream)>>>(params);
  check_launch("te_grouped_gemm");
}

}  // namespace cuda

}  // namespace te::gemm::grouped
