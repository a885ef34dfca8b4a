// The layout of live parts: the stream of a group, the cells of its pages, and the tiles of members in them. Pure
// arithmetic on numbers of units, for the CPU and CUDA. stash_pages.h allocates the pages.
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "transformer_engine/stash.h"

namespace te::stash {

constexpr int kMembers = TE_STASH_MOST_MEMBERS;
constexpr int64_t kTile = 16384;  // bytes of one copy; the last tile of a page may be shorter

TE_HOST_DEVICE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
TE_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
TE_HOST_DEVICE int64_t aligned(int64_t bytes) {
  return (bytes + TE_STASH_ALIGNMENT - 1) & -int64_t(TE_STASH_ALIGNMENT);
}

// A member without its repeats.
struct Member {
  void* data;
  const void* counter;
  int32_t counter_bytes, tail;
  int64_t unit_bytes, most, tile_units, trailing;
};

// The members of a call, as a kernel argument.
struct Table {
  Member members[kMembers];
  int32_t count;
};

// Of a call with members of several repeats. Kernels are compiled for either table.
struct StridedTable : Table {
  int64_t repeats[kMembers], pitch[kMembers];
};

template <class AnyTable>
constexpr bool kStrided = std::is_same_v<AnyTable, StridedTable>;

template <class AnyTable>
TE_HOST_DEVICE int64_t repeats_of(const AnyTable& table, int m) {
  if constexpr (kStrided<AnyTable>) return table.repeats[m];
  return 1;
}

TE_HOST_DEVICE int64_t read_counter(const Member& member) {
  if (member.counter_bytes == 1) return *static_cast<const uint8_t*>(member.counter);
  if (member.counter_bytes == 4) return *static_cast<const int32_t*>(member.counter);
  return *static_cast<const int64_t*>(member.counter);
}

// Live units for a value of the counter, trailing units included.
TE_HOST_DEVICE int64_t live_units(int64_t value, const Member& member, uint32_t& flags) {
  if (value < 0) flags |= TE_STASH_NEGATIVE;
  if (value > member.most) flags |= TE_STASH_OVER_CAPACITY;
  return value <= 0 ? 0 : member.most - value < member.trailing ? member.most : value + member.trailing;
}

// The first unit behind the live ones that a load does not write.
TE_HOST_DEVICE int64_t tail_end(const Member& member, int64_t count) {
  if (member.tail == TE_STASH_TAIL_ZERO) return member.most;
  if (member.tail == TE_STASH_TAIL_KEEP) return count;
  return least(member.most, ceil_div(count, member.tile_units) * member.tile_units);
}

// The live parts in the stream. starts[count] is the length of the stream.
struct Layout {
  int64_t counts[kMembers];
  int64_t starts[kMembers + 1];
};

// Of each repeat.
TE_HOST_DEVICE int64_t live_bytes(const Table& table, const Layout& layout, int m) {
  return layout.counts[m] * table.members[m].unit_bytes;
}

template <class AnyTable>
TE_HOST_DEVICE void set_starts(const AnyTable& table, Layout& layout) {
  layout.starts[0] = 0;
  for (int m = 0; m < table.count; ++m) {
    layout.starts[m + 1] = layout.starts[m] + aligned(live_bytes(table, layout, m)) * repeats_of(table, m);
  }
}

// Pages are cut into cells of kTile bytes; the last cell of a page may be shorter. 32 bits count the cells of 64 TiB. A
// GPU needs a hundred instructions to divide 64 bits, so that streams and pages below 512 GiB, which are multiples of
// 128 bytes, are divided in units of 128 bytes.
struct Grid {
  int64_t page_bytes;
  int64_t page_cells;

