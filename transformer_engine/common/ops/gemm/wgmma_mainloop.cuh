// The loop over the depth of one tile, from both sides of the ring of stages: a thread that has operands copied in, and
// two warpgroups that multiply. One accumulator for each element, the depth in ascending order. Knows no groups: an
// extent says where a tile lies, and which lines of its last block are not its own.
#pragma once

#if !defined(TE_EMULATED_GPU)  // else a test's functions of the same names are in scope
#include "ops/gemm/wgmma.cuh"
#endif
#include "ops/gemm/wgmma_layout.h"

namespace te::gemm::wgmma {

constexpr int kWarps = 4;  // of a warpgroup
constexpr int kWarpgroup = 32 * kWarps;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerBarrier = 1;  // __syncthreads() has 0

// Stages and barriers; on kSharedAlignment.
struct Ring {
  unsigned char stages[kStages][kStageBytes];
  uint64_t full[kStages];
  uint64_t empty[kStages];

  __device__ unsigned char* left(int stage) { return stages[stage]; }
  __device__ unsigned char* right(int stage) { return stages[stage] + tile_bytes(kTileRows); }

  // By one thread, before all others know of the ring.
  __device__ void open() {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kConsumers * kWarps);  // each warp of the consumers arrives
    }
    barrier_init_fence();
  }
};

// Copies the blocks of a tile in, as far ahead of the consumers as the ring has room.
template <Major kLeft, Major kRight, class Extent>
__device__ __forceinline__ void produce(Ring& ring, RingPlace& place, const CUtensorMap* left, const CUtensorMap* right,
                                        const Extent& e) {
  for (int block = 0; block < e.blocks; ++block) {
    const int stage = place.stage, depth = e.depth + block * kTileDepth;
    barrier_wait(&ring.empty[stage], place.empty_parity());
    barrier_expect(&ring.full[stage], kStageBytes);
#pragma unroll
    for (int i = 0; i < boxes(kLeft, kTileRows); ++i) {
      copy_box(ring.left(stage) + box_offset(i), left, &ring.full[stage], box_at(kLeft, i, e.row, depth));
    }
#pragma unroll
    for (int i = 0; i < boxes(kRight, kTileCols); ++i) {
      copy_box(ring.right(stage) + box_offset(i), right, &ring.full[stage], box_at(kRight, i, e.col, depth));
    }
    place.advance();
  }
}

// Zeros in the lines of a stage that belong to others, in both operands: one of them alone would leave 0 * NaN. By all
// consumers, each its box of the left operand and its share of the right one's.
__device__ __forceinline__ void clear_foreign_lines(Ring& ring, int stage, int consumer, int first_piece) {
  constexpr int kPieces = kChunk / 16, kRightBoxes = boxes(Major::kAcross, kTileCols) / kConsumers;
  const int thread = int(threadIdx.x) % kWarpgroup;
  const auto clear = [&](unsigned char* box) {
    for (int i = first_piece + thread; i < kPieces; i += kWarpgroup) reinterpret_cast<uint4*>(box)[i] = uint4{};
  };
  clear(ring.left(stage) + box_offset(consumer));
#pragma unroll
  for (int i = 0; i < kRightBoxes; ++i) clear(ring.right(stage) + box_offset(consumer * kRightBoxes + i));
  async_fence();
  named_barrier(kConsumerBarrier, kConsumers * kWarpgroup);
}

// The sums of a consumer's 64 rows of a tile; zeros where there is no block.
template <class T, Major kLeft, Major kRight, class Extent>
__device__ __forceinline__ void consume(Ring& ring, RingPlace& place, int consumer, const Extent& e,
                                        float (&sums)[kFragment]) {
  constexpr bool kForeignDepth = kLeft == Major::kAcross;  // the depth is rows, and others' lie behind them
  const bool elected = threadIdx.x % 32 == 0;
  for (float& sum : sums) sum = 0.f;
  int last = -1;  // the stage that the tensor cores may still be reading
  for (int block = 0; block < e.blocks; ++block) {
    const int stage = place.stage;
    barrier_wait(&ring.full[stage], place.full_parity());
    if constexpr (kForeignDepth) {
      if (block == e.blocks - 1 && e.last_depth < kTileDepth) {
        clear_foreign_lines(ring, stage, consumer, e.last_depth * (kLine / 16));
      }
    }
    const uint64_t left = descriptor(kLeft, shared_address(ring.left(stage) + consumer * kConsumerBytes));
    const uint64_t right = descriptor(kRight, shared_address(ring.right(stage)));
    hold(sums);
    mma_fence();
#pragma unroll
    for (int i = 0; i < kTileDepth / kInstructionDepth; ++i) {
      mma<T, kLeft, kRight>(sums, left + i * descriptor_step(kLeft), right + i * descriptor_step(kRight),
                            block > 0 || i > 0);
    }
    mma_commit();
    hold(sums);
    mma_wait<1>();  // of the block before this one
    if (last >= 0 && elected) barrier_arrive(&ring.empty[last]);
    last = stage;
    place.advance();
  }
  mma_wait<0>();
  hold(sums);
  if (last >= 0 && elected) barrier_arrive(&ring.empty[last]);
}

}  // namespace te::gemm::wgmma
