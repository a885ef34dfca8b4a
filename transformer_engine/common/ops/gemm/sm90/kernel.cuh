// The grouped kernel: each block makes the table of tiles from the offsets, walks its tiles, and is a producer and two
// consumers. Two blocks, a cluster, walk pairs of tiles together; nothing waits for another cluster. One kernel for all
// products; a Job says where operands and results are.
#pragma once

#include "ops/gemm/grouped/params.h"
#include "ops/gemm/sm90/epilogue.cuh"
#include "ops/gemm/sm90/mainloop_bf16.cuh"

namespace te::gemm::grouped {

// Of 512 registers a lane of each scheduler: what copies needs few, 128 sums and an epilogue need many.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// What a block's producer, which walks its tiles, lets the consumers know of them, some tiles ahead of the copies: they
// need not search, nor keep what they can look up. A ring as that of the stages.
struct Notes {
  struct Note {
    int32_t group;  // negative: no tile is left
    Extent extent;
  };
  Note notes[wgmma::kStages];
  uint64_t written[wgmma::kStages];
  uint64_t read[wgmma::kStages];

  __device__ void open() {
    for (int i = 0; i < wgmma::kStages; ++i) {
      wgmma::barrier_init(&written[i], 1);
      wgmma::barrier_init(&read[i], wgmma::kConsumers * wgmma::kWarps);
    }
  }
  __device__ __forceinline__ const Note& write(wgmma::RingPlace& place, int rank, int32_t group, const Extent& extent) {
    const int stage = place.stage();
    wgmma::barrier_wait(&read[stage], place.empty_parity());
    notes[stage] = {group, extent};
    wgmma::barrier_arrive(&written[stage], uint32_t(rank));
    place.advance();
    return notes[stage];
  }
  __device__ __forceinline__ const Note& wait(const wgmma::RingPlace& place) {
    wgmma::barrier_wait(&written[place.stage()], place.full_parity());
    return notes[place.stage()];
  }
  // By all lanes of a warp that looks at the note no more.
  __device__ __forceinline__ void release(wgmma::RingPlace& place, int rank) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) wgmma::barrier_arrive(&read[place.stage()], uint32_t(rank));
    place.advance();
  }
};

template <class Job>
struct Shared {
  typename Job::Ring ring;
  Notes notes;
  RowRange ranges[kLaunchGroups];     // what of the operands is a group's
  int32_t before[kLaunchGroups + 1];  // pairs of tiles before each group; all of them
};
template <class Job>
constexpr int kSharedBytes = int(sizeof(Shared<Job>)) + wgmma::kSharedAlignment;  // wherever the runtime lets it begin

__device__ __forceinline__ int32_t sum_up_to(int32_t most, int32_t a, int32_t b) { return b < most - a ? a + b : most; }

// before[g], counts of each group, becomes `start` and those before it; no sum exceeds `most`. By the first warp.
__device__ inline void sum_up(int32_t* before, int32_t groups, int32_t start, int32_t most) {
  const int lane = int(threadIdx.x);
  int32_t sum = start;
  for (int32_t first = 0; first < groups; first += 32) {
    const int32_t group = first + lane;
    int32_t up_to = group < groups ? sum_up_to(most, 0, before[group]) : 0;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t left = __shfl_up_sync(kWholeWarp, up_to, step);
      if (lane >= step) up_to = sum_up_to(most, up_to, left);
    }
    const int32_t left = __shfl_up_sync(kWholeWarp, up_to, 1);
    if (group < groups) before[group] = sum_up_to(most, sum, lane == 0 ? 0 : left);
    sum = sum_up_to(most, sum, __shfl_sync(kWholeWarp, up_to, 31));
  }
  if (lane == 0) before[groups] = sum;
}

__device__ inline void find_rows(RowRange* rows, const Common& common) {
  for (int32_t g = int32_t(threadIdx.x); g < common.groups; g += wgmma::kThreads) {
    rows[g] = rows_between(common.offsets[g], common.offsets[g + 1], common.rows);
  }
}

// Whether a consumer has results of a tile. One that clears lines for the other, too, has them if that one has.
template <class Plan>
__device__ __forceinline__ bool has_results(const Extent& e, int consumer) {
  const int first = Plan::kForeignDepth ? 0 : consumer * Plan::Tile::kConsumerRows;
  return int64_t(e.row) + first < e.row_end && e.col < e.col_end;
}

