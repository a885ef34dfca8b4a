// How groups are cut into tiles: each byte of each live part once, no tile empty, none across two cells, and those of
// device pages apart from those of host pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "ops/stash/stash_layout.h"

namespace te {
namespace {

using namespace stash;

void expect_whole(const Table& table, const Layout& layout, const Grid& grid, int64_t device_pages) {
  Tiles tiles{};
  for (int m = 0; m < table.count; ++m) cut_member(table, layout, grid, device_pages, m, tiles);
  sum_tiles(table.count, tiles);
  std::vector<int64_t> done(size_t(table.count), 0);  // bytes of the member; its device pages come first
  for (int tier = 0; tier < 2; ++tier) {
    for (int64_t i = 0; i < tiles.before[tier][table.count]; ++i) {
      const Tile tile = tile_at(table, layout, grid, tiles, tier, i);
      const int64_t in_stream = layout.starts[tile.member] + tile.in_member;
      ASSERT_GT(tile.bytes, 0);
      ASSERT_LE(tile.in_page % kTile + tile.bytes, kTile);
      ASSERT_LE(tile.in_page + tile.bytes, grid.page_bytes);
      ASSERT_EQ(tile.page * grid.page_bytes + tile.in_page, in_stream);
      ASSERT_EQ(tile.page >= device_pages, tier == 1);
      ASSERT_EQ(tile.in_member, done[size_t(tile.member)]);
      done[size_t(tile.member)] += tile.bytes;
    }
  }
  for (int m = 0; m < table.count; ++m) ASSERT_EQ(done[size_t(m)], live_bytes(table, layout, m));
}

TEST(StashTiles, EveryByteIsInOne) {
  std::mt19937_64 random(4);
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  for (int round = 0; round < 3000 && !HasFatalFailure(); ++round) {
    const int64_t page = round % 3 == 0 ? 128 * (1 + below(400)) : (round % 3 == 1 ? 32768 : 128);
    const Grid grid{page, ceil_div(page, kTile)};
    Table table{};
    Layout layout{};
    table.count = int32_t(1 + below(kMembers));
    for (int m = 0; m < table.count; ++m) {
      table.members[m].unit_bytes = round % 2 == 0 ? 128 : 1 + below(300);
      layout.counts[m] = below(4) == 0 ? below(2) * 128 : below(700);
    }
    set_starts(table, layout);
    const int64_t pages = ceil_div(layout.starts[table.count], page);
    for (const int64_t device_pages : {int64_t(0), pages / 2, pages, pages + 3}) {
      expect_whole(table, layout, grid, device_pages);
    }
  }
}

// Members of several repeats: every byte of each repeat once, tiles of a tier in its pages.
void expect_repeats(const StridedTable& table, const Layout& layout, const Grid& grid, int64_t device_pages) {
  StridedTiles tiles{};
  for (int m = 0; m < table.count; ++m) cut_member(table, layout, grid, device_pages, m, tiles);
  sum_tiles(table.count, tiles);
  std::vector<std::vector<std::pair<int64_t, int64_t>>> found(size_t(table.count));
  for (int tier = 0; tier < 2; ++tier) {
    for (int64_t i = 0; i < tiles.before[tier][table.count]; ++i) {
      const Tile tile = tile_at(table, layout, grid, tiles, tier, i);
      ASSERT_GE(tile.page, 0);
      ASSERT_LT(tile.page, ceil_div(layout.starts[table.count], grid.page_bytes));
      if (tile.bytes == 0) continue;
      ASSERT_GT(tile.bytes, 0);
      ASSERT_LE(tile.in_page % kTile + tile.bytes, kTile);
      ASSERT_LE(tile.in_page + tile.bytes, grid.page_bytes);
      ASSERT_EQ(tile.page >= device_pages, tier == 1);
      const int m = tile.member;
      const int64_t repeat = table.repeats[m] == 1 ? 0 : tile.in_member / table.pitch[m];
      const int64_t within = tile.in_member - repeat * (table.repeats[m] == 1 ? 0 : table.pitch[m]);
      ASSERT_EQ(in_stream(table, layout, grid, tile),
                layout.starts[m] + repeat * aligned(live_bytes(table, layout, m)) + within);
      found[size_t(m)].emplace_back(tile.in_member, tile.bytes);
    }
  }
  for (int m = 0; m < table.count; ++m) {
    auto& parts = found[size_t(m)];
    std::sort(parts.begin(), parts.end());
    size_t next = 0;
    const int64_t bytes = live_bytes(table, layout, m);
    for (int64_t repeat = 0; repeat < table.repeats[m]; ++repeat) {
      for (int64_t at = 0; at < bytes; ++next) {
        ASSERT_LT(next, parts.size());
        ASSERT_EQ(parts[next].first, repeat * table.pitch[m] + at);
        at += parts[next].second;
        ASSERT_LE(at, bytes);
      }
    }
    ASSERT_EQ(next, parts.size());
  }
}

TEST(StashTiles, EveryByteOfRepeatsIsInOne) {
  std::mt19937_64 random(5);
  const auto below = [&](int64_t n) { return int64_t(random() % uint64_t(n)); };
  for (int round = 0; round < 1000 && !HasFatalFailure(); ++round) {
    const int64_t page = round % 3 == 0 ? 128 * (1 + below(400)) : (round % 3 == 1 ? 32768 : 128);
    const Grid grid{page, ceil_div(page, kTile)};
    StridedTable table{};
    Layout layout{};
    table.count = int32_t(1 + below(kMembers));
    for (int m = 0; m < table.count; ++m) {
      table.members[m].unit_bytes = 1 + below(round % 2 == 0 ? 300 : 8);
      layout.counts[m] = below(4) == 0 ? below(2) * 128 : below(700);
      table.repeats[m] = below(3) == 0 ? 1 : 1 + below(60);
      table.pitch[m] = table.members[m].unit_bytes * layout.counts[m] + 1 + below(100);
    }
    set_starts(table, layout);
    const int64_t pages = ceil_div(layout.starts[table.count], page);
    for (const int64_t device_pages : {int64_t(0), pages / 2, pages, pages + 3}) {
      expect_repeats(table, layout, grid, device_pages);
    }
  }
}

TEST(StashTiles, NumbersBeyond32Bits) {
  const Grid grid{524288, 32};
  Table table{};
  Layout layout{};
  table.count = 2;
  for (int m = 0; m < 2; ++m) table.members[m].unit_bytes = 7168 * 128;
  layout.counts[0] = 9001;  // 8 GiB
  layout.counts[1] = 3;
  set_starts(table, layout);
  expect_whole(table, layout, grid, 6000);
}

}  // namespace
}  // namespace te
