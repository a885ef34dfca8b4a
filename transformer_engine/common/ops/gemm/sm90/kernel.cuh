// The persistent, warp-specialised Hopper kernel of grouped products, one for all of them; a KernelTraits class
// locates operands and results and runs the main loop and the epilogue.
// - Each CTA makes the table of tile pairs from the offsets and walks its share of them: one producer thread loads, two
//   consumer warpgroups multiply.
// - The two CTAs of a cluster walk the pairs together. No cluster waits for another.
#pragma once

#include "ops/gemm/sm90/epilogue.cuh"
#include "ops/gemm/sm90/pipeline.cuh"
#include "ops/gemm/sm90/staging.cuh"

namespace te::gemm::sm90 {

// Of 512 registers for a lane of each scheduler: loads need few; 128 accumulators and an epilogue need many.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

struct NoBoxes {};  // of kernels that store results from registers
struct Boxes {
  BoxPipeline boxes;
};

template <class Traits>
struct SharedStorage : std::conditional_t<Traits::kStaged, Boxes, NoBoxes> {
  typename Traits::Pipeline pipeline;
  WorkTilePipeline work_tiles;
  RowRange ranges[kLaunchGroups];     // of the operands, for each group
  int32_t before[kLaunchGroups + 1];  // pairs of tiles before each group; all of them
};
template <class Traits>
constexpr int kSharedBytes = int(sizeof(SharedStorage<Traits>)) + kSharedAlignment;  // for any start

__device__ __forceinline__ int32_t sum_up_to(int32_t most, int32_t a, int32_t b) { return b < most - a ? a + b : most; }

// before[g], the count of each group, becomes `start` plus the counts before it; no sum exceeds `most`. By the first
// warp.
__device__ inline void sum_up(int32_t* before, int32_t groups, int32_t start, int32_t most) {
  const int lane = int(threadIdx.x);
  int32_t sum = start;
  for (int32_t first = 0; first < groups; first += 32) {
    const int32_t group = first + lane;
    int32_t up_to = group < groups ? sum_up_to(most, 0, before[group]) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t left = __shfl_up_sync(kFullWarp, up_to, step);
      if (lane >= step) up_to = sum_up_to(most, up_to, left);
    }
    const int32_t left = __shfl_up_sync(kFullWarp, up_to, 1);
    if (group < groups) before[group] = sum_up_to(most, sum, lane == 0 ? 0 : left);
    sum = sum_up_to(most, sum, __shfl_sync(kFullWarp, up_to, 31));
  }
  if (lane == 0) before[groups] = sum;
}

// Whether a consumer has results in a tile. Both consumers clear the tail of K together, so there they have the same
// answer.
template <class TileConfig>
__device__ __forceinline__ bool has_results(const WorkTile& tile, int consumer) {
  const int first = TileConfig::kClearsTailK ? 0 : consumer * TileConfig::TileShape::kConsumerM;
  return int64_t(tile.m) + first < tile.m_end && tile.n < tile.n_end;
}

// ---- staged results ----

template <class Traits, class R>
using StagingOf = Staging<typename Traits::TileConfig::TileShape, R>;

// By the producer, after a tile's k_blocks.
template <class Traits>
__device__ __forceinline__ void reserve_results(SharedStorage<Traits>& shared, PipelineState& state,
                                                const typename Traits::Params& p, int32_t group, const WorkTile& tile,
                                                int rank) {
  Traits::with_staged(p, group, [&](auto type) {
    using S = StagingOf<Traits, decltype(type)>;
    if constexpr (S::kAdds) {
      load_old_results<S>(shared.pipeline, shared.boxes, state, Traits::output_map(p, group), tile);
    } else {
      reserve_result_stages(shared.pipeline, state, S::kStages, rank);
    }
  });
}

