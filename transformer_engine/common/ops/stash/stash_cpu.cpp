// stash, CPU path (the specification): calls have finished when they return. stash_pages.h decides, this file copies
// tile by tile.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "core/parallel_for.h"
#include "ops/stash/stash.h"
#include "ops/stash/stash_debug.h"

namespace te::stash::cpu {

namespace {

constexpr int64_t kBatch = 16;  // tiles in one unit of parallel work

StridedTiles tiles_of(const Pool& pool, const StridedTable& table, const Layout& layout, int64_t device_pages) {
  StridedTiles tiles;
  for (int m = 0; m < table.count; ++m) cut_member(table, layout, pool.grid, device_pages, m, tiles);
  sum_tiles(table.count, tiles);
  return tiles;
}

// Calls each(tile) for all tiles of the group.
template <class Each>
void for_tiles(const Pool& pool, const StridedTable& table, const Layout& layout, int64_t device_pages, Each&& each) {
  const StridedTiles tiles = tiles_of(pool, table, layout, device_pages);
  for (int tier = 0; tier < 2; ++tier) {
    const int64_t all = tiles.before[tier][table.count];
    parallel_for(ceil_div(all, kBatch), [&](int64_t block) {
      for (int64_t i = block * kBatch; i < least(all, (block + 1) * kBatch); ++i) {
        each(tile_at(table, layout, pool.grid, tiles, tier, i));
      }
    });
  }
}

unsigned char* member_at(const StridedTable& table, const Tile& tile) {
  return static_cast<unsigned char*>(table.members[tile.member].data) + tile.in_member;
}

void fill(void* data, int value, int64_t bytes) {
  if (bytes != 0) std::memset(data, value, size_t(bytes));
}

// Sum over all tiles; at(tile) is the address of their bytes.
template <class At>
uint64_t checksum(const Pool& pool, const StridedTable& table, const Layout& layout, At&& at) {
  const StridedTiles tiles = tiles_of(pool, table, layout, INT32_MAX);
  uint64_t sum = 0;
  for (int64_t i = 0; i < tiles.before[0][table.count]; ++i) {
    const Tile tile = tile_at(table, layout, pool.grid, tiles, 0, i);
    sum += checksum_of(at(tile), tile.bytes, in_stream(table, layout, pool.grid, tile), 0, 1);
  }
  return sum;
}

void check_pages(const Pool& pool, const StridedTable& table, const Layout& layout, const Entry& entry) {
  const auto in_page = [&](const Tile& tile) { return page_of(pool, entry, tile.page) + tile.in_page; };
  uint32_t flags = canaries_intact(pool, entry, 0, 1) ? 0 : TE_STASH_CANARY;
  if (checksum(pool, table, layout, in_page) != entry.head.checksum) flags |= TE_STASH_CHANGED;
  raise_flags(pool, flags, entry.head.number);
}

void poison(const Pool& pool, const Entry& entry, int64_t first, int64_t count) {
  if (pool.debug == 0) return;
  for (int64_t i = first; i < first + count; ++i) fill(page_of(pool, entry, i), 0xff, pool.grid.page_bytes);
}

void free_pages(const Pool& pool, const PageFree& freed, Entry& entry, int64_t load) {
  const int64_t device = entry.head.pages - entry.head.host_pages;
  poison(pool, entry, 0, freed.device_pages);
  poison(pool, entry, device, freed.host_pages);
  return_ids(pool, freed, entry, 0, 1);
  finish_free(pool, freed, load);
}

}  // namespace

void start_step(const Pool& pool, bool first) {
  init_ids(pool, 0, 1);
  stash::start_step(pool, first);
  if (pool.debug != 0 && restore_canaries(pool, first, 0, 1)) raise_flags(pool, TE_STASH_CANARY, -1);
}

void store(const Pool& pool, const StridedTable& table, Entry& entry, int64_t number, int64_t loads) {
  Layout layout;
  uint32_t flags = 0;
  for (int m = 0; m < table.count; ++m) {
    layout.counts[m] = live_units(read_counter(table.members[m]), table.members[m], flags);
  }
  set_starts(table, layout);
  const FreeSpace space = FreeSpace::of(pool, entry, loads);
  const PageAlloc alloc = plan_store(pool, space, layout.starts[table.count], flags);
  if (alloc.state == TE_STASH_STATE_LOST && pool.trap != 0) {
    std::fprintf(stderr, TE_STASH_NO_SPACE, static_cast<long long>(number), static_cast<long long>(alloc.pages));
    std::abort();
  }
  if (alloc.state == TE_STASH_STATE_STORED) {
    for_tiles(pool, table, layout, alloc.device_pages, [&](const Tile& tile) {
      unsigned char* page = pool.page(tile.page >= alloc.device_pages, page_id(pool, alloc, tile.page));
      std::memcpy(page + tile.in_page, member_at(table, tile), size_t(tile.bytes));
    });
    write_map(pool, alloc, entry, 0, 1);
  }
  finish_store(pool, space, Totals::of(pool, loads), alloc, table, layout, number, entry);
  if (pool.debug == 0 || alloc.state != TE_STASH_STATE_STORED) return;
  entry.head.checksum = checksum(pool, table, layout, [&](const Tile& tile) { return member_at(table, tile); });
}

void load(const Pool& pool, const StridedTable& table, Entry& entry, bool keep, int64_t load) {
  Layout layout;
  for (int m = 0; m < table.count; ++m) layout.counts[m] = entry.head.counts[m];
  const int32_t state = plan_load(StoredEntry::of(pool, entry), table, layout);
  if (state == TE_STASH_STATE_STORED) {
    if (pool.debug != 0) check_pages(pool, table, layout, entry);
    for_tiles(pool, table, layout, entry.head.pages - entry.head.host_pages, [&](const Tile& tile) {
      std::memcpy(member_at(table, tile), page_of(pool, entry, tile.page) + tile.in_page, size_t(tile.bytes));
    });
  }
  for (int m = 0; m < table.count; ++m) {
    const Member& member = table.members[m];
    const int64_t live = live_bytes(table, layout, m);
    for (int64_t repeat = 0; member.most != 0 && repeat < table.repeats[m]; ++repeat) {
      auto* data = static_cast<unsigned char*>(member.data) + repeat * table.pitch[m];
      if (state != TE_STASH_STATE_STORED) fill(data, 0xff, live);
      fill(data + live, 0, tail_end(member, layout.counts[m]) * member.unit_bytes - live);
    }
  }
  const PageFree freed = keep ? PageFree::nothing(pool, load) : plan_free(pool, entry, load);
  raise_flags(pool, freed.flags | (state == TE_STASH_STATE_EMPTY ? TE_STASH_EMPTY : 0), entry.head.number);
  free_pages(pool, freed, entry, load);
  if (!keep) entry.head.state = TE_STASH_STATE_EMPTY;
}

void drop(const Pool& pool, Entry& entry, int64_t load) {
  const PageFree freed = plan_free(pool, entry, load);
  raise_flags(pool, freed.flags, entry.head.number);
  free_pages(pool, freed, entry, load);
  entry.head.state = TE_STASH_STATE_EMPTY;
}

void evict(const Pool& pool, Entry& entry, int64_t low_water, int64_t load) {
  const Eviction eviction = plan_evict(pool, entry, low_water, load);
  for (int64_t i = 0; i < eviction.to.host_pages; ++i) {
    const int64_t bytes = least(pool.grid.page_bytes, entry.head.stream_bytes - i * pool.grid.page_bytes);
    std::memcpy(pool.page(true, page_id(pool, eviction.to, i)), page_of(pool, entry, i), size_t(bytes));
  }
  poison(pool, entry, 0, eviction.freed.device_pages);
  write_eviction(pool, eviction, entry, 0, 1);
  finish_evict(pool, eviction, load, entry);
}

void post(const Pool& pool, te_stash_report& mailbox) {
  const int64_t step = pool.control->report.step;
  __atomic_store_n(&mailbox.step, -1, __ATOMIC_RELEASE);
  te_stash_report report = pool.control->report;
  report.step = -1;
  mailbox = report;
  __atomic_store_n(&mailbox.step, step, __ATOMIC_RELEASE);
}

}  // namespace te::stash::cpu
