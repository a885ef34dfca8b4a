// Which tiles a grouped product consists of, and which CTA computes them: rows of groups from offsets, the number of
// tile pairs before each group, the tile of a number. Index functions for host and device.
#pragma once

#include <cstdint>

#include "core/search.h"
#include "ops/gemm/sm90/config.h"

namespace te::gemm::sm90 {

// A tensor map of 128 bytes and a bias's address for each group fit into 32,764 bytes of kernel parameters.
constexpr int kLaunchGroups = 238;
constexpr int32_t kMostPairs = INT32_MAX / 2;  // of tiles, in one launch
constexpr int kBand = 8;  // row tiles that are rasterised column by column, so that both operands stay in L2

TE_HOST_DEVICE int32_t tiles_over(int64_t extent, int tile) { return int32_t((extent + tile - 1) / tile); }

struct RowRange {
  int32_t first, last;
};
// Rows of a group, cut to [0, rows] for any offsets.
TE_HOST_DEVICE RowRange rows_between(int32_t from, int32_t to, int32_t rows) {
  const int32_t first = from < 0 ? 0 : from > rows ? rows : from;
  const int32_t last = to < first ? first : to > rows ? rows : to;
  return {first, last};
}

// Pairs of tiles of one group. A row product has the group's rows as M.
TE_HOST_DEVICE int32_t row_product_pairs_n(int64_t n) { return tiles_over(n, RowTileShape::kN * kCluster); }
TE_HOST_DEVICE int32_t row_product_pairs(RowRange rows, int64_t n) {
  return tiles_over(rows.last - rows.first, RowTileShape::kM) * row_product_pairs_n(n);
}
// N and K of the weight: M and N of its gradient. Zero where the gradient is not wanted or nothing is added to it.
TE_HOST_DEVICE int32_t wgrad_pairs(RowRange rows, int64_t n, int64_t k, bool wanted, bool accumulate) {
  if (!wanted || (accumulate && rows.first == rows.last)) return 0;
  return tiles_over(n, WgradTileShape::kM * kCluster) * tiles_over(k, WgradTileShape::kN);
}

struct PairCoord {
  int32_t group, m, n;  // m and n count pairs
};
// The pair of tiles `number`. before[g] pairs come before group g, before[groups] are all.
TE_HOST_DEVICE PairCoord pair_coord(const int32_t* before, int32_t groups, int32_t pairs_n, int32_t number) {
  const int32_t group = run_of(before, groups, number);
  const int32_t in_group = number - before[group], pairs_m = (before[group + 1] - before[group]) / pairs_n;
  const int32_t band = in_group / (kBand * pairs_n), in_band = in_group - band * kBand * pairs_n;
  const int32_t left = pairs_m - band * kBand, height = left < kBand ? left : kBand;
  return {group, band * kBand + in_band % height, in_band / height};
}

// The work of one CTA. At an edge one tile of a pair may have no results: m or n is beyond the end.
struct WorkTile {
  int32_t m, m_end;     // rows of the result; the left operand begins at m
  int32_t n, n_end;     // columns; the right operand begins at n
  int32_t k, k_blocks;  // where K begins in both operands, and its k_blocks
  int32_t last_k;       // rows of the last k_block that belong to the group
};
TE_HOST_DEVICE WorkTile row_product_tile(PairCoord at, int rank, RowRange rows, int32_t n, int32_t k) {
  // TMA fills both operands with zeros beyond K.
  return {rows.first + at.m * RowTileShape::kM,
          rows.last,
          (at.n * kCluster + rank) * RowTileShape::kN,
          n,
          0,
          tiles_over(k, kTileK),
          kTileK};
}
TE_HOST_DEVICE WorkTile wgrad_tile(PairCoord at, int rank, RowRange rows, int32_t n, int32_t k) {
  const int32_t count = rows.last - rows.first, k_blocks = tiles_over(count, kTileK);
  return {(at.m * kCluster + rank) * WgradTileShape::kM,
          n,
          at.n * WgradTileShape::kN,
          k,
          rows.first,
          k_blocks,
          count - (k_blocks - 1) * kTileK};
}

}  // namespace te::gemm::sm90
