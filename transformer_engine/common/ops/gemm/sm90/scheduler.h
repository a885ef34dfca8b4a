// Which tiles grouped products consist of and who computes them: rows of groups from offsets, tiles before each group,
// the tile of a number, its extents. Index functions for host and device; computes nothing.
#pragma once

#include <cstdint>

#include "core/search.h"
#include "ops/gemm/sm90/layout.h"

namespace te::gemm::grouped {

// A tensor map of 128 bytes and a bias's address for each group fit into 32,764 bytes of kernel parameters.
constexpr int kLaunchGroups = 238;
constexpr int32_t kMostPairs = INT32_MAX / 2;  // of tiles, in one launch
constexpr int kBand = 8;  // row tiles that are walked column by column, so that both operands stay in L2

TE_HOST_DEVICE int32_t tiles_over(int64_t extent, int tile) { return int32_t((extent + tile - 1) / tile); }

struct RowRange {
  int32_t first, last;
};
// Rows of a group; cut into [0, rows], whatever the offsets are.
TE_HOST_DEVICE RowRange rows_between(int32_t from, int32_t to, int32_t rows) {
  const int32_t first = from < 0 ? 0 : from > rows ? rows : from;
  const int32_t last = to < first ? first : to > rows ? rows : to;
  return {first, last};
}

// Row products: 256 x 128 results a tile, of which the two blocks of a cluster have neighbours in a row, and the rows
// of the group in common. That never costs anything; weights in common would, where groups are short.
using RowTile = wgmma::Tile<256, 128>;
template <wgmma::Major kWeights>
using RowPlan = wgmma::Plan<RowTile, wgmma::Major::kDepth, kWeights, wgmma::Common::kLeft>;
// Weight gradients: 128 x 256, neighbours in a column.
using WeightTile = wgmma::Tile<128, 256>;
using WeightPlan = wgmma::Plan<WeightTile, wgmma::Major::kAcross, wgmma::Major::kAcross, wgmma::Common::kRight>;

// Pairs of tiles of a group of a row product: its own rows times all columns.
TE_HOST_DEVICE int32_t row_product_col_pairs(int64_t cols) {
  return tiles_over(cols, RowTile::kCols * wgmma::kCluster);
}
TE_HOST_DEVICE int32_t row_product_pairs(RowRange rows, int64_t cols) {
  return tiles_over(rows.last - rows.first, RowTile::kRows) * row_product_col_pairs(cols);
}
// Of a weight gradient: none where nobody wants it or nothing is added.
TE_HOST_DEVICE int32_t weight_gradient_pairs(RowRange rows, int64_t n, int64_t k, bool wanted, bool accumulate) {
  if (!wanted || (accumulate && rows.first == rows.last)) return 0;
  return tiles_over(n, WeightTile::kRows * wgmma::kCluster) * tiles_over(k, WeightTile::kCols);
}

struct PairAt {
  int32_t group, row, col;  // counted in the pairs' rows and columns
};
// Pair of tiles `number` of all, of which before[g] come before group g and before[groups] are all; groups in their
// order.
TE_HOST_DEVICE PairAt pair_at(const int32_t* before, int32_t groups, int32_t cols, int32_t number) {
  const int32_t group = run_of(before, groups, number);
  const int32_t in_group = number - before[group], rows = (before[group + 1] - before[group]) / cols;
  const int32_t band = in_group / (kBand * cols), in_band = in_group - band * kBand * cols;
  const int32_t left = rows - band * kBand, height = left < kBand ? left : kBand;
  return {group, band * kBand + in_band % height, in_band / height};
}

// What one tile of a pair reads and writes. One of a pair at an edge may have no results: row or col is beyond the end.
struct Extent {
  int32_t row, row_end;   // of the result; the left operand begins at `row`
  int32_t col, col_end;   // the right one at `col`
  int32_t depth, blocks;  // where the depth begins in both operands, and its blocks of kTileDepth
  int32_t last_depth;     // of the last block, lines that are the group's own
};
TE_HOST_DEVICE Extent row_product_extent(PairAt at, int rank, RowRange rows, int32_t cols, int32_t depth) {
  // Beyond the depth TMA fills both operands with zeros.
  return {rows.first + at.row * RowTile::kRows,
          rows.last,
          (at.col * wgmma::kCluster + rank) * RowTile::kCols,
          cols,
          0,
          tiles_over(depth, wgmma::kTileDepth),
          wgmma::kTileDepth};
}
TE_HOST_DEVICE Extent weight_gradient_extent(PairAt at, int rank, RowRange rows, int32_t n, int32_t k) {
  const int32_t count = rows.last - rows.first, blocks = tiles_over(count, wgmma::kTileDepth);
  return {(at.row * wgmma::kCluster + rank) * WeightTile::kRows,
          n,
          at.col * WeightTile::kCols,
          k,
          rows.first,
          blocks,
          count - (blocks - 1) * wgmma::kTileDepth};
}

}  // namespace te::gemm::grouped
