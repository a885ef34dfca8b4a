// Starts a grouped kernel, on a stream that may be capturing.
#pragma once

#include <atomic>

#include "core/device.h"
#include "ops/gemm/sm90/kernel.cuh"

namespace te::gemm::grouped {

namespace cuda {

// More shared memory than a kernel has unasked is asked for once on each device, also in the middle of a capture.
template <class Job>
void start(const typename Job::Params& params, const Launch& launch) {
  static std::atomic<uint64_t> ready{0};
  const uint64_t bit = uint64_t(1) << (launch.device % 64);
  if ((ready.load(std::memory_order_acquire) & bit) == 0) {
    const RelaxedCapture relaxed;
    check_cuda(
        cudaFuncSetAttribute(grouped_kernel<Job>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes<Job>),
        "te_grouped_gemm");
    ready.fetch_or(bit, std::memory_order_release);
  }
  grouped_kernel<Job><<<launch.blocks, wgmma::kThreads, kSharedBytes<Job>, cudaStream_t(launch.stream)>>>(params);
  check_launch("te_grouped_gemm");
}

}  // namespace cuda

}  // namespace te::gemm::grouped
