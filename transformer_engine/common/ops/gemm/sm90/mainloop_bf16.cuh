// The main loop over K of one tile of bfloat16 or float16 operands. A producer thread loads k_blocks by TMA; two
// consumer warpgroups multiply. Each element has one accumulator, and K ascends.
#pragma once

#include "ops/gemm/sm90/layout.h"
#include "ops/gemm/sm90/pipeline.cuh"

namespace te::gemm::sm90 {

// Loads one CTA's part of an operand: all of it, or its share for both CTAs.
template <Major kMajor, int kPart, bool kMulticast>
__device__ __forceinline__ void load_part(unsigned char* tile, const CUtensorMap* map, uint64_t* full, int32_t mn,
                                          int32_t k, int rank) {
  const int share = kMulticast ? rank * kPart : 0;
#pragma unroll
  for (int i = 0; i < boxes(kMajor, kPart); ++i) {
    unsigned char* to = tile + tile_bytes(share) + box_offset(i);
    const BoxCoord at = box_coord(kMajor, i, mn + share, k);
    if constexpr (kMulticast) {
      tma_load_multicast(to, map, full, at);
    } else {
      tma_load(to, map, full, at);
    }
  }
}

// Loads the k_blocks of a tile, as far ahead of the consumers as there are empty stages. right_row: where the right
// operand begins in its map.
template <class TileConfig>
__device__ __forceinline__ void produce_bf16(SmemPipeline& pipeline, PipelineState& state, const CUtensorMap* left,
                                             const CUtensorMap* right, int32_t right_row, const WorkTile& tile,
                                             int rank) {
  constexpr bool kShareLeft = TileConfig::kMulticast == Multicast::kLeft;
  constexpr bool kRowsAreK = TileConfig::kRight == Major::kMN;
  const int32_t right_n = tile.n + (kRowsAreK ? 0 : right_row), right_k = kRowsAreK ? right_row : 0;
#pragma unroll 1  // unrolled, the stages take more registers than a producer has
  for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
    const int stage = state.index(), k = tile.k + k_block * kTileK;
    unsigned char* tiles = pipeline.stages[stage];
    uint64_t* full = &pipeline.full[stage];
    barrier_wait(&pipeline.empty[stage], state.empty_phase());
    barrier_expect(full, kStageBytes);  // including the bytes that the other CTA loads
    load_part<TileConfig::kLeft, TileConfig::kLeftPart, kShareLeft>(tiles, left, full, tile.m, k, rank);
    load_part<TileConfig::kRight, TileConfig::kRightPart, !kShareLeft>(tiles + tile_bytes(TileConfig::TileShape::kM),
                                                                       right, full, right_n, right_k + k, rank);
    state.advance();
  }
}

// Clears the rows of the last k_block that belong to the next group, in both operands: one of them alone would leave
// 0 * NaN. By all consumers, each its share of the boxes.
template <class TileShape>
__device__ __forceinline__ void clear_tail_k(unsigned char* tiles, int consumer, int first_piece) {
  constexpr int kPieces = kBoxBytes / 16, kBoxes = (TileShape::kM + TileShape::kN) / kBoxCols / kConsumers;
  const int thread = int(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    auto* pieces = reinterpret_cast<uint4*>(tiles + box_offset(consumer * kBoxes + box));
    for (int i = first_piece + thread; i < kPieces; i += kWarpgroup) pieces[i] = uint4{};
  }
  fence_async_proxy();
  named_barrier(kConsumerBarrier, kConsumers * kWarpgroup);
}

// A consumer without results in a tile still waits for its stages and releases them, since the cluster shares them.
__device__ __forceinline__ void skip_bf16(SmemPipeline& pipeline, PipelineState& state, const WorkTile& tile) {
  for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
    barrier_wait(&pipeline.full[state.index()], state.full_phase());
    __syncwarp();  // or a later phase ends while a lane still waits for this one
    pipeline.release(state.index());
    state.advance();
  }
}

// Accumulates a consumer's rows of a tile; zeros where there is no k_block.
template <class T, class TileConfig>
__device__ __forceinline__ void consume_bf16(
    SmemPipeline& pipeline, PipelineState& state, int consumer, const WorkTile& tile,
    float (&accum)[TileConfig::TileShape::kMmaAtoms][TileConfig::TileShape::kFragment]) {
  using TileShape = typename TileConfig::TileShape;
  constexpr Major kLeft = TileConfig::kLeft, kRight = TileConfig::kRight;
#pragma unroll
  for (auto& atom : accum) {
#pragma unroll
    for (float& value : atom) value = 0.f;
  }
  int last = -1;  // the stage that the tensor cores may still be reading
  for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
    const int stage = state.index();
    unsigned char* tiles = pipeline.stages[stage];
    barrier_wait(&pipeline.full[stage], state.full_phase());
    if constexpr (TileConfig::kClearsTailK) {
      if (k_block == tile.k_blocks - 1 && tile.last_k < kTileK) {
        clear_tail_k<TileShape>(tiles, consumer, tile.last_k * (kSwizzleRow / 16));
      }
    }
    const uint64_t right = descriptor(kRight, shared_address(tiles + tile_bytes(TileShape::kM)));
    fence_accumulators(accum);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / kMmaAtomK; ++i) {
#pragma unroll
      for (int atom = 0; atom < TileShape::kMmaAtoms; ++atom) {
        const uint32_t rows = shared_address(tiles + (consumer * TileShape::kMmaAtoms + atom) * kMmaAtomBytes);
        mma<T, kLeft, kRight>(accum[atom], descriptor(kLeft, rows) + i * descriptor_step(kLeft),
                              right + i * descriptor_step(kRight), k_block > 0 || i > 0);
      }
    }
    wgmma_commit();
    fence_accumulators(accum);
    wgmma_wait<1>();  // for the previous k_block
    if (last >= 0) pipeline.release(last);
    last = stage;
    state.advance();
  }
  wgmma_wait<0>();
  fence_accumulators(accum);
  if (last >= 0) pipeline.release(last);
}

}  // namespace te::gemm::sm90
