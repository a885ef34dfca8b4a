// KernelTraits of grouped products on FP8 operands: boxes of the operands, panels of the groups, and the epilogue. The
// dtype of a result is a run-time argument, read once a tile, so that one kernel serves all dtypes. Results that are
// staged have kernels of their own (sm90/staging.cuh).
#pragma once

#include "core/fp8.h"
#include "ops/gemm/grouped/params_fp8.h"
#include "ops/gemm/grouped/traits.cuh"
#include "ops/gemm/sm90/mainloop_fp8.cuh"
#include "ops/gemm/sm90/scales.cuh"

namespace te::gemm::grouped {

// Calls f(R{}) with the type of a result's dtype.
template <class F>
__device__ __forceinline__ void with_result(te_dtype dtype, F&& f) {
  if (dtype == TE_BFLOAT16) return f(bf16{});
  if (dtype == TE_FLOAT16) return f(fp16{});
  f(float{});
}

// The main loop of FP8 operands. Traits::left_at(p, tile, k_block) and right_at: where the boxes of a k_block begin.
template <class Traits, class Params, class Left, class Scales, bool kStagedOf>
struct MainloopFp8 {
  using Pipeline = typename Scales::Pipeline;
  using TileConfig = sm90::Fp8TileConfig;
  static constexpr bool kStaged = kStagedOf;

  static __device__ void open(int consumer) { sm90::OrderedSequence{consumer}.open(); }
  static __device__ void close(int consumer) { sm90::OrderedSequence{consumer}.close(); }
  static __device__ __forceinline__ void produce(Pipeline& pipeline, sm90::PipelineState& state, const Params& p,
                                                 int32_t group, const WorkTile& tile, int rank) {
    struct {
      const Params& p;
      const WorkTile& tile;
      __device__ sm90::BoxCoord left(int k_block) const { return Traits::left_at(p, tile, k_block); }
      __device__ sm90::BoxCoord right(int k_block) const { return Traits::right_at(p, tile, k_block); }
    } const at{p, tile};
    const typename Scales::Loads loads(pipeline, p, tile);
    sm90::produce_fp8(pipeline, state, &p.left, Traits::right_map(p, group), tile.k_blocks, rank, at, loads);
  }
  static __device__ __forceinline__ void skip(Pipeline& pipeline, sm90::PipelineState& state, const WorkTile& tile,
                                              int consumer) {
    sm90::skip_fp8(pipeline, state, consumer, tile.k_blocks);
  }
  static __device__ __forceinline__ void consume(Pipeline& pipeline, sm90::PipelineState& state, const Params& p,
                                                 int32_t group, const WorkTile& tile, int consumer, Fp8Accum& accum) {
    Scales scales(pipeline, p, group, tile, consumer);
    sm90::consume_fp8<Left>(pipeline, state, consumer, tile.k_blocks, scales, accum);
    scales.finish(accum);
  }
};

// FPROP and DGRAD: rows and weights are K-major in both.
template <class Left, class Scales, bool kStaged = false>
struct Fp8RowKernelTraits
    : MainloopFp8<Fp8RowKernelTraits<Left, Scales, kStaged>, Fp8RowParams, Left, Scales, kStaged> {
  using Params = Fp8RowParams;

  static __device__ void find_ranges(RowRange* rows, int32_t*, const Params& p) { find_rows(rows, p.common); }
  static __device__ int32_t pairs(const Params& p, int32_t, RowRange rows) { return row_product_pairs(rows, p.n); }
  static __device__ int32_t pairs_n(const Params& p) { return row_product_pairs_n(p.n); }
  static __device__ WorkTile work_tile(const Params& p, PairCoord at, int rank, RowRange rows) {
    return fp8_row_tile(at, rank, rows, p.n, p.k);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t group) { return &p.weights[group]; }
  static __device__ sm90::BoxCoord left_at(const Params&, const WorkTile& tile, int k_block) {
    return {k_block * kFp8TileK, tile.m};
  }
  static __device__ sm90::BoxCoord right_at(const Params&, const WorkTile& tile, int k_block) {
    return {k_block * kFp8TileK, tile.n};
  }
  static __device__ void run_idle_warps(const Params& p, int thread, int threads) {
    if (!p.zero_tail) return;
    if constexpr (kStaged) {
      zero_whole_pieces<bf16>(p, thread);  // staged rows have two-byte results
    } else {
      with_result(p.dtype, [&](auto type) { zero_tail<decltype(type)>(p, thread, threads); });
    }
  }
  template <class R>
  static __device__ __forceinline__ void add_group_bias(const Params& p, int32_t group, const WorkTile& tile,
                                                        Fp8Partial& accum) {
    using B = std::conditional_t<std::is_same_v<R, fp16>, fp16, bf16>;
    const auto* bias = static_cast<const B*>(p.biases[group]);
    if (bias != nullptr) add_bias(bias, tile, accum);
  }
  static __device__ __forceinline__ void epilogue(const Params& p, int32_t group, const WorkTile& tile, int atom_m,
                                                  Fp8Partial& accum) {
    with_result(p.dtype, [&](auto type) {
      using R = decltype(type);
      add_group_bias<R>(p, group, tile, accum);
      store_accum(Output<R>{static_cast<R*>(p.result), p.pitch, p.wide}, tile, atom_m, false, accum);
    });
  }
};

template <class Left, class Scales>
struct StagedFp8RowKernelTraits : Fp8RowKernelTraits<Left, Scales, true> {
  using Params = StagedFp8RowParams;

