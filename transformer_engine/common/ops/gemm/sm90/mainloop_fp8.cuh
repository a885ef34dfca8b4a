// The main loop over K of one tile of FP8 operands: 256 x 128 results, 128 of K in a k_block. The tensor cores
// accumulate one k_block at a time, since their accumulators keep fewer bits than float32; a consumer then promotes the
// partial sum into float32 accumulators, with the k_block's scales. The two consumers issue in turns, so that one
// multiplies while the other promotes.
#pragma once

#include "ops/gemm/sm90/layout.h"
#include "ops/gemm/sm90/pipeline.cuh"

namespace te::gemm::sm90 {

using Fp8Accum = float[Fp8TileShape::kMmaAtoms][Fp8TileShape::kFragment];
using Fp8Partial = float[Fp8TileShape::kFragment];

// Loads the k_blocks of a tile. at.left(k_block) and at.right(k_block): where the boxes of a k_block begin;
// scales.bytes() and scales.load(stage, k_block): the scales that are loaded with it.
template <class Pipeline, class At, class Scales>
__device__ __forceinline__ void produce_fp8(Pipeline& pipeline, PipelineState& state, const CUtensorMap* left,
                                            const CUtensorMap* right, int k_blocks, int rank, const At& at,
                                            const Scales& scales) {
#pragma unroll 1  // unrolled, the stages take more registers than a producer has
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const int stage = state.index();
    unsigned char* tiles = pipeline.stages[stage];
    uint64_t* full = &pipeline.full[stage];
    barrier_wait(&pipeline.empty[stage], state.empty_phase());
    barrier_expect(full, kStageBytes + scales.bytes());
    const BoxCoord rows = at.left(k_block);
    const int share = rank * Fp8TileConfig::kLeftPart;
    tma_load_multicast(tiles + tile_bytes(share), left, full, {rows.col, rows.row + share});
    tma_load(tiles + tile_bytes(Fp8TileShape::kM), right, full, at.right(k_block));
    scales.load(stage, k_block);
    state.advance();
  }
}

// A consumer without results in a tile still releases the stages and takes its turns.
template <class Pipeline>
__device__ __forceinline__ void skip_fp8(Pipeline& pipeline, PipelineState& state, int consumer, int k_blocks) {
  const OrderedSequence order{consumer};
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    barrier_wait(&pipeline.full[state.index()], state.full_phase());
    __syncwarp();  // or a later phase ends while a lane still waits for this one
    pipeline.release(state.index());
    for (int atom = 0; atom < Fp8TileShape::kMmaAtoms; ++atom) {
      order.wait();
      order.arrive();
    }
    state.advance();
  }
}

// Accumulates a consumer's rows of a tile; zeros where there is no k_block. scales.next(k_block) precedes each k_block;
// scales.promote(stage, atom, partial, accum) adds the partial sum of the tensor cores.
template <class Left, class Pipeline, class Scales>
__device__ __forceinline__ void consume_fp8(Pipeline& pipeline, PipelineState& state, int consumer, int k_blocks,
                                            Scales& scales, Fp8Accum& accum) {
  const OrderedSequence order{consumer};
  Fp8Partial partial;
#pragma unroll
  for (auto& atom : accum) {
#pragma unroll
    for (float& value : atom) value = 0.f;
  }
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    const int stage = state.index();
    unsigned char* tiles = pipeline.stages[stage];
    scales.next(k_block);
    barrier_wait(&pipeline.full[stage], state.full_phase());
    const uint64_t right = descriptor(Major::kK, shared_address(tiles + tile_bytes(Fp8TileShape::kM)));
#pragma unroll
    for (int atom = 0; atom < Fp8TileShape::kMmaAtoms; ++atom) {
      const uint32_t rows = shared_address(tiles + (consumer * Fp8TileShape::kMmaAtoms + atom) * kMmaAtomBytes);
      const uint64_t left = descriptor(Major::kK, rows);
      order.wait();
      fence_accumulators(partial);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kFp8TileK / kFp8MmaAtomK; ++i) {
        const uint64_t step = i * descriptor_step(Major::kK);
        mma_fp8<Left>(partial, left + step, right + step, i > 0);
      }
      wgmma_commit();
      order.arrive();
      wgmma_wait<0>();
      fence_accumulators(partial);
      const bool last = atom == Fp8TileShape::kMmaAtoms - 1;
      if (last && !Scales::kInStage) pipeline.release(stage);
      scales.promote(stage, atom, partial, accum[atom]);
      if (last && Scales::kInStage) {
        // The next load into these scales waits for `empty`, where each warp arrives after its lanes' last reads; each
        // lane waits for its bytes at `full`. (compute-sanitizer's racecheck reports the reads in promote() against
        // that load all the same: it seems not to follow arrivals by cluster addresses.)
        __syncwarp();
        pipeline.release(stage);
      }
    }
    state.advance();
  }
}

}  // namespace te::gemm::sm90