// By a consumer.
template <class Traits>
__device__ __forceinline__ void stage_results(
    SharedStorage<Traits>& shared, PipelineState& state, const typename Traits::Params& p,
    const WorkTilePipeline::GroupTile& done, int consumer, int rank,
    float (&accum)[Traits::TileConfig::TileShape::kMmaAtoms][Traits::TileConfig::TileShape::kFragment]) {
  Traits::with_staged(p, done.group, [&](auto type) {
    using R = decltype(type);
    using S = StagingOf<Traits, R>;
    wait_for_result_stages(shared.pipeline, state, S::kStages);
    BoxState box_state = shared.boxes.states[warp_of_consumers()];
#pragma unroll
    for (int atom = 0; atom < Traits::TileConfig::TileShape::kMmaAtoms; ++atom) {
      Traits::template add_group_bias<R>(p, done.group, done.tile, accum[atom]);
      stage_accum<S, R>(shared.pipeline, shared.boxes, box_state, state, consumer, rank, atom, accum[atom]);
    }
    keep(shared.boxes, box_state);
    state.count += uint32_t(S::kStages);
  });
}

// By a consumer without results in a tile.
template <class Traits>
__device__ __forceinline__ void skip_results(SharedStorage<Traits>& shared, PipelineState& state,
                                             const typename Traits::Params& p, int32_t group, int consumer, int rank) {
  Traits::with_staged(p, group, [&](auto type) {
    constexpr int kReserved = StagingOf<Traits, decltype(type)>::kStages;
    pass_boxes(shared.pipeline, shared.boxes, state, kReserved, consumer, rank);
    state.count += uint32_t(kReserved);
  });
}

// By a storing warp.
template <class Traits>
__device__ __forceinline__ void run_storer(SharedStorage<Traits>& shared, const typename Traits::Params& p, int rank,
                                           int consumer) {
  const int lane = int(threadIdx.x) % 32;
  PipelineState state, tile_state;
  BoxState box_state;
  while (true) {
    const WorkTilePipeline::GroupTile& work = shared.work_tiles.wait(tile_state);
    if (work.group < 0) break;
    state.count += uint32_t(work.tile.k_blocks);
    Traits::with_staged(p, work.group, [&](auto type) {
      using S = StagingOf<Traits, decltype(type)>;
      if (has_results<typename Traits::TileConfig>(work.tile, consumer)) {
        store_boxes<S>(shared.pipeline, shared.boxes, box_state, state, Traits::output_map(p, work.group), work.tile,
                       consumer, rank, lane);
      } else {
        wait_for_box(shared.boxes, box_state, consumer);
        pass_result_stages(shared.pipeline, state, S::kStages, lane);
      }
      state.count += uint32_t(S::kStages);
    });
    shared.work_tiles.release(tile_state, rank);
  }
  bulk_wait();
}

// ---- the roles of warps ----

template <class Traits>
__device__ __forceinline__ void run_producer(SharedStorage<Traits>& shared, const typename Traits::Params& p,
                                             int rank) {
  const int32_t groups = p.common.groups, count = shared.before[groups], pairs_n = Traits::pairs_n(p);
  const int32_t clusters = int32_t(gridDim.x) / kCluster;
  PipelineState state, tile_state;
  for (int32_t number = int32_t(blockIdx.x) / kCluster; number < count; number += clusters) {
    const PairCoord at = pair_coord(shared.before, groups, pairs_n, number);
    const WorkTile tile = Traits::work_tile(p, at, rank, shared.ranges[at.group]);
    const auto& pushed = shared.work_tiles.push(tile_state, rank, at.group, tile);
    Traits::produce(shared.pipeline, state, p, at.group, pushed.tile, rank);  // reads the tile from shared memory
    if constexpr (Traits::kStaged) reserve_results<Traits>(shared, state, p, at.group, pushed.tile, rank);
  }
  shared.work_tiles.push(tile_state, rank, -1, {});
}

