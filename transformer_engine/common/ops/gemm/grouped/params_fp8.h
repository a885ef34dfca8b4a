// What grouped kernels of FP8 operands are told, by value, and which tiles their products consist of.
#pragma once

#include "ops/gemm/grouped/grouped_gemm.h"
#include "ops/gemm/grouped/params.h"

namespace te::gemm::grouped {

// A tensor map and two addresses a group fit into 32,764 bytes of kernel parameters.
constexpr int kFp8LaunchGroups = 224;
constexpr int kFp8Depth = 128;  // of a block of operands, and of a scale
static_assert(kFp8LaunchGroups <= kLaunchGroups && kFp8Depth == kPanelRows);

// FPROP and DGRAD.
struct Fp8RowParams {
  CUtensorMap left;
  CUtensorMap weights[kFp8LaunchGroups];
  const void* biases[kFp8LaunchGroups];  // NULL each where there are none
  const float* weight_scales[kFp8LaunchGroups];
  const float* row_scales;  // of blocks and rows, or of this launch's groups
  int64_t row_scales_pitch, weight_scales_pitch;
  void* result;
  int64_t pitch;
  te_dtype dtype;  // of the result
  Common common;
  int32_t cols, depth;
  bool wide, zero_tail;
};

// WGRAD.
struct Fp8WeightParams {
  struct Result {
    void* data;  // NULL: not wanted
    int64_t pitch;
    te_dtype dtype;
    bool wide, add;
  };
  struct Scales {
    const float* data;  // of panels and columns, or of this launch's groups
    int64_t pitch;
  };
  CUtensorMap left, right;
  Result results[kFp8LaunchGroups];
  Scales left_scales, right_scales;
  Common common;    // its rows: no more than there are panels for
  int32_t earlier;  // groups of launches before this one; their offsets come before this launch's
  int32_t panels;   // that there is room for
  int32_t n, k;
};
static_assert(sizeof(Fp8RowParams) <= 32764 && sizeof(Fp8WeightParams) <= 32764);

// Tiles of row products lie as those of other operands; the depth is cut elsewhere.
TE_HOST_DEVICE Extent fp8_row_extent(PairAt at, int rank, RowRange rows, int32_t cols, int32_t depth) {
  Extent e = row_product_extent(at, rank, rows, cols, depth);
  e.blocks = tiles_over(depth, kFp8Depth);
  return e;
}

// Of a weight gradient: 256 of N by 128 of K, neighbours along K; its depth is the group's panels.
TE_HOST_DEVICE int32_t fp8_weight_pairs(RowRange panels, int64_t n, int64_t k, bool wanted, bool add) {
  if (!wanted || (add && panels.first == panels.last)) return 0;
  return tiles_over(n, RowTile::kRows) * row_product_col_pairs(k);
}
TE_HOST_DEVICE Extent fp8_weight_extent(PairAt at, int rank, RowRange panels, int32_t n, int32_t k) {
  Extent e = row_product_extent(at, rank, {0, n}, k, 0);
  e.depth = panels.first;
  e.blocks = panels.last - panels.first;
  return e;
}

namespace cuda {
void launch_fp8_rows(te_dtype rows, te_scaling scaling, const Fp8RowParams& params, const Launch& launch);
void launch_fp8_weights(te_dtype rows, te_scaling scaling, const Fp8WeightParams& params, const Launch& launch);
}  // namespace cuda

}  // namespace te::gemm::grouped