  static __device__ const CUtensorMap* output_map(const Params& p, int32_t) { return &p.output; }
  // Calls f(R{}) with the type of a group's results.
  template <class F>
  static __device__ __forceinline__ void with_staged(const Params& p, int32_t, F&& f) {
    if (p.dtype == TE_BFLOAT16) return f(bf16{});
    f(fp16{});
  }
};

// WGRAD: a range is a group's panels.
template <class Left, class Scales, bool kStaged = false>
struct Fp8WgradKernelTraits
    : MainloopFp8<Fp8WgradKernelTraits<Left, Scales, kStaged>, Fp8WgradParams, Left, Scales, kStaged> {
  using Params = Fp8WgradParams;

  // By all threads; `counts` is scratch memory.
  static __device__ void find_ranges(RowRange* panels, int32_t* counts, const Params& p) {
    const int32_t *offsets = p.common.offsets, groups = p.common.groups;
    const auto count = [&](int32_t g) {
      const RowRange rows = rows_between(offsets[g], offsets[g + 1], p.common.rows);
      return int32_t(panels_of(rows.last - rows.first));
    };
    for (int32_t g = int32_t(threadIdx.x); g < groups; g += sm90::kThreads) counts[g] = count(g);
    __syncthreads();
    if (threadIdx.x < 32) {
      int32_t start = 0;
      for (int32_t g = int32_t(threadIdx.x); g < p.earlier; g += 32) {
        start = sum_up_to(p.panels, start, count(g - p.earlier));
      }
      for (int bits = 1; bits < 32; bits *= 2) {
        start = sum_up_to(p.panels, start, __shfl_xor_sync(kFullWarp, start, bits));
      }
      sum_up(counts, groups, start, p.panels);
    }
    __syncthreads();
    for (int32_t g = int32_t(threadIdx.x); g < groups; g += sm90::kThreads) panels[g] = {counts[g], counts[g + 1]};
    __syncthreads();
  }
  static __device__ int32_t pairs(const Params& p, int32_t group, RowRange panels) {
    const Params::Result& result = p.results[group];
    return fp8_wgrad_pairs(panels, p.n, p.k, result.data != nullptr, result.add);
  }
  static __device__ int32_t pairs_n(const Params& p) { return row_product_pairs_n(p.k); }
  static __device__ WorkTile work_tile(const Params& p, PairCoord at, int rank, RowRange panels) {
    return fp8_wgrad_tile(at, rank, panels, p.n, p.k);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t) { return &p.right; }
  static __device__ sm90::BoxCoord left_at(const Params& p, const WorkTile& tile, int k_block) {
    return {0, (tile.k + k_block) * p.n + tile.m};
  }
  static __device__ sm90::BoxCoord right_at(const Params& p, const WorkTile& tile, int k_block) {
    return {0, (tile.k + k_block) * p.k + tile.n};
  }
  static __device__ void run_idle_warps(const Params&, int, int) {}
  static __device__ __forceinline__ void epilogue(const Params& p, int32_t group, const WorkTile& tile, int atom_m,
                                                  Fp8Partial& accum) {
    const Params::Result& result = p.results[group];
    with_result(result.dtype, [&](auto type) {
      using R = decltype(type);
      store_accum(Output<R>{static_cast<R*>(result.data), result.pitch, result.wide}, tile, atom_m, result.add, accum);
    });
  }
};

template <class Left, class Scales>
struct StagedFp8WgradKernelTraits : Fp8WgradKernelTraits<Left, Scales, true> {
  using Params = StagedFp8WgradParams;

  static __device__ const CUtensorMap* output_map(const Params& p, int32_t group) { return &p.outputs[group]; }
  template <class R>
  static __device__ void add_group_bias(const Params&, int32_t, const WorkTile&, Fp8Partial&) {}
  // Calls f(R{}) with the type of a group's results.
  template <class F>
  static __device__ __forceinline__ void with_staged(const Params& p, int32_t group, F&& f) {
    with_result(p.results[group].dtype, f);
  }
};

}  // namespace te::gemm::grouped
