// Results that leave by TMA while the next tile is multiplied. After a tile's last k_block the producer reserves
// pipeline stages for its results, with the old values in them where results are added to. The consumers write boxes of
// results there; a storing warp for each consumer copies each box to memory at once, and releases the stages to later
// k_blocks. All results of a launch are staged, or none: kernels without staging keep their registers and code.
#pragma once

#include "ops/gemm/sm90/epilogue.cuh"
#include "ops/gemm/sm90/pipeline.cuh"

namespace te::gemm::sm90 {

// Each side of a BoxPipeline counts the boxes.
struct BoxState {
  uint32_t boxes = 0, own_boxes = 0;
};

// Boxes on their way from a consumer to its storing warp.
struct BoxPipeline {
  alignas(kSharedAlignment) unsigned char own[kConsumers][kBoxBytes];
  static constexpr int kDepth = 32;  // boxes of the work tiles that a consumer can be ahead
  uint64_t written[kConsumers][kDepth];
  uint64_t own_empty[kConsumers];
  BoxState states[kConsumers * kWarps];  // of the consumers' warps, whose registers the main loop needs

  __device__ void init_barriers() {
    for (BoxState& state : states) state = {};
    for (int consumer = 0; consumer < kConsumers; ++consumer) {
      for (uint64_t& barrier : written[consumer]) barrier_init(&barrier, kWarps);
      barrier_init(&own_empty[consumer], 1);
    }
  }
};

// The boxes of a consumer's results: 128 bytes of an MMA atom's rows each, with the 128-byte swizzle; three boxes of
// each consumer fit into a stage. Float results are staged where they are added to old values, which are loaded into
// the reserved stages. Two-byte results are staged where they are not: their first box is the consumer's own one, so
// that one stage is enough. The others are faster from registers. (H200, block scales, E128 512x1536x2048: float = 0.92
// of the time from registers, E8 2048x28672x4096 the same time.)
template <class TileShape, class R>
struct Staging {
  static constexpr bool kAdds = sizeof(R) == 4;
  static constexpr int kCols = kSwizzleRow / int(sizeof(R));  // of a box
  static constexpr int kAcross = TileShape::kN / kCols;       // boxes of an MMA atom
  static constexpr int kBoxes = TileShape::kMmaAtoms * kAcross;
  static constexpr int kPlaces = kStageBytes / kConsumers / kBoxBytes;  // for boxes of one consumer in a stage
  static constexpr int kOwn = kAdds ? 0 : 1;
  static constexpr int kStages = (kBoxes - kOwn + kPlaces - 1) / kPlaces;
  static_assert(kStages < sm90::kStages);
  static_assert(kBoxes * sm90::kStages <= BoxPipeline::kDepth, "a phase of `written` ends before it is waited for");

  static constexpr __device__ bool is_own(int box) { return box < kOwn; }
  static constexpr __device__ int place(int box) { return box - kOwn; }  // in reserved stages
  static constexpr __device__ bool ends_stage(int box) {
    return !is_own(box) && (place(box) % kPlaces == kPlaces - 1 || box == kBoxes - 1);
  }
  // `first`: the first reserved stage.
  static __device__ __forceinline__ unsigned char* address(SmemPipeline& pipeline, BoxPipeline& boxes,
                                                           PipelineState first, int consumer, int box) {
    if (is_own(box)) return boxes.own[consumer];
    first.count += uint32_t(place(box) / kPlaces);
    return pipeline.stages[first.index()] + (consumer * kPlaces + place(box) % kPlaces) * kBoxBytes;
  }
  // The rows and columns of a box that have results; no rows where there are none.
  static __device__ __forceinline__ ResultBox at(const WorkTile& tile, int consumer, int box) {
    const int64_t row = int64_t(tile.m) + consumer * TileShape::kConsumerM + box / kAcross * kMmaAtomM;
    const int64_t col = int64_t(tile.n) + box % kAcross * kCols, rows = tile.m_end - row;
    const bool live = rows > 0 && col < tile.n_end;
    return {int32_t(col), int32_t(row), live ? int32_t(rows < kMmaAtomM ? rows : kMmaAtomM) : 0};
  }
};

__device__ __forceinline__ int warp_of_consumers() { return read_thread_idx() / 32 - kWarps; }
// By all lanes of a consumer's warp, before a barrier of the warp.
__device__ __forceinline__ void keep(BoxPipeline& boxes, const BoxState& state) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) boxes.states[warp_of_consumers()] = state;
}

