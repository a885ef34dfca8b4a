// KernelTraits of grouped products on bfloat16 and float16 operands: where operands and results lie.
#pragma once

#include "ops/gemm/grouped/params.h"
#include "ops/gemm/sm90/kernel.cuh"
#include "ops/gemm/sm90/mainloop_bf16.cuh"

namespace te::gemm::grouped {

__device__ inline void find_rows(RowRange* rows, const Common& common) {
  for (int32_t g = int32_t(threadIdx.x); g < common.groups; g += kThreads) {
    rows[g] = rows_between(common.offsets[g], common.offsets[g + 1], common.rows);
  }
}

// Clears the result's rows after the last group; by `threads` threads of each CTA.
template <class R, class Params>
__device__ __forceinline__ void zero_tail(const Params& p, int thread, int threads) {
  const int warp = thread / 32, warps = threads / 32;
  const Output<R> output{static_cast<R*>(p.result), p.pitch, p.wide};
  const RowRange tail = rows_between(p.common.offsets[p.common.groups], p.common.rows, p.common.rows);
  constexpr uint32_t kZeros[4] = {0, 0, 0, 0};
  for (int64_t row = tail.first + int64_t(blockIdx.x) * warps + warp; row < tail.last;
       row += int64_t(gridDim.x) * warps) {
    for (int64_t col = int64_t(thread % 32) * kPiece<R>; col < p.n; col += 32 * kPiece<R>) {
      store_piece(output.data + row * output.pitch + col, kZeros, p.n - col, output.wide);
    }
  }
}

// zero_tail() where rows are whole pieces of 16 bytes, as those of staged results are: by one warp, 32 pieces at once,
// which may be those of several rows.
template <class R, class Params>
__device__ __forceinline__ void zero_whole_pieces(const Params& p, int lane) {
  const RowRange tail = rows_between(p.common.offsets[p.common.groups], p.common.rows, p.common.rows);
  const int32_t ctas = int32_t(gridDim.x), first = int32_t(blockIdx.x), pieces = p.n / kPiece<R>;
  const auto rows = int32_t((uint32_t(tail.last - tail.first) + uint32_t(ctas - 1 - first)) / uint32_t(ctas));
  const int64_t pitch = p.pitch / kPiece<R>, to_next_row = ctas * pitch;
  const int32_t more_rows = 32 / pieces, more_pieces = 32 % pieces;
  int32_t row = lane / pieces, piece = lane % pieces;
  auto* to = static_cast<uint4*>(p.result) + (int64_t(tail.first) + first) * pitch + row * to_next_row + piece;
  while (row < rows) {
    *to = uint4{};
    row += more_rows;
    piece += more_pieces;
    to += more_rows * to_next_row + more_pieces;
    if (piece >= pieces) {
      ++row;
      piece -= pieces;
      to += to_next_row - pieces;
    }
  }
}

// The main loop of 2-byte operands.
template <class Traits, class Params, class T, class TileConfigOf>
struct MainloopBf16 {
  using Pipeline = SmemPipeline;
  using TileConfig = TileConfigOf;
  static constexpr bool kStaged = false;

  static __device__ void open(int) {}
  static __device__ void close(int) {}
  static __device__ void find_ranges(RowRange* rows, int32_t*, const Params& p) { find_rows(rows, p.common); }
  static __device__ __forceinline__ void produce(Pipeline& pipeline, PipelineState& state, const Params& p,
                                                 int32_t group, const WorkTile& tile, int rank) {
    sm90::produce_bf16<TileConfig>(pipeline, state, &p.left, Traits::right_map(p, group), Traits::right_row(p, group),
                                   tile, rank);
  }
  static __device__ __forceinline__ void skip(Pipeline& pipeline, PipelineState& state, const WorkTile& tile, int) {
    sm90::skip_bf16(pipeline, state, tile);
  }
  static __device__ __forceinline__ void consume(
      Pipeline& pipeline, PipelineState& state, const Params&, int32_t, const WorkTile& tile, int consumer,
      float (&accum)[TileConfig::TileShape::kMmaAtoms][TileConfig::TileShape::kFragment]) {
    sm90::consume_bf16<T, TileConfig>(pipeline, state, consumer, tile, accum);
  }
};

// FPROP has K-major weights [N, K], DGRAD reads them MN-major.
template <class T, Major kMajor, class Weights>
struct RowKernelTraits
    : MainloopBf16<RowKernelTraits<T, kMajor, Weights>, RowParams<Weights>, T, RowTileConfig<kMajor>> {
  using Params = RowParams<Weights>;

  static __device__ int32_t pairs(const Params& p, int32_t, RowRange rows) { return row_product_pairs(rows, p.n); }
  static __device__ int32_t pairs_n(const Params& p) { return row_product_pairs_n(p.n); }
  static __device__ WorkTile work_tile(const Params& p, PairCoord at, int rank, RowRange rows) {
    return row_product_tile(at, rank, rows, p.n, p.k);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t group) { return p.weights.map(group); }
  static __device__ int32_t right_row(const Params& p, int32_t group) { return p.weights.first_row(group); }
  static __device__ void run_idle_warps(const Params& p, int thread, int threads) {
    if (p.zero_tail) zero_tail<T>(p, thread, threads);
  }
  static __device__ __forceinline__ void epilogue(const Params& p, int32_t group, const WorkTile& tile, int atom_m,
                                                  float (&accum)[RowTileShape::kN / 2]) {
    const auto* bias = static_cast<const T*>(p.weights.bias(group));
    if (bias != nullptr) add_bias(bias, tile, accum);
    store_accum(Output<T>{static_cast<T*>(p.result), p.pitch, p.wide}, tile, atom_m, false, accum);
  }
};

template <class T, class R>
struct WgradKernelTraits : MainloopBf16<WgradKernelTraits<T, R>, WgradParams, T, WgradTileConfig> {
  using Params = WgradParams;

  static __device__ int32_t pairs(const Params& p, int32_t group, RowRange rows) {
    const Params::Result& result = p.results[group];
    return wgrad_pairs(rows, p.n, p.k, result.data != nullptr, result.add);
  }
  static __device__ int32_t pairs_n(const Params& p) { return tiles_over(p.k, WgradTileShape::kN); }
  static __device__ WorkTile work_tile(const Params& p, PairCoord at, int rank, RowRange rows) {
    return wgrad_tile(at, rank, rows, p.n, p.k);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t) { return &p.right; }
  static __device__ int32_t right_row(const Params&, int32_t) { return 0; }
  static __device__ void run_idle_warps(const Params&, int, int) {}
  static __device__ __forceinline__ void epilogue(const Params& p, int32_t group, const WorkTile& tile, int atom_m,
                                                  float (&accum)[WgradTileShape::kN / 2]) {
    const Params::Result& result = p.results[group];
    const Output<R> output{static_cast<R*>(result.data), result.pitch, result.wide};
    store_accum<8, true>(output, tile, atom_m, result.add, accum);
  }
};

}  // namespace te::gemm::grouped
