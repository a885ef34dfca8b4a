// Parameters of the grouped kernels of FP8 operands, passed by value, and the tiles of their products.
#pragma once

#include "ops/gemm/grouped/params.h"
#include "ops/gemm/grouped/problem.h"

namespace te::gemm::grouped {

// A tensor map and two addresses for each group fit into 32,764 bytes of kernel parameters.
constexpr int kFp8LaunchGroups = 224;
static_assert(kFp8LaunchGroups <= kLaunchGroups && kFp8TileK == kPanelRows);

// FPROP and DGRAD.
struct Fp8RowParams {
  CUtensorMap left;
  CUtensorMap weights[kFp8LaunchGroups];
  const void* biases[kFp8LaunchGroups];  // NULL each where there are none
  const float* weight_scales[kFp8LaunchGroups];
  const float* row_scales;  // [blocks of K, rows], or one for each group of this launch
  int64_t row_scales_pitch, weight_scales_pitch;
  void* result;
  int64_t pitch;
  te_dtype dtype;  // of the result
  Common common;
  int32_t n, k;
  bool wide, zero_tail;

  TE_HOST_DEVICE float left_scale(int32_t group) const { return row_scales[group]; }
  TE_HOST_DEVICE float right_scale(int32_t group) const { return weight_scales[group][0]; }
};

// WGRAD.
struct Fp8WgradParams {
  struct Result {
    void* data;  // NULL: not wanted
    int64_t pitch;
    te_dtype dtype;
    bool wide, add;
  };
  struct Scales {
    const float* data;  // [panels, columns], or one for each group of this launch
    int64_t pitch;
  };
  CUtensorMap left, right;
  Result results[kFp8LaunchGroups];
  Scales left_scales, right_scales;
  Common common;    // rows: at most those that the panels hold
  int32_t earlier;  // groups of earlier launches, whose offsets precede this launch's
  int32_t panels;   // capacity
  int32_t n, k;

  TE_HOST_DEVICE float left_scale(int32_t group) const { return left_scales.data[group]; }
  TE_HOST_DEVICE float right_scale(int32_t group) const { return right_scales.data[group]; }
};

// With the tensor maps of results that are staged (sm90/staging.cuh).
struct StagedFp8RowParams : Fp8RowParams {
  CUtensorMap output;
};
constexpr int kFp8StagedWgradGroups = 200;  // of a launch
struct StagedFp8WgradParams : Fp8WgradParams {
  CUtensorMap outputs[kFp8StagedWgradGroups];
};
static_assert(sizeof(StagedFp8RowParams) <= 32764 && sizeof(StagedFp8WgradParams) <= 32764);
static_assert(kFp8StagedWgradGroups <= kFp8LaunchGroups);

// Tiles of row products are those of other operands, with k_blocks of kFp8TileK.
TE_HOST_DEVICE WorkTile fp8_row_tile(PairCoord at, int rank, RowRange rows, int32_t n, int32_t k) {
  WorkTile tile = row_product_tile(at, rank, rows, n, k);
  tile.k_blocks = tiles_over(k, kFp8TileK);
  return tile;
}

// Tiles of a weight gradient are 256 of N by 128 of K, neighbours along K; a panel of the group is a k_block.
TE_HOST_DEVICE int32_t fp8_wgrad_pairs(RowRange panels, int64_t n, int64_t k, bool wanted, bool add) {
  if (!wanted || (add && panels.first == panels.last)) return 0;
  return tiles_over(n, RowTileShape::kM) * row_product_pairs_n(k);
}
TE_HOST_DEVICE WorkTile fp8_wgrad_tile(PairCoord at, int rank, RowRange panels, int32_t n, int32_t k) {
  WorkTile tile = row_product_tile(at, rank, {0, n}, k, 0);
  tile.k = panels.first;
  tile.k_blocks = panels.last - panels.first;
  return tile;
}

}  // namespace te::gemm::grouped
