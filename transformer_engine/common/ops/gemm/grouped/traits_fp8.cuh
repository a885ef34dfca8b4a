// The grouped kernel's jobs on FP8 operands: where boxes come from, whose panels are whose, and what becomes of the
// sums. Results' dtypes are asked at run time, once a tile, so that a kernel serves all of them.
#pragma once

#include "core/fp8.h"
#include "ops/gemm/sm90/kernel.cuh"
#include "ops/gemm/sm90/scales.cuh"

namespace te::gemm::grouped {

// f(R{}) of a result's dtype.
template <class F>
__device__ __forceinline__ void with_result(te_dtype dtype, F&& f) {
  if (dtype == TE_BFLOAT16) return f(bf16{});
  if (dtype == TE_FLOAT16) return f(fp16{});
  f(float{});
}
// What a job does with the ring. Job::left_at(p, e, block) and right_at: where a block's boxes begin.
template <class Job, class Params, class Left, class Scales>
struct Fp8Loop {
  using Ring = typename Scales::Ring;
  using Plan = wgmma::Fp8Plan;

  static __device__ void open(int consumer) { wgmma::Turns{consumer}.open(); }
  static __device__ void close(int consumer) { wgmma::Turns{consumer}.close(); }
  static __device__ __forceinline__ void produce(Ring& ring, wgmma::RingPlace& place, const Params& p, int32_t group,
                                                 const Extent& e, int rank) {
    struct {
      const Params& p;
      const Extent& e;
      __device__ wgmma::BoxAt left(int block) const { return Job::left_at(p, e, block); }
      __device__ wgmma::BoxAt right(int block) const { return Job::right_at(p, e, block); }
    } const at{p, e};
    const typename Scales::Copies copies(ring, p, e);
    wgmma::produce_fp8(ring, place, &p.left, Job::right_map(p, group), e.blocks, rank, at, copies);
  }
  static __device__ __forceinline__ void pass(Ring& ring, wgmma::RingPlace& place, const Extent& e, int consumer) {
    wgmma::pass_fp8(ring, place, consumer, e.blocks);
  }
  static __device__ __forceinline__ void consume(Ring& ring, wgmma::RingPlace& place, const Params& p, int32_t group,
                                                 const Extent& e, int consumer, Fp8Sums& sums) {
    Scales scales(ring, p, group, e, consumer);
    wgmma::consume_fp8<Left>(ring, place, consumer, e.blocks, scales, sums);
    scales.finish(sums);
  }
};

// FPROP and DGRAD: rows and weights lie along the depth in both.
template <class Left, class Scales>
struct Fp8RowJob : Fp8Loop<Fp8RowJob<Left, Scales>, Fp8RowParams, Left, Scales> {
  using Params = Fp8RowParams;

  static __device__ void find_ranges(RowRange* rows, int32_t*, const Params& p) { find_rows(rows, p.common); }
  static __device__ int32_t pairs(const Params& p, int32_t, RowRange rows) { return row_product_pairs(rows, p.cols); }
  static __device__ int32_t col_pairs(const Params& p) { return row_product_col_pairs(p.cols); }
  static __device__ Extent extent(const Params& p, PairAt at, int rank, RowRange rows) {
    return fp8_row_extent(at, rank, rows, p.cols, p.depth);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t group) { return &p.weights[group]; }
  static __device__ wgmma::BoxAt left_at(const Params&, const Extent& e, int block) {
    return {block * kFp8Depth, e.row};
  }
  static __device__ wgmma::BoxAt right_at(const Params&, const Extent& e, int block) {
    return {block * kFp8Depth, e.col};
  }
  static __device__ void beside(const Params& p, int thread, int threads) {
    if (!p.zero_tail) return;
    with_result(p.dtype, [&](auto type) { zero_tail<decltype(type)>(p, thread, threads); });
  }
  static __device__ __forceinline__ void finish(const Params& p, int32_t group, const Extent& e, int slab,
                                                Fp8Partial& sums) {
    with_result(p.dtype, [&](auto type) {
      using R = decltype(type);
      using B = std::conditional_t<std::is_same_v<R, fp16>, fp16, bf16>;
      const auto* bias = static_cast<const B*>(p.biases[group]);
      if (bias != nullptr) add_bias(bias, e, sums);
      store_slab(Target<R>{static_cast<R*>(p.result), p.pitch, p.wide}, e, slab, false, sums);
    });
  }
};

// WGRAD: a range is a group's panels.
template <class Left, class Scales>
struct Fp8WeightJob : Fp8Loop<Fp8WeightJob<Left, Scales>, Fp8WeightParams, Left, Scales> {
  using Params = Fp8WeightParams;

  // By all threads; `sums` is free to use.
  static __device__ void find_ranges(RowRange* panels, int32_t* sums, const Params& p) {
    const int32_t *offsets = p.common.offsets, groups = p.common.groups;
    const auto count = [&](int32_t g) {
      const RowRange rows = rows_between(offsets[g], offsets[g + 1], p.common.rows);
      return int32_t(panels_of(rows.last - rows.first));
    };
    for (int32_t g = int32_t(threadIdx.x); g < groups; g += wgmma::kThreads) sums[g] = count(g);
    __syncthreads();
    if (threadIdx.x < 32) {
      int32_t start = 0;
      for (int32_t g = int32_t(threadIdx.x); g < p.earlier; g += 32) {
        start = sum_up_to(p.panels, start, count(g - p.earlier));
      }
      for (int bits = 1; bits < 32; bits *= 2) {
        start = sum_up_to(p.panels, start, __shfl_xor_sync(kWholeWarp, start, bits));
      }
      sum_up(sums, groups, start, p.panels);
    }
    __syncthreads();
    for (int32_t g = int32_t(threadIdx.x); g < groups; g += wgmma::kThreads) panels[g] = {sums[g], sums[g + 1]};
    __syncthreads();
  }
  static __device__ int32_t pairs(const Params& p, int32_t group, RowRange panels) {
    const Params::Result& result = p.results[group];
    return fp8_weight_pairs(panels, p.n, p.k, result.data != nullptr, result.add);
  }
  static __device__ int32_t col_pairs(const Params& p) { return row_product_col_pairs(p.k); }
  static __device__ Extent extent(const Params& p, PairAt at, int rank, RowRange panels) {
    return fp8_weight_extent(at, rank, panels, p.n, p.k);
  }
  static __device__ const CUtensorMap* right_map(const Params& p, int32_t) { return &p.right; }
  static __device__ wgmma::BoxAt left_at(const Params& p, const Extent& e, int block) {
    return {0, (e.depth + block) * p.n + e.row};
  }
  static __device__ wgmma::BoxAt right_at(const Params& p, const Extent& e, int block) {
    return {0, (e.depth + block) * p.k + e.col};
  }
  static __device__ void beside(const Params&, int, int) {}
  static __device__ __forceinline__ void finish(const Params& p, int32_t group, const Extent& e, int slab,
                                                Fp8Partial& sums) {
    const Params::Result& result = p.results[group];
    with_result(result.dtype, [&](auto type) {
      using R = decltype(type);
      store_slab(Target<R>{static_cast<R*>(result.data), result.pitch, result.wide}, e, slab, result.add, sums);
    });
  }
};

}  // namespace te::gemm::grouped
