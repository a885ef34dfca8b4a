// te_grouped_offsets, CUDA path: one warp scans the splits, 32 at a time, since there are a few hundred at most.
// te_grouped_offsets_of: the host has computed the offsets, which a kernel's parameters carry.
#include <algorithm>

#include "core/device.h"
#include "ops/gemm/grouped/problem.h"

namespace te::gemm::grouped::cuda {

namespace {

constexpr int kLanes = 32;
constexpr unsigned kAll = 0xffffffffu;

// Atomic, since calls on other streams may add too.
__device__ void count(uint32_t* counter, int64_t more) {
  if (more == 0) return;
  for (uint32_t seen = *counter, was;; seen = was) {
    was = atomicCAS(counter, seen, add_count(seen, more));
    if (was == seen) return;
  }
}

__global__ void offsets_kernel(Splits s, int32_t* offsets, uint32_t* counters) {
  const int lane = int(threadIdx.x);
  int64_t before = 0, negatives = 0;  // of earlier chunks
  if (lane == 0) offsets[0] = 0;
  for (int64_t first = 0; first < s.groups; first += kLanes) {
    const int64_t group = first + lane;
    const int64_t split = group < s.groups ? split_at(s, int32_t(group)) : 0;
    int64_t sum = live_split(split);
    for (int step = 1; step < kLanes; step *= 2) {
      const int64_t left = __shfl_up_sync(kAll, sum, step);
      if (lane >= step) sum = add_splits(left, sum);
    }
    sum = add_splits(before, sum);
    if (group < s.groups) offsets[group + 1] = int32_t(at_most(sum, s.rows));
    before = __shfl_sync(kAll, sum, kLanes - 1);
    negatives += __popc(__ballot_sync(kAll, split < 0));
  }
  if (lane != 0 || counters == nullptr) return;
  count(counters, negatives);
  count(counters + 1, before > s.rows ? before - s.rows : 0);
}

constexpr int kValues = 1000, kWriters = 128;
struct Values {
  int32_t* to;
  int32_t count;
  int32_t of[kValues];
};

__global__ void write_kernel(const __grid_constant__ Values values) {
  for (int i = int(threadIdx.x); i < values.count; i += kWriters) values.to[i] = values.of[i];
}

}  // namespace

void offsets(const Splits& splits, int32_t* offsets, uint32_t* counters, te_stream stream) {
  offsets_kernel<<<1, kLanes, 0, cudaStream_t(stream)>>>(splits, offsets, counters);
  check_launch("te_grouped_offsets");
}

void write_offsets(const int32_t* values, int32_t count, int32_t* offsets, te_stream stream) {
  for (int32_t first = 0; first < count; first += kValues) {
    Values part{offsets + first, std::min(count - first, kValues), {}};
    std::copy_n(values + first, part.count, part.of);
    write_kernel<<<1, kWriters, 0, cudaStream_t(stream)>>>(part);
    check_launch("te_grouped_offsets_of");
  }
}

}  // namespace te::gemm::grouped::cuda