  TE_HOST_DEVICE int64_t page_of_cell(int64_t cell) const { return uint32_t(cell) / uint32_t(page_cells); }
  TE_HOST_DEVICE int64_t page_at(int64_t byte) const {
    static_assert(TE_STASH_ALIGNMENT == 128);
    if (((byte | page_bytes) >> 39) != 0) return byte / page_bytes;
    return uint32_t(byte >> 7) / uint32_t(page_bytes >> 7);
  }
  TE_HOST_DEVICE int64_t pages_of(int64_t bytes) const { return bytes == 0 ? 0 : page_at(bytes - 1) + 1; }
  TE_HOST_DEVICE int64_t cell_at(int64_t byte) const {
    const int64_t page = page_at(byte);
    return page * page_cells + (byte - page * page_bytes) / kTile;
  }
  // The most cells that `bytes` bytes of the stream have a part in, wherever they begin.
  TE_HOST_DEVICE int64_t most_cells(int64_t bytes) const {
    if (page_bytes % kTile == 0) return ceil_div(bytes - TE_STASH_ALIGNMENT, kTile) + 1;
    const int64_t pages = page_at(bytes);
    return pages * page_cells + ceil_div(bytes - pages * page_bytes, kTile) + 2;
  }
};

// Consecutive bytes of one member in one page: offset in the member, offset in the page.
struct Tile {
  int member;
  int64_t page, in_member, in_page;
  int64_t bytes;
};

// The tiles of a group: each is the part of a member in one cell. Tiles in device pages and tiles in host pages are
// numbered separately, member by member.
struct Tiles {
  int64_t first_cell[kMembers];
  int64_t before[2][kMembers + 1];  // tiles of members before this one: device, host
};

// Each repeat of a member has the same number of tiles, of which some may be empty, in each tier that the member has a
// page of; those in pages of the other tier are empty too.
struct StridedTiles : Tiles {
  int64_t cells[kMembers];  // of a repeat
  int64_t device_pages;
};

template <class AnyTable>
using TilesOf = std::conditional_t<kStrided<AnyTable>, StridedTiles, Tiles>;

// Of member m, which has several repeats.
TE_HOST_DEVICE void cut_repeats(const StridedTable& table, const Layout& layout, const Grid& grid, int64_t device_pages,
                                int m, StridedTiles& tiles) {
  const int64_t bytes = live_bytes(table, layout, m), start = layout.starts[m], end = layout.starts[m + 1];
  tiles.cells[m] = bytes == 0 ? 1 : grid.most_cells(aligned(bytes));
  const int64_t all = bytes == 0 ? 0 : table.repeats[m] * tiles.cells[m];
  tiles.before[0][m + 1] = all != 0 && grid.page_at(start) < device_pages ? all : 0;
  tiles.before[1][m + 1] = all != 0 && grid.page_at(end - 1) >= device_pages ? all : 0;
}

// Writes the numbers of tiles of member m to `before`; sum_tiles() adds them up.
template <class AnyTable>
TE_HOST_DEVICE void cut_member(const AnyTable& table, const Layout& layout, const Grid& grid, int64_t device_pages,
                               int m, TilesOf<AnyTable>& tiles) {
  if constexpr (kStrided<AnyTable>) {
    if (m == 0) tiles.device_pages = device_pages;  // a lane for each member calls this
    if (table.repeats[m] > 1) return cut_repeats(table, layout, grid, device_pages, m, tiles);
  }
  const int64_t bytes = live_bytes(table, layout, m), start = layout.starts[m];
  const int64_t first = bytes == 0 ? 0 : grid.cell_at(start);
  const int64_t cells = bytes == 0 ? 0 : grid.cell_at(start + bytes - 1) - first + 1;
  const int64_t left = device_pages * grid.page_cells - first;
  const int64_t device = left < 0 ? 0 : least(left, cells);
  tiles.first_cell[m] = first;
  tiles.before[0][m + 1] = device;
  tiles.before[1][m + 1] = cells - device;
}

TE_HOST_DEVICE void sum_tiles(int32_t count, Tiles& tiles) {
  for (int tier = 0; tier < 2; ++tier) {
    tiles.before[tier][0] = 0;
    for (int m = 0; m < count; ++m) tiles.before[tier][m + 1] += tiles.before[tier][m];
  }
}

TE_HOST_DEVICE Tile tile_of_repeat(const StridedTable& table, const Layout& layout, const Grid& grid,
                                   const StridedTiles& tiles, int tier, int m, int64_t index) {
  const int64_t number = index - tiles.before[tier][m], repeat = number / tiles.cells[m];
  const int64_t bytes = live_bytes(table, layout, m), start = layout.starts[m] + repeat * aligned(bytes);
  const int64_t cell = grid.cell_at(start) + number - repeat * tiles.cells[m];
  const int64_t page = grid.page_of_cell(cell), in_page = (cell - page * grid.page_cells) * kTile;
  const int64_t cell_start = page * grid.page_bytes + in_page;
  const int64_t cell_end = cell_start + least(kTile, grid.page_bytes - in_page);
  const int64_t from = cell_start < start ? start : cell_start, to = least(cell_end, start + bytes);
  if (to <= from || (page >= tiles.device_pages) != (tier == 1)) {
    return {m, grid.page_at(layout.starts[m]), 0, 0, 0};  // a page that the group has
  }
  return {m, page, repeat * table.pitch[m] + from - start, in_page + (from - cell_start), to - from};
}

template <class AnyTable>
TE_HOST_DEVICE Tile tile_of(const AnyTable& table, const Layout& layout, const Grid& grid,
                            const TilesOf<AnyTable>& tiles, int tier, int m, int64_t index) {
  if constexpr (kStrided<AnyTable>) {
    if (table.repeats[m] > 1) return tile_of_repeat(table, layout, grid, tiles, tier, m, index);
  }
  const int64_t device = tiles.before[0][m + 1] - tiles.before[0][m];
  const int64_t cell = tiles.first_cell[m] + (tier == 0 ? 0 : device) + index - tiles.before[tier][m];
  const int64_t page = grid.page_of_cell(cell), in_page = (cell - page * grid.page_cells) * kTile;
  const int64_t cell_start = page * grid.page_bytes + in_page;
  const int64_t cell_end = cell_start + least(kTile, grid.page_bytes - in_page);
  const int64_t start = layout.starts[m], end = start + live_bytes(table, layout, m);
  const int64_t from = cell_start < start ? start : cell_start, to = least(cell_end, end);
  return {m, page, from - start, in_page + (from - cell_start), to - from};
}

template <class AnyTable>
TE_HOST_DEVICE Tile tile_at(const AnyTable& table, const Layout& layout, const Grid& grid,
                            const TilesOf<AnyTable>& tiles, int tier, int64_t index) {
  int m = 0;
  while (index >= tiles.before[tier][m + 1]) ++m;
  return tile_of(table, layout, grid, tiles, tier, m, index);
}

// The place of a tile's first byte in the stream.
template <class AnyTable>
TE_HOST_DEVICE int64_t in_stream(const AnyTable&, const Layout& layout, const Grid& grid, const Tile& tile) {
  if constexpr (kStrided<AnyTable>) return tile.page * grid.page_bytes + tile.in_page;
  return layout.starts[tile.member] + tile.in_member;
}

}  // namespace te::stash