template <class Job>
__device__ __forceinline__ void produce_all(Shared<Job>& shared, const typename Job::Params& p, int rank) {
  const int32_t groups = p.common.groups, count = shared.before[groups], cols = Job::col_pairs(p);
  const int32_t clusters = int32_t(gridDim.x) / wgmma::kCluster;
  wgmma::RingPlace place, note;
  for (int32_t number = int32_t(blockIdx.x) / wgmma::kCluster; number < count; number += clusters) {
    const PairAt at = pair_at(shared.before, groups, cols, number);
    const Extent e = Job::extent(p, at, rank, shared.ranges[at.group]);
    const Notes::Note& written = shared.notes.write(note, rank, at.group, e);
    Job::produce(shared.ring, place, p, at.group, written.extent, rank);  // who has few registers
  }
  shared.notes.write(note, rank, -1, {});
}

template <class Job>
__device__ __forceinline__ void consume_all(Shared<Job>& shared, const typename Job::Params& p, int rank,
                                            int consumer) {
  using Plan = typename Job::Plan;
  using Tile = typename Plan::Tile;
  wgmma::RingPlace place, seen;
  Job::open(consumer);
  while (true) {
    const Notes::Note& note = shared.notes.wait(seen);
    if (note.group < 0) break;
    if (!has_results<Plan>(note.extent, consumer)) {
      Job::pass(shared.ring, place, note.extent, consumer);
    } else {
      float sums[Tile::kSlabs][Tile::kFragment];
      Job::consume(shared.ring, place, p, note.group, note.extent, consumer, sums);
      const Notes::Note now = note;  // looked up again, so that it needs no registers beside the sums
#pragma unroll
      for (int slab = 0; slab < Tile::kSlabs; ++slab) {
        Job::finish(p, now.group, now.extent, consumer * Tile::kConsumerRows + slab * wgmma::kSlabRows, sums[slab]);
      }
    }
    shared.notes.release(seen, rank);
  }
  Job::close(consumer);
}

template <class Job>
__global__ void __launch_bounds__(wgmma::kThreads, 1) __cluster_dims__(wgmma::kCluster, 1, 1)
    grouped_kernel(const __grid_constant__ typename Job::Params p) {
  using namespace wgmma;
  unsigned char* memory = shared_memory();
  const uint32_t past = shared_address(memory) % kSharedAlignment;
  auto& shared = *reinterpret_cast<Shared<Job>*>(memory + (past == 0 ? 0 : kSharedAlignment - past));
  Job::find_ranges(shared.ranges, shared.before, p);
  for (int32_t g = int32_t(threadIdx.x); g < p.common.groups; g += kThreads) {
    shared.before[g] = Job::pairs(p, g, shared.ranges[g]);
  }
  if (threadIdx.x == 0) {
    shared.notes.open();
    shared.ring.open();
  }
  __syncthreads();
  if (threadIdx.x < 32) sum_up(shared.before, p.common.groups, 0, kMostPairs);
  __syncthreads();
  cluster_meeting();  // the other block's barriers are there
  const int rank = int(cluster_rank());
  if (threadIdx.x < kWarpgroup) {
    shrink_to<kProducerRegisters>();
    if (threadIdx.x == 0) produce_all<Job>(shared, p, rank);
    if (threadIdx.x >= 32) Job::beside(p, int(threadIdx.x) - 32, kWarpgroup - 32);
  } else {
    grow_to<kConsumerRegisters>();
    consume_all<Job>(shared, p, rank, int(threadIdx.x) / kWarpgroup - 1);
  }
  cluster_meeting();  // nobody leaves memory that the other block may still write to
}

