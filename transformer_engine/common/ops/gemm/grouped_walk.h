// Which tiles grouped products consist of and who computes them: rows of groups from offsets, tiles before each group,
// the tile of a number, its extents. Index functions for host and device; computes nothing.
#pragma once

#include <cstdint>

#include "ops/gemm/wgmma_layout.h"

namespace te::gemm::grouped {

// A tensor map of 128 bytes and a bias's address for each group fit into 32,764 bytes of kernel parameters.
constexpr int kLaunchGroups = 238;
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

// Tiles of a group of a row product: its own rows times all columns.
TE_HOST_DEVICE int32_t row_product_tiles(RowRange rows, int64_t cols) {
  return tiles_over(rows.last - rows.first, wgmma::kTileRows) * tiles_over(cols, wgmma::kTileCols);
}
// Of a weight gradient: none where nobody wants it or nothing is added.
TE_HOST_DEVICE int32_t weight_gradient_tiles(RowRange rows, int64_t n, int64_t k, bool wanted, bool accumulate) {
  if (!wanted || (accumulate && rows.first == rows.last)) return 0;
  return tiles_over(n, wgmma::kTileRows) * tiles_over(k, wgmma::kTileCols);
}

struct TileAt {
  int32_t group, row_tile, col_tile;
};
// Tile `number` of all, of which before[g] come before group g and before[groups] are all; groups in their order.
TE_HOST_DEVICE TileAt tile_at(const int32_t* before, int32_t groups, int32_t col_tiles, int32_t number) {
  int32_t low = 0, high = groups - 1;
  while (low < high) {  // the last group that begins no later: those without tiles come before it
    const int32_t middle = (low + high + 1) / 2;
    if (before[middle] <= number) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int32_t in_group = number - before[low], row_tiles = (before[low + 1] - before[low]) / col_tiles;
  const int32_t band = in_group / (kBand * col_tiles), in_band = in_group - band * kBand * col_tiles;
  const int32_t left = row_tiles - band * kBand, height = left < kBand ? left : kBand;
  return {low, band * kBand + in_band % height, in_band / height};
}

// What one tile reads and writes. Left and right operand begin at `across`; the depth is what is reduced.
struct Extent {
  int32_t row, row_end;  // of the result; left operand's `across` is `row`
  int32_t col, col_end;
  int32_t depth, blocks;  // where the depth begins in both operands, and its blocks of kTileDepth
  int32_t last_depth;     // of the last block, lines that are the group's own
};
TE_HOST_DEVICE Extent row_product_extent(TileAt at, RowRange rows, int32_t cols, int32_t depth) {
  const int32_t blocks = tiles_over(depth, wgmma::kTileDepth);
  // Beyond the depth TMA fills both operands with zeros.
  return {rows.first + at.row_tile * wgmma::kTileRows,
          rows.last,
          at.col_tile * wgmma::kTileCols,
          cols,
          0,
          blocks,
          wgmma::kTileDepth};
}
TE_HOST_DEVICE Extent weight_gradient_extent(TileAt at, RowRange rows, int32_t n, int32_t k) {
  const int32_t count = rows.last - rows.first, blocks = tiles_over(count, wgmma::kTileDepth);
  return {at.row_tile * wgmma::kTileRows,          n, at.col_tile * wgmma::kTileCols, k, rows.first, blocks,
          count - (blocks - 1) * wgmma::kTileDepth};
}

// The first 16-byte piece of a box of 64 lines of the depth that is not the group's own.
TE_HOST_DEVICE int first_foreign_piece(int32_t own_lines) { return own_lines * (wgmma::kLine / 16); }

}  // namespace te::gemm::grouped
