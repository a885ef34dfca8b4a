// Index functions that the contract and the two paths of grouped quantize share: panels of groups, and the writers of
// amax_parts. For host and device.
#pragma once

#include "core/search.h"
#include "transformer_engine/grouped_quantize.h"

namespace te::quantize::grouped {

constexpr int kMostGroups = TE_GROUPED_QUANTIZE_GROUPS;
constexpr int kPanelRows = 128;

TE_HOST_DEVICE int32_t panels_of(int32_t rows) { return rows > 0 ? (rows - 1) / kPanelRows + 1 : 0; }

// The panels of group g, for any offsets; a sum of these wraps around.
TE_HOST_DEVICE uint32_t panels_between(const int32_t* offsets, int32_t g) {
  const int64_t rows = int64_t(offsets[g + 1]) - offsets[g];
  return rows > 0 ? uint32_t((rows - 1) / kPanelRows + 1) : 0;
}

// The largest number of panels of `rows` rows in `groups` groups: m groups with a row of their own, the rest 128 at a
// time.
TE_HOST_DEVICE int64_t most_panels(int64_t rows, int64_t groups) {
  const int64_t m = groups < rows ? groups : rows;
  return (rows - m) / kPanelRows + m;
}

TE_HOST_DEVICE int32_t clamp_row(int32_t offset, int32_t rows) {
  return offset < 0 ? 0 : offset > rows ? rows : offset;
}

struct PanelAt {
  int32_t group, in_group;  // in_group: among the group's panels
};

// The panel `number`. before[g] panels come before group g, before[groups] are all.
TE_HOST_DEVICE PanelAt panel_at(const int32_t* before, int32_t groups, int32_t number) {
  const int32_t group = run_of(before, groups, number);
  return {group, number - before[group]};
}

// The amax pass. Tiles are numbered group by group, and each block has a run of them; the result of block b for group g
// is part b + g: of two adjacent pairs, the later one has one number higher and none lower.
struct AmaxRuns {
  int32_t step;  // tiles for each block

  TE_HOST_DEVICE AmaxRuns(int32_t tiles, int32_t blocks) : step(tiles > 0 ? (tiles - 1) / blocks + 1 : 1) {}
  TE_HOST_DEVICE int32_t first_part(int32_t group, int32_t first_tile) const { return first_tile / step + group; }
  // For a group of at least one tile.
  TE_HOST_DEVICE int32_t last_part(int32_t group, int32_t end_tile) const { return (end_tile - 1) / step + group; }
};

}  // namespace te::quantize::grouped
