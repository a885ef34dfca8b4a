// Two streams at once: which loads have to wait, and that the pages of a call follow from the order of calls alone,
// however the streams run. The decisions of stash_pages.h are called here in other orders than that of the calls.
#include <gtest/gtest.h>

#include <random>

#include "ops/stash/stash_pages.h"
#include "stash_pool.h"

namespace te {
namespace {

using testing::StashEntry;
using testing::StashPool;

constexpr int64_t kPage = 128;
constexpr int64_t kMost = 24;  // pages of a group

TEST(StashWaits, LoadsWaitForStoresAsTheContractRequires) {
  const int32_t cpu = TE_DEVICE_CPU;
  for (const te_stash_policy policy : {TE_STASH_STACK, TE_STASH_BUMP}) {
    const StashPool pool(cpu, kPage, 4, 0, policy);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(te_stash_load_waits(pool.handle), 1);
  }
  StashPool pool(cpu, kPage, 4);
  const StashEntry entry(pool, kMost);
  for (int n = 0; n < 300; ++n) {
    EXPECT_EQ(te_stash_load_waits(pool.handle), n % 128 == 0) << n;
    TE_ASSERT_OK(te_stash_drop(pool.handle, entry.data(), nullptr));
  }
  TE_ASSERT_OK(te_stash_evict(pool.handle, entry.data(), 0, nullptr));
  EXPECT_EQ(te_stash_load_waits(pool.handle), 1);
  TE_ASSERT_OK(te_stash_drop(pool.handle, entry.data(), nullptr));
  EXPECT_EQ(te_stash_load_waits(pool.handle), 0);
  pool.reset();
  EXPECT_EQ(te_stash_load_waits(pool.handle), 1);
}

// The decisions themselves, called in another order than that of the calls: as two streams run them.
struct Decisions {
  static constexpr int64_t kPages = 7;
  explicit Decisions(int entries) : entries(size_t(entries)) {
    pool.control = &control;
    pool.device_ids = ids;
    pool.device_pages = kPages;
    pool.grid = {kPage, 1};
    pool.stride = kPage;
    stash::init_ids(pool, 0, 1);
    stash::start_step(pool, true);
    table.count = 1;
    table.members[0].unit_bytes = 1;
    table.members[0].most = kPages * kPage;
  }
  void store(int e, int64_t pages, int64_t loads) {
    stash::Layout layout{};
    layout.counts[0] = pages * kPage;
    stash::set_starts(table, layout);
    const stash::FreeSpace space = stash::FreeSpace::of(pool, entries[size_t(e)].entry, loads);
    const stash::PageAlloc alloc = stash::plan_store(pool, space, layout.starts[1], 0);
    stash::write_map(pool, alloc, entries[size_t(e)].entry, 0, 1);
    stash::finish_store(pool, space, stash::Totals::of(pool, loads), alloc, table, layout, e, entries[size_t(e)].entry);
  }
  void load(int e, int64_t number) {
    stash::Entry& entry = entries[size_t(e)].entry;
    const stash::PageFree freed = stash::plan_free(pool, entry, number);
    stash::return_ids(pool, freed, entry, 0, 1);
    stash::finish_free(pool, freed, number);
    entry.head.state = TE_STASH_STATE_EMPTY;
  }
  std::vector<int32_t> map(int e) const {
    const stash::Entry& entry = entries[size_t(e)].entry;
    return {entry.map(), entry.map() + (entry.head.state == TE_STASH_STATE_STORED ? entry.head.pages : 0)};
  }