// Zeros in the result's rows behind the last group; by `threads` threads of each block.
template <class R, class Params>
__device__ __forceinline__ void zero_tail(const Params& p, int thread, int threads) {
  const int warp = thread / 32, warps = threads / 32;
  const Target<R> target{static_cast<R*>(p.result), p.pitch, p.wide};
  const RowRange tail = rows_between(p.common.offsets[p.common.groups], p.common.rows, p.common.rows);
  constexpr uint32_t kZeros[4] = {0, 0, 0, 0};
  for (int64_t row = tail.first + int64_t(blockIdx.x) * warps + warp; row < tail.last;
       row += int64_t(gridDim.x) * warps) {
    for (int64_t col = int64_t(thread % 32) * wgmma::kPiece<R>; col < p.cols; col += 32 * wgmma::kPiece<R>) {
      wgmma::store_piece(target.data + row * target.pitch + col, kZeros, p.cols - col, target.wide);
    }
  }
}

// How jobs on 2-byte operands go through a tile.
template <class Job, class Params, class T, class PlanOf>
struct PlainLoop {
  using Ring = wgmma::Ring;
  using Plan = PlanOf;

  static __device__ void open(int) {}
  static __device__ void close(int) {}
  static __device__ void find_ranges(RowRange* rows, int32_t*, const Params& p) { find_rows(rows, p.common); }
  static __device__ __forceinline__ void produce(Ring& ring, wgmma::RingPlace& place, const Params& p, int32_t group,
                                                 const Extent& e, int rank) {
    wgmma::produce<Plan>(ring, place, &p.left, Job::right_map(p, group), e, rank);
  }
  static __device__ __forceinline__ void pass(Ring& ring, wgmma::RingPlace& place, const Extent& e, int) {
    wgmma::pass(ring, place, e);
  }
  static __device__ __forceinline__ void consume(Ring& ring, wgmma::RingPlace& place, const Params&, int32_t,
                                                 const Extent& e, int consumer,
                                                 float (&sums)[Plan::Tile::kSlabs][Plan::Tile::kFragment]) {
    wgmma::consume<T, Plan>(ring, place, consumer, e, sums);
  }
};

// FPROP: weights [N, K] lie along the depth. DGRAD: across it.
template <class T, wgmma::Major kWeights>
struct RowJob : PlainLoop<RowJob<T, kWeights>, RowParams, T, RowPlan<kWeights>> {
  using Params = RowParams;

  static __device__ int32_t pairs(const Params& p, int32_t, RowRange rows) { return row_product_pairs(rows, p.cols); }
  static __device__ int32_t col_pairs(const Params& p) { return row_product_col_pairs(p.cols); }
  static __device__ Extent extent(const Params& p, PairAt at, int rank, RowRange rows) {
    return row_product_extent(at, rank, rows, p.cols, p.depth);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t group) { return &p.weights[group]; }
  static __device__ void beside(const Params& p, int thread, int threads) {
    if (p.zero_tail) zero_tail<T>(p, thread, threads);
  }
  static __device__ __forceinline__ void finish(const Params& p, int32_t group, const Extent& e, int slab,
                                                float (&sums)[RowTile::kCols / 2]) {
    const auto* bias = static_cast<const T*>(p.biases[group]);
    if (bias != nullptr) add_bias(bias, e, sums);
    store_slab(Target<T>{static_cast<T*>(p.result), p.pitch, p.wide}, e, slab, false, sums);
  }
};

template <class T, class R>
struct WeightJob : PlainLoop<WeightJob<T, R>, WeightParams, T, WeightPlan> {
  using Params = WeightParams;

  static __device__ int32_t pairs(const Params& p, int32_t group, RowRange rows) {
    const Params::Result& result = p.results[group];
    return weight_gradient_pairs(rows, p.n, p.k, result.data != nullptr, result.add);
  }
  static __device__ int32_t col_pairs(const Params& p) { return tiles_over(p.k, WeightTile::kCols); }
  static __device__ Extent extent(const Params& p, PairAt at, int rank, RowRange rows) {
    return weight_gradient_extent(at, rank, rows, p.n, p.k);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t) { return &p.right; }
  static __device__ void beside(const Params&, int, int) {}
  static __device__ __forceinline__ void finish(const Params& p, int32_t group, const Extent& e, int slab,
                                                float (&sums)[WeightTile::kCols / 2]) {
    const Params::Result& result = p.results[group];
    const Target<R> target{static_cast<R*>(result.data), result.pitch, result.wide};
    store_slab<8, true>(target, e, slab, result.add, sums);
  }
};

}  // namespace te::gemm::grouped
