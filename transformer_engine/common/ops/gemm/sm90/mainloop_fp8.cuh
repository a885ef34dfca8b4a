// The loop over the depth of one tile of FP8 operands: 256 x 128 results, 128 of the depth in a block, stages, copies
// and clusters as in mainloop_bf16.cuh. The tensor cores sum up a block alone, since their sums keep fewer bits than
// float32; a consumer then promotes that partial sum into float32 sums of its own, with the block's scales. The two
// consumers issue in turns, so that one multiplies while the other promotes.
#pragma once

#if !defined(TE_EMULATED_GPU)  // else a test's functions of the same names are in scope
#include "ops/gemm/sm90/ptx_fp8.cuh"
#endif
#include "ops/gemm/sm90/mainloop_bf16.cuh"

namespace te::gemm::wgmma {

constexpr int kFp8Depth = kLine;                    // of a block, and of a scale
constexpr int kFp8InstructionDepth = 32;            // of one wgmma on 1-byte elements: the bytes of 16 elements of 2
constexpr int kTurnBarrier = kConsumerBarrier + 1;  // one for each consumer
static_assert(kFp8InstructionDepth == kInstructionDepth * 2, "descriptor_step() is in bytes");

using Fp8Tile = Tile<256, 128>;
using Fp8Plan = Plan<Fp8Tile, Major::kDepth, Major::kDepth, Common::kLeft>;
using Fp8Sums = float[Fp8Tile::kSlabs][Fp8Tile::kFragment];
using Fp8Partial = float[Fp8Tile::kFragment];

// Stages that have a scale for each row and column of a tile, beside them.
struct ScaledRing : Ring {
  alignas(16) float scales[kStages][Fp8Tile::kRows + Fp8Tile::kCols];
};

// A consumer's right to issue. Both take as many turns, beginning with the first; it takes one that nobody gave it at
// the start, and one too many at the end.
struct Turns {
  int consumer;
  static constexpr int kThreads = kConsumers * kWarpgroup;

  __device__ void open() const {
    if (consumer == 1) give();
  }
  __device__ void take() const { named_barrier(kTurnBarrier + consumer, kThreads); }
  __device__ void give() const { named_arrive(kTurnBarrier + 1 - consumer, kThreads); }
  __device__ void close() const {
    if (consumer == 0) take();
  }
};

// Copies the blocks of a tile in. at.left(block), at.right(block): where a block's boxes begin; scales.bytes() and
// scales.copy(stage, block): what comes with it.
template <class RingOf, class At, class Scales>
__device__ __forceinline__ void produce_fp8(RingOf& ring, RingPlace& place, const CUtensorMap* left,
                                            const CUtensorMap* right, int blocks, int rank, const At& at,
                                            const Scales& scales) {
#pragma unroll 1  // each stage for itself takes registers that a producer does not have
  for (int block = 0; block < blocks; ++block) {
    const int stage = place.stage();
    unsigned char* tiles = ring.stages[stage];
    uint64_t* full = &ring.full[stage];
    barrier_wait(&ring.empty[stage], place.empty_parity());
    barrier_expect(full, kStageBytes + scales.bytes());
    const BoxAt rows = at.left(block);
    const int share = rank * Fp8Plan::kLeftPart;
    copy_box_to_both(tiles + tile_bytes(share), left, full, {rows.col, rows.row + share});
    copy_box(tiles + tile_bytes(Fp8Tile::kRows), right, full, at.right(block));
    scales.copy(stage, block);
    place.advance();
  }
}

// Of a tile that a consumer has no results of: stages and turns pass.
template <class RingOf>
__device__ __forceinline__ void pass_fp8(RingOf& ring, RingPlace& place, int consumer, int blocks) {
  const Turns turns{consumer};
  for (int block = 0; block < blocks; ++block) {
    barrier_wait(&ring.full[place.stage()], place.full_parity());
    ring.release(place.stage());
    for (int slab = 0; slab < Fp8Tile::kSlabs; ++slab) {
      turns.take();
      turns.give();
    }
    place.advance();
  }
}

// The sums of a consumer's rows of a tile; zeros where there is no block. scales.next(block) comes before each block;
// scales.promote(stage, slab, partial, sums) adds what the tensor cores made of it.
template <class Left, class RingOf, class Scales>
__device__ __forceinline__ void consume_fp8(RingOf& ring, RingPlace& place, int consumer, int blocks, Scales& scales,
                                            Fp8Sums& sums) {
  const Turns turns{consumer};
  Fp8Partial partial;
#pragma unroll
  for (auto& slab : sums) {
#pragma unroll
    for (float& sum : slab) sum = 0.f;
  }
  for (int block = 0; block < blocks; ++block) {
    const int stage = place.stage();
    unsigned char* tiles = ring.stages[stage];
    scales.next(block);
    barrier_wait(&ring.full[stage], place.full_parity());
    const uint64_t right = descriptor(Major::kDepth, shared_address(tiles + tile_bytes(Fp8Tile::kRows)));
#pragma unroll
    for (int slab = 0; slab < Fp8Tile::kSlabs; ++slab) {
      const uint32_t rows = shared_address(tiles + (consumer * Fp8Tile::kSlabs + slab) * kSlabBytes);
      const uint64_t left = descriptor(Major::kDepth, rows);
      turns.take();
      hold(partial);
      mma_fence();
#pragma unroll
      for (int i = 0; i < kFp8Depth / kFp8InstructionDepth; ++i) {
        const uint64_t step = i * descriptor_step(Major::kDepth);
        mma_fp8<Left>(partial, left + step, right + step, i > 0);
      }
      mma_commit();
      turns.give();
      mma_wait<0>();
      hold(partial);
      const bool last = slab == Fp8Tile::kSlabs - 1;
      if (last && !Scales::kInStage) ring.release(stage);
      scales.promote(stage, slab, partial, sums[slab]);
      if (last && Scales::kInStage) {
        // The next copy into these scales waits for `empty`, where every warp arrives behind its lanes' last reads; its
        // bytes are waited for by every lane, at `full`. (compute-sanitizer's racecheck reports
        // the reads in promote() against that copy all the same: it seems not to follow arrivals by cluster addresses.)
        __syncwarp();
        ring.release(stage);
      }
    }
    place.advance();
  }
}

}  // namespace te::gemm::wgmma