// By all lanes of a consumer's warp, after its last write to a box; also where a tile has no results, as one box.
__device__ __forceinline__ void push_box(BoxPipeline& boxes, BoxState& state, int consumer, int rank, int thread) {
  fence_async_proxy();
  __syncwarp();
  if (thread % 32 == 0) barrier_arrive(&boxes.written[consumer][state.boxes % BoxPipeline::kDepth], uint32_t(rank));
  ++state.boxes;
}
__device__ __forceinline__ void wait_for_box(BoxPipeline& boxes, BoxState& state, int consumer) {
  barrier_wait(&boxes.written[consumer][state.boxes % BoxPipeline::kDepth], state.boxes / BoxPipeline::kDepth & 1u);
  ++state.boxes;
}

// By the producer: reserves the stages of a tile's results.
__device__ __forceinline__ void reserve_result_stages(SmemPipeline& pipeline, PipelineState& state, int stages,
                                                      int rank) {
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    barrier_wait(&pipeline.empty[state.index()], state.empty_phase());
    barrier_arrive(&pipeline.full[state.index()], uint32_t(rank));
    state.advance();
  }
}
template <class S>
__device__ __forceinline__ void load_old_results(SmemPipeline& pipeline, BoxPipeline& boxes, PipelineState& state,
                                                 const CUtensorMap* map, const WorkTile& tile) {
  const PipelineState first = state;
#pragma unroll 1
  for (int box = 0; box < S::kBoxes;) {
    uint64_t* full = &pipeline.full[state.index()];
    barrier_wait(&pipeline.empty[state.index()], state.empty_phase());
    uint32_t bytes = 0;
#pragma unroll 1
    for (const int end = box + S::kPlaces; box < end && box < S::kBoxes; ++box) {
#pragma unroll 1
      for (int consumer = 0; consumer < kConsumers; ++consumer) {
        const ResultBox at = S::at(tile, consumer, box);
        if (at.rows == 0) continue;
        tma_load_results(S::address(pipeline, boxes, first, consumer, box), map, full, at);
        bytes += kBoxBytes;
      }
    }
    barrier_expect(full, bytes);
    state.advance();
  }
}

// By a consumer, before it writes to them, and also if it has no results: `state` must not run ahead of the phases.
__device__ __forceinline__ void wait_for_result_stages(SmemPipeline& pipeline, PipelineState state, int stages) {
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    barrier_wait(&pipeline.full[state.index()], state.full_phase());
    state.advance();
  }
}

// By a consumer without results in a tile.
__device__ __forceinline__ void pass_boxes(SmemPipeline& pipeline, BoxPipeline& boxes, PipelineState state, int stages,
                                           int consumer, int rank) {
  wait_for_result_stages(pipeline, state, stages);
  BoxState box_state = boxes.states[warp_of_consumers()];
  push_box(boxes, box_state, consumer, rank, read_thread_idx());
  keep(boxes, box_state);
}

// Two neighbouring results in shared memory.
template <class R>
struct alignas(2 * sizeof(R)) ResultPair {
  R low, high;
};
template <bool kAdd, class R>
__device__ __forceinline__ void stage_pair(unsigned char* to, float low, float high) {
  auto* pair = reinterpret_cast<ResultPair<R>*>(to);
  if constexpr (kAdd) {
    const ResultPair<R> old = *pair;
    low = to_float(old.low) + low;
    high = to_float(old.high) + high;
  }
  *pair = {from_float<R>(low), from_float<R>(high)};
}