template <class Traits>
__device__ __forceinline__ void run_consumer(SharedStorage<Traits>& shared, const typename Traits::Params& p, int rank,
                                             int consumer) {
  using TileConfig = typename Traits::TileConfig;
  using TileShape = typename TileConfig::TileShape;
  PipelineState state, tile_state;
  Traits::open(consumer);
  while (true) {
    const WorkTilePipeline::GroupTile& work = shared.work_tiles.wait(tile_state);
    if (work.group < 0) break;
    if (!has_results<TileConfig>(work.tile, consumer)) {
      Traits::skip(shared.pipeline, state, work.tile, consumer);
      if constexpr (Traits::kStaged) skip_results<Traits>(shared, state, p, work.group, consumer, rank);
    } else {
      float accum[TileShape::kMmaAtoms][TileShape::kFragment];
      Traits::consume(shared.pipeline, state, p, work.group, work.tile, consumer, accum);
      // Read after the main loop, which needs the registers; staged, its address is found again as well.
      if constexpr (Traits::kStaged) hide_value(tile_state.count);
      const WorkTilePipeline::GroupTile done = Traits::kStaged ? shared.work_tiles.tiles[tile_state.index()] : work;
      if constexpr (Traits::kStaged) {
        stage_results<Traits>(shared, state, p, done, consumer, rank, accum);
      } else {
#pragma unroll
        for (int atom = 0; atom < TileShape::kMmaAtoms; ++atom) {
          Traits::epilogue(p, done.group, done.tile, consumer * TileShape::kConsumerM + atom * kMmaAtomM, accum[atom]);
        }
      }
    }
    shared.work_tiles.release(tile_state, rank);
  }
  Traits::close(consumer);
}

template <class Traits>
__global__ void __launch_bounds__(kThreads, 1) __cluster_dims__(kCluster, 1, 1)
    grouped_kernel(const __grid_constant__ typename Traits::Params p) {
  constexpr int kStorers = Traits::kStaged ? kConsumers : 0;
  unsigned char* memory = shared_memory();
  const uint32_t past = shared_address(memory) % kSharedAlignment;
  auto& shared = *reinterpret_cast<SharedStorage<Traits>*>(memory + (past == 0 ? 0 : kSharedAlignment - past));
  Traits::find_ranges(shared.ranges, shared.before, p);
  for (int32_t g = int32_t(threadIdx.x); g < p.common.groups; g += kThreads) {
    shared.before[g] = Traits::pairs(p, g, shared.ranges[g]);
  }
  if (threadIdx.x == 0) {
    shared.work_tiles.init_barriers(kConsumers * kWarps + kStorers);
    if constexpr (Traits::kStaged) shared.boxes.init_barriers();
    shared.pipeline.init_barriers();
  }
  __syncthreads();
  if (threadIdx.x < 32) sum_up(shared.before, p.common.groups, 0, kMostPairs);
  __syncthreads();
  cluster_sync();  // the other CTA's barriers are initialised
  const int rank = int(cluster_rank());
  if (threadIdx.x < kWarpgroup) {
    warpgroup_reg_dealloc<kProducerRegisters>();
    if (threadIdx.x == 0) run_producer<Traits>(shared, p, rank);
    if constexpr (Traits::kStaged) {
      const int warp = int(threadIdx.x) / 32;
      if (warp > 0 && warp <= kStorers) run_storer<Traits>(shared, p, rank, warp - 1);
    }
    constexpr int kBusy = 32 * (1 + kStorers);
    if (threadIdx.x >= kBusy) Traits::run_idle_warps(p, int(threadIdx.x) - kBusy, kWarpgroup - kBusy);
  } else {
    warpgroup_reg_alloc<kConsumerRegisters>();
    run_consumer<Traits>(shared, p, rank, int(threadIdx.x) / kWarpgroup - 1);
  }
  cluster_sync();  // the other CTA may still write to the shared memory of this CTA
}

}  // namespace te::gemm::sm90
