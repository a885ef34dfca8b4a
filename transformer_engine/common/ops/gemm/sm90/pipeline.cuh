// Pipelines between a CTA's producer thread and its consumer warpgroups: stages in shared memory with a full and an
// empty barrier each.
#pragma once

#if !defined(TE_EMULATED_GPU)  // the emulation of tests/cpp defines functions of the same names
#include "ops/gemm/sm90/ptx.cuh"
#endif
#include "ops/gemm/sm90/config.h"
#include "ops/gemm/sm90/scheduler.h"

namespace te::gemm::sm90 {

// A position in a pipeline. Full and empty barriers complete once a round; the empty barriers count as completed before
// the first round.
struct PipelineState {
  uint32_t count = 0;
  static_assert((kStages & (kStages - 1)) == 0, "the count may wrap around");
  TE_HOST_DEVICE int index() const { return int(count % kStages); }
  TE_HOST_DEVICE uint32_t full_phase() const { return count / kStages & 1u; }
  TE_HOST_DEVICE uint32_t empty_phase() const { return full_phase() ^ 1u; }
  TE_HOST_DEVICE void advance() { ++count; }
};

// Operand tiles; aligned to kSharedAlignment. The CTAs of a cluster go through their stages in step: each loads half of
// the shared operand for both, so a stage is empty after the consumers of both have released it.
struct SmemPipeline {
  unsigned char stages[kStages][kStageBytes];
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // By one thread, before any other thread of the cluster uses the pipeline.
  __device__ void init_barriers() {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kConsumers * kWarps * kCluster);  // each consumer warp arrives in both CTAs
    }
    barrier_init_fence();
  }

  // By all lanes of a warp, after its last read of the stage.
  __device__ void release(int stage) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < kCluster) barrier_arrive(&empty[stage], lane);
  }
};

// With a scale for each row and column of a tile in each stage.
struct ScaledSmemPipeline : SmemPipeline {
  alignas(16) float scales[kStages][Fp8TileShape::kM + Fp8TileShape::kN];
};

// Work tiles, which the producer computes some tiles ahead of the loads. Consumers read them instead of repeating the
// search, and need no registers for them.
struct WorkTilePipeline {
  struct GroupTile {
    int32_t group;  // negative: no tile is left
    WorkTile tile;
  };
  GroupTile tiles[kStages];
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // `readers`: warps that read each tile.
  __device__ void init_barriers(int readers) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], uint32_t(readers));
    }
  }
  __device__ __forceinline__ const GroupTile& push(PipelineState& state, int rank, int32_t group,
                                                   const WorkTile& tile) {
    const int stage = state.index();
    barrier_wait(&empty[stage], state.empty_phase());
    tiles[stage] = {group, tile};
    barrier_arrive(&full[stage], uint32_t(rank));
    state.advance();
    return tiles[stage];
  }
  __device__ __forceinline__ const GroupTile& wait(const PipelineState& state) {
    barrier_wait(&full[state.index()], state.full_phase());
    return tiles[state.index()];
  }
  // By all lanes of a warp, after its last read of the tile.
  __device__ __forceinline__ void release(PipelineState& state, int rank) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(&empty[state.index()], uint32_t(rank));
    state.advance();
  }
};

// Lets the two consumers issue MMAs in turns, beginning with the first. open() and close() supply the arrival before
// the first wait and the wait after the last arrival.
struct OrderedSequence {
  int consumer;
  static constexpr int kThreads = kConsumers * kWarpgroup;

  __device__ void open() const {
    if (consumer == 1) arrive();
  }
  __device__ void wait() const { named_barrier(kOrderBarrier + consumer, kThreads); }
  __device__ void arrive() const { named_barrier_arrive(kOrderBarrier + 1 - consumer, kThreads); }
  __device__ void close() const {
    if (consumer == 0) wait();
  }
};

}  // namespace te::gemm::sm90