// Writes columns of box `i` of an MMA atom. A warp writes 8 rows at once: 16 bytes of each, which the swizzle puts into
// different banks, or 32 bytes of float results, where odd rows take their columns in another order for that.
template <bool kAdd, class R, int kFragment>
__device__ __forceinline__ void stage_box(unsigned char* box, int i, int thread, const float (&accum)[kFragment]) {
  const int lane = thread % 32, row_of_8 = lane / 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    unsigned char* row = box + fragment_row(thread, h) * kSwizzleRow;
    if constexpr (sizeof(R) == 2) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int at = 4 * (8 * i + j) + 2 * h;
        stage_pair<kAdd, R>(row + (j ^ row_of_8) * 16 + lane % 4 * 4, accum[at], accum[at + 1]);
      }
    } else {
      const bool odd = row_of_8 % 2 != 0;
      const int piece = (lane % 4 / 2) ^ row_of_8 ^ (odd ? 4 : 0);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = 4 * (4 * i + j) + 2 * h, other = at + 8;
        unsigned char* to = row + (piece ^ 2 * j) * 16 + lane % 2 * 8;
        stage_pair<kAdd, R>(to, odd ? accum[other] : accum[at], odd ? accum[other + 1] : accum[at + 1]);
        to = row + (piece ^ 2 * j ^ 4) * 16 + lane % 2 * 8;
        stage_pair<kAdd, R>(to, odd ? accum[at] : accum[other], odd ? accum[at + 1] : accum[other + 1]);
      }
    }
  }
}

// By a consumer: writes an MMA atom, box by box.
template <class S, class R, int kFragment>
__device__ __forceinline__ void stage_accum(SmemPipeline& pipeline, BoxPipeline& boxes, BoxState& state,
                                            PipelineState first, int consumer, int rank, int atom,
                                            const float (&accum)[kFragment]) {
  const int thread = read_thread_idx();
#pragma unroll
  for (int i = 0; i < S::kAcross; ++i) {
    const int box = atom * S::kAcross + i;
    if (S::is_own(box)) barrier_wait(&boxes.own_empty[consumer], (state.own_boxes++ & 1u) ^ 1u);
    stage_box<S::kAdds, R>(S::address(pipeline, boxes, first, consumer, box), i, thread, accum);
    push_box(boxes, state, consumer, rank, thread);
  }
}

// Releases a reserved stage for one consumer, by a storing warp.
__device__ __forceinline__ void release_result_stage(SmemPipeline& pipeline, PipelineState state, int lane) {
  if (lane < kWarps * kCluster) barrier_arrive(&pipeline.empty[state.index()], uint32_t(lane / kWarps));
}

constexpr int kUnreadBoxes = 2;  // which a storing warp leaves behind when it waits for the next box

// By a storing warp: copies a consumer's boxes to memory as they are written.
template <class S>
__device__ __forceinline__ void store_boxes(SmemPipeline& pipeline, BoxPipeline& boxes, BoxState& state,
                                            PipelineState first, const CUtensorMap* map, const WorkTile& tile,
                                            int consumer, int rank, int lane) {
  const auto release = [&](int box) {
    if (S::is_own(box)) {
      if (lane == 0) barrier_arrive(&boxes.own_empty[consumer], uint32_t(rank));
    } else if (S::ends_stage(box)) {
      release_result_stage(pipeline, {first.count + uint32_t(S::place(box) / S::kPlaces)}, lane);
    }
  };
#pragma unroll 1
  for (int box = 0; box < S::kBoxes; ++box) {
    wait_for_box(boxes, state, consumer);
    if (lane == 0) {
      const ResultBox at = S::at(tile, consumer, box);
      if (at.rows > 0) tma_store_results(map, S::address(pipeline, boxes, first, consumer, box), at);
      bulk_commit();
      bulk_wait_read<kUnreadBoxes>();
    }
    __syncwarp();
    if (box >= kUnreadBoxes) release(box - kUnreadBoxes);
  }
  if (lane == 0) bulk_wait_read<0>();
  __syncwarp();
#pragma unroll 1
  for (int box = S::kBoxes - kUnreadBoxes; box < S::kBoxes; ++box) release(box);
}

// By a storing warp whose consumer has no results in a tile.
__device__ __forceinline__ void pass_result_stages(SmemPipeline& pipeline, PipelineState state, int stages, int lane) {
#pragma unroll 1
  for (int i = 0; i < stages; ++i) {
    release_result_stage(pipeline, state, lane);
    state.advance();
  }
}

}  // namespace te::gemm::sm90
