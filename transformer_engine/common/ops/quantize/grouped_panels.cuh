// te_grouped_panels, the kernel: one warp counts the panels of all groups, since there are a few hundred at most.
#pragma once

#include "ops/quantize/grouped_walk.h"

namespace te::quantize::grouped {

constexpr int kCountingThreads = 32;

__global__ void panels_kernel(const int32_t* offsets, int32_t groups, int32_t* panels) {
  uint32_t sum = 0;
  for (int32_t g = int32_t(threadIdx.x); g < groups; g += kCountingThreads) sum += panels_between(offsets, g);
#pragma unroll
  for (int step = kCountingThreads / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x == 0) *panels = int32_t(sum);
}

}  // namespace te::quantize::grouped
