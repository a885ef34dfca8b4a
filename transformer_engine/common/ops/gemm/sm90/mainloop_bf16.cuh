// The loop over the depth of one tile, from both sides of the ring of stages: a thread that has operands copied in, and
// two warpgroups that multiply. One accumulator for each element, the depth in ascending order. Knows no groups: an
// extent says where a tile lies, and which lines of its last block are not its own.
#pragma once

#if !defined(TE_EMULATED_GPU)  // else a test's functions of the same names are in scope
#include "ops/gemm/sm90/ptx.cuh"
#endif
#include "ops/gemm/sm90/layout.h"

namespace te::gemm::wgmma {

constexpr int kWarps = 4;  // of a warpgroup
constexpr int kWarpgroup = 32 * kWarps;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerBarrier = 1;  // __syncthreads() has 0

// Stages and barriers; on kSharedAlignment. Two blocks of a cluster go through theirs in step: an operand that both
// need comes half from each, to both, so a stage is empty when the consumers of both are done with it.
struct Ring {
  unsigned char stages[kStages][kStageBytes];
  uint64_t full[kStages];
  uint64_t empty[kStages];

  // By one thread, before all others of the cluster know of the ring.
  __device__ void open() {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kConsumers * kWarps * kCluster);  // each warp of the consumers arrives at both
    }
    barrier_init_fence();
  }

  // By all lanes of a warp that reads the stage no more.
  __device__ void release(int stage) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < kCluster) barrier_arrive(&empty[stage], lane);
  }
};

// Copies one block's part of an operand: all of it, or its share to both blocks.
template <Major kMajor, int kPart, bool kShared>
__device__ __forceinline__ void copy_part(unsigned char* tile, const CUtensorMap* map, uint64_t* full, int32_t across,
                                          int32_t depth, int rank) {
  const int share = kShared ? rank * kPart : 0;
#pragma unroll
  for (int i = 0; i < boxes(kMajor, kPart); ++i) {
    unsigned char* to = tile + tile_bytes(share) + box_offset(i);
    const BoxAt at = box_at(kMajor, i, across + share, depth);
    if constexpr (kShared) {
      copy_box_to_both(to, map, full, at);
    } else {
      copy_box(to, map, full, at);
    }
  }
}

// Copies the blocks of a tile in, as far ahead of the consumers as the ring has room.
template <class Plan, class Extent>
__device__ __forceinline__ void produce(Ring& ring, RingPlace& place, const CUtensorMap* left, const CUtensorMap* right,
                                        const Extent& e, int rank) {
#pragma unroll 1  // each stage for itself takes registers that a producer does not have
  for (int block = 0; block < e.blocks; ++block) {
    const int stage = place.stage(), depth = e.depth + block * kTileDepth;
    unsigned char* tiles = ring.stages[stage];
    barrier_wait(&ring.empty[stage], place.empty_parity());
    barrier_expect(&ring.full[stage], kStageBytes);  // its own and what the other block brings
    copy_part<Plan::kLeft, Plan::kLeftPart, Plan::kCommon == Common::kLeft>(tiles, left, &ring.full[stage], e.row,
                                                                            depth, rank);
    copy_part<Plan::kRight, Plan::kRightPart, Plan::kCommon == Common::kRight>(
        tiles + tile_bytes(Plan::Tile::kRows), right, &ring.full[stage], e.col, depth, rank);
    place.advance();
  }
}

// Zeros in the lines of a stage that belong to others, in both operands: one of them alone would leave 0 * NaN. By all
// consumers, each its share of the boxes.
template <class Tile>
__device__ __forceinline__ void clear_foreign_lines(unsigned char* tiles, int consumer, int first_piece) {
  constexpr int kPieces = kChunk / 16, kBoxes = (Tile::kRows + Tile::kCols) / kBoxCols / kConsumers;
  const int thread = int(threadIdx.x) % kWarpgroup;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    auto* pieces = reinterpret_cast<uint4*>(tiles + box_offset(consumer * kBoxes + box));
    for (int i = first_piece + thread; i < kPieces; i += kWarpgroup) pieces[i] = uint4{};
  }
  async_fence();
  named_barrier(kConsumerBarrier, kConsumers * kWarpgroup);
}

// What a consumer does of a tile that it has no results of: it lets the stages pass, which the cluster shares.
template <class Extent>
__device__ __forceinline__ void pass(Ring& ring, RingPlace& place, const Extent& e) {
  for (int block = 0; block < e.blocks; ++block) {
    barrier_wait(&ring.full[place.stage()], place.full_parity());
    ring.release(place.stage());
    place.advance();
  }
}

// The sums of a consumer's rows of a tile; zeros where there is no block.
template <class T, class Plan, class Extent>
__device__ __forceinline__ void consume(Ring& ring, RingPlace& place, int consumer, const Extent& e,
                                        float (&sums)[Plan::Tile::kSlabs][Plan::Tile::kFragment]) {
  using Tile = typename Plan::Tile;
  constexpr Major kLeft = Plan::kLeft, kRight = Plan::kRight;
#pragma unroll
  for (auto& slab : sums) {
#pragma unroll
    for (float& sum : slab) sum = 0.f;
  }
  int last = -1;  // the stage that the tensor cores may still be reading
  for (int block = 0; block < e.blocks; ++block) {
    const int stage = place.stage();
    unsigned char* tiles = ring.stages[stage];
    barrier_wait(&ring.full[stage], place.full_parity());
    if constexpr (Plan::kForeignDepth) {
      if (block == e.blocks - 1 && e.last_depth < kTileDepth) {
        clear_foreign_lines<Tile>(tiles, consumer, e.last_depth * (kLine / 16));
      }
    }
    const uint64_t right = descriptor(kRight, shared_address(tiles + tile_bytes(Tile::kRows)));
    hold(sums);
    mma_fence();
#pragma unroll
    for (int i = 0; i < kTileDepth / kInstructionDepth; ++i) {
#pragma unroll
      for (int slab = 0; slab < Tile::kSlabs; ++slab) {
        const uint32_t rows = shared_address(tiles + (consumer * Tile::kSlabs + slab) * kSlabBytes);
        mma<T, kLeft, kRight>(sums[slab], descriptor(kLeft, rows) + i * descriptor_step(kLeft),
                              right + i * descriptor_step(kRight), block > 0 || i > 0);
      }
    }
    mma_commit();
    hold(sums);
    mma_wait<1>();  // of the block before this one
    if (last >= 0) ring.release(last);
    last = stage;
    place.advance();
  }
  mma_wait<0>();
  hold(sums);
  if (last >= 0) ring.release(last);
}

}  // namespace te::gemm::wgmma