  struct Memory {
    stash::Entry entry{};
    int32_t map[kPages] = {};
  };
  stash::Control control{};
  stash::Pool pool{};
  stash::Table table{};
  int32_t ids[kPages] = {};
  std::vector<Memory> entries;
};

TEST(StashOrder, LoadsCalledAfterAStoreShowItNoPage) {
  // Calls: store 0, store 1, load 0 (number 0), store 2, load 1 (number 1), store 3. The loads run before store 2.
  const auto run = [](bool early) {
    Decisions d(4);
    d.store(0, 3, 0);
    d.store(1, 3, 0);
    d.load(0, 0);
    if (early) d.load(1, 1);
    d.store(2, 4, 1);
    const auto peak = d.control.report.device_peak, demand = d.control.report.demand;
    const auto map = d.map(2);
    if (!early) d.load(1, 1);
    d.store(3, 2, 2);
    return std::tuple(map, d.map(3), peak, demand, d.control.report.device_in_use, d.control.report.flags);
  };
  EXPECT_EQ(run(true), run(false));
  EXPECT_EQ(std::get<0>(run(true)), (std::vector<int32_t>{6, 0, 1, 2}));
  EXPECT_EQ(std::get<2>(run(true)), 7);
  // A store that the pages of the later load alone would let in is lost all the same.
  Decisions d(3);
  d.store(0, 4, 0);
  d.store(1, 3, 0);
  d.load(0, 0);
  d.load(1, 1);
  d.store(2, 5, 1);
  EXPECT_EQ(d.control.report.flags, uint32_t(TE_STASH_LOST));
}

TEST(StashOrder, TailsAreRememberedUntilALoadWaits) {
  Decisions d(4);
  d.store(0, 3, 0);
  d.store(1, 4, 0);
  d.load(0, 0);
  // A store of 4 pages is called here. Load 1 and the drops after it, up to the first that waits, run before it.
  for (int64_t number = 1; number % stash::kWaits != 0; ++number) d.load(number == 1 ? 1 : 3, number);
  d.store(2, 4, 1);
  EXPECT_EQ(d.control.report.flags, uint32_t(TE_STASH_LOST)) << "it found pages of loads that were called after it";
  EXPECT_EQ(d.control.report.demand, 8);
}

TEST(StashOrder, AnyInterleavingOfTwoStreamsIsTheOrderOfCalls) {
  // Each entry is stored and loaded again and again; a load may run as soon as its store did and the loads before it
  // did, a store only after the loads called before it, but up to `ahead` loads ahead of the stores called before
  // them.
  constexpr int kEntries = 5, kCalls = 4000;
  struct Call {
    bool store;
    int entry;
    int64_t pages, loads;
  };
  std::mt19937 random(5);
  std::vector<Call> calls;
  std::vector<bool> full(kEntries, false);
  int64_t loads = 0;
  for (int i = 0; i < kCalls; ++i) {
    const int e = int(random() % kEntries);
    if (full[size_t(e)]) {
      calls.push_back({false, e, 0, loads++});
    } else {
      calls.push_back({true, e, int64_t(random() % 4), loads});
    }
    full[size_t(e)] = !full[size_t(e)];
  }
  using Maps = std::vector<std::vector<int32_t>>;
  const auto run = [&](uint32_t seed, bool in_order) {
    std::mt19937 coin(seed);
    Decisions d(kEntries);
    Maps maps;
    size_t next_store = 0, next_load = 0;
    int64_t done = 0;  // loads
    const auto find = [&](size_t from, bool store) {
      while (from < calls.size() && calls[from].store != store) ++from;
      return from;
    };
    std::vector<int64_t> stores(kEntries, 0), gone(kEntries, 0);  // of an entry, that ran
    while (true) {
      next_store = find(next_store, true);
      next_load = find(next_load, false);
      if (next_store == calls.size() && next_load == calls.size()) break;
      const bool may_store = next_store < calls.size() && calls[next_store].loads <= done;
      bool may_load = next_load < calls.size();
      if (may_load) {
        const Call& call = calls[next_load];
        may_load = stores[size_t(call.entry)] > gone[size_t(call.entry)];
        if (call.loads % stash::kWaits == 0) may_load = may_load && next_store > next_load;
        if (in_order) may_load = next_load < next_store;
      }
      if (may_load && (!may_store || in_order || coin() % 4 != 0)) {
        ++gone[size_t(calls[next_load].entry)];
        d.load(calls[next_load].entry, calls[next_load].loads);
        ++done;
        ++next_load;
      } else if (may_store) {
        ++stores[size_t(calls[next_store].entry)];
        d.store(calls[next_store].entry, calls[next_store].pages, calls[next_store].loads);
        maps.push_back(d.map(calls[next_store].entry));
        ++next_store;
      } else {
        ADD_FAILURE() << "no stream can go on";
        break;
      }
    }
    return std::tuple(maps, d.control.report.device_peak, d.control.report.demand, d.control.report.lost_groups,
                      d.control.report.device_in_use);
  };
  const auto wanted = run(0, true);
  EXPECT_GT(std::get<3>(wanted), 10);  // groups are lost now and then, and most are not
  EXPECT_LT(std::get<3>(wanted), kCalls / 4);
  for (uint32_t seed = 1; seed < 40; ++seed) ASSERT_EQ(run(seed, false), wanted) << seed;
}

}  // namespace
}  // namespace te
