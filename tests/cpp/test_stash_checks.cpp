// Refusals of the stash, and the findings of its debug mode: bytes that changed, bytes between pages, pages that were
// given back, pages that never were. A refused call changes nothing.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <functional>

#include "stash_pool.h"

namespace te {
namespace {

using testing::Buffer;
using testing::Bytes;
using testing::Group;
using testing::StashEntry;
using testing::StashPool;

constexpr size_t kPage = 16384;
constexpr size_t kStride = kPage + 128;

te_stash_options debugging(int32_t device, int64_t device_pages, int64_t host_pages = 0,
                           te_stash_policy policy = TE_STASH_RING) {
  te_stash_options options = StashPool::defaults(device, kPage, device_pages, host_pages, policy);
  options.debug = 1;
  return options;
}

class StashDebug : public ::testing::TestWithParam<int32_t> {
 protected:
  // The bytes of device memory, changed by the test.
  static void change(const StashPool& pool, const std::function<void(Bytes&)>& body) {
    Bytes all = pool.pages->read();
    body(all);
    pool.pages->fill(all);
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, StashDebug, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(StashDebug, RightCallsRaiseNothingAndFreedPagesArePoisoned) {
  for (const te_stash_policy policy : {TE_STASH_RING, TE_STASH_STACK, TE_STASH_BUMP}) {
    StashPool pool(debugging(GetParam(), 4, 3, policy));
    EXPECT_EQ(te_stash_pages_bytes(pool.options), 4 * kStride);
    const StashEntry entry(pool, 7);
    Group group(GetParam(), {{7168, 10}, {3, 9000, TE_STASH_TAIL_ZERO, 1, 5}, {1, 77, TE_STASH_TAIL_TILE, 8, 1}});
    for (const int64_t count : {0, 1, 4, 10}) {
      group.set({count, count * 900, count * 7});
      group.poison_targets();
      TE_ASSERT_OK(group.store(pool, entry));
      if (policy != TE_STASH_BUMP) {
        TE_ASSERT_OK(te_stash_evict(pool.handle, entry.data(), count == 4 ? 100 : 0, nullptr));
      }
      TE_ASSERT_OK(group.load(pool, entry, true));
      group.expect_targets();
      group.poison_targets();
      TE_ASSERT_OK(group.load(pool, entry));
      group.expect_targets();
      EXPECT_EQ(pool.report().flags, 0u) << count;
      const Bytes all = pool.pages->read();
      for (size_t page = 0; page < 4; ++page) {
        const auto first = all.begin() + int64_t(page * kStride);
        EXPECT_EQ(std::count(first, first + kPage, 0xff), int64_t(kPage)) << "page " << page;
        EXPECT_EQ(std::count(first + kPage, first + int64_t(kStride), 0xff), 0) << "behind page " << page;
      }
    }
    pool.reset();
    EXPECT_EQ(pool.report().flags, 0u);
  }
}

TEST_P(StashDebug, ChangedBytesAreFound) {
  StashPool pool(debugging(GetParam(), 4));
  const StashEntry entry(pool, 4);
  Group group(GetParam(), {{100, 101, TE_STASH_TAIL_KEEP}, {4096, 9}});
  group.set({101, 9});
  const int64_t second = (100 * 101 + 127) / 128 * 128;
  struct Case {
    const char* what;
    std::function<void(Bytes&)> body;
    uint32_t flags;
  };
  const std::vector<Case> cases{
      {"nothing", [](Bytes&) {}, 0},
      {"the first byte", [](Bytes& all) { all[0] ^= 1; }, TE_STASH_CHANGED},
      {"the last live byte of a member", [](Bytes& all) { all[100 * 101 - 1] ^= 0x80; }, TE_STASH_CHANGED},
      {"padding, which is not read", [](Bytes& all) { all[100 * 101] ^= 1; }, 0},
      {"the second member", [=](Bytes& all) { all[size_t(second)] ^= 4; }, TE_STASH_CHANGED},
      {"two words that changed places",
       [](Bytes& all) { std::swap_ranges(all.begin(), all.begin() + 8, all.begin() + 64); }, TE_STASH_CHANGED},
      {"the other page", [](Bytes& all) { all[kStride] ^= 1; }, TE_STASH_CHANGED},
      {"after a page", [](Bytes& all) { all[kPage] ^= 1; }, TE_STASH_CANARY},
      {"before the next one", [](Bytes& all) { all[2 * kStride - 1] ^= 1; }, TE_STASH_CANARY},
      {"after the last page", [](Bytes& all) { all[3 * kStride - 1] ^= 1; }, TE_STASH_CANARY},
      {"after an unused page", [](Bytes& all) { all[4 * kStride - 1] ^= 1; }, 0},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    TE_ASSERT_OK(group.store(pool, entry, 21));
    EXPECT_EQ(entry.head().pages, 3);
    change(pool, c.body);
    TE_ASSERT_OK(group.load(pool, entry));
    const te_stash_report report = pool.report();
    EXPECT_EQ(report.flags, c.flags);
    EXPECT_EQ(report.flagged_entry, c.flags == 0 ? -1 : 21);
    pool.reset();  // looks at every page, and mends
    const bool between = c.flags == TE_STASH_CANARY || std::string(c.what) == "after an unused page";
    EXPECT_EQ(pool.report().flags, between ? uint32_t(TE_STASH_CANARY) : 0u);
    pool.reset();
    EXPECT_EQ(pool.report().flags, 0u);
  }
}

TEST_P(StashDebug, PagesThatWereNotGivenBackAreALeak) {
  for (const int64_t host_pages : {0, 4}) {
    StashPool pool(debugging(GetParam(), 4 - host_pages, host_pages));
    const StashEntry entry(pool, 4);
    Group group(GetParam(), {{4096, 8}});
    group.set({5});
    TE_ASSERT_OK(group.store(pool, entry));
    pool.reset();
    const te_stash_report report = pool.report();
    EXPECT_EQ(report.flags, uint32_t(TE_STASH_LEAKED));
    EXPECT_EQ(report.gate, 1.f);
    EXPECT_EQ(report.flagged_entry, -1);
    EXPECT_EQ(report.device_in_use + report.host_in_use, 0);
    group.poison_targets();
    TE_ASSERT_OK(group.store(pool, entry));
    TE_ASSERT_OK(group.load(pool, entry));
    group.expect_targets();
    pool.reset();
    EXPECT_EQ(pool.report().flags, 0u);
  }
}

TEST_P(StashDebug, ARefusedStoreKeepsTheChecksumOfTheEntry) {
  StashPool pool(debugging(GetParam(), 4));
  const StashEntry entry(pool, 4), of_lost(pool, 8);
  Group first(GetParam(), {{4096, 8}}, 1), second(GetParam(), {{4096, 8}}, 2), lost(GetParam(), {{4096, 32}}, 3);
  first.set({8});
  second.set({8});
  lost.set({32});
  TE_ASSERT_OK(first.store(pool, entry));
  TE_ASSERT_OK(second.store(pool, entry));
  TE_ASSERT_OK(lost.store(pool, of_lost));
  first.poison_targets();
  lost.poison_targets();
  TE_ASSERT_OK(first.load(pool, entry));
  TE_ASSERT_OK(lost.load(pool, of_lost));
  first.expect_targets();
  lost.expect_targets(Group::Found::kLost);
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_EMPTY | TE_STASH_LOST));
}

TEST_P(StashDebug, TrapEndsTheProcessWithAMessage) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int32_t device = GetParam();
  const auto lose = [&] {
    te_stash_options options = StashPool::defaults(device, kPage, 1);
    options.trap = 1;
    const StashPool pool(options);
    const StashEntry entry(pool, 3);
    Group group(device, {{4096, 12}});
    group.set({4});
    TE_ASSERT_OK(group.store(pool, entry, 6));  // this one has room
    TE_ASSERT_OK(te_stash_drop(pool.handle, entry.data(), nullptr));
    group.set({9});
    TE_ASSERT_OK(group.store(pool, entry, 7));
#if defined(TE_WITH_CUDA)
    if (device != TE_DEVICE_CPU && cudaDeviceSynchronize() != cudaSuccess) _exit(3);
#endif
  };
  if (device == TE_DEVICE_CPU) {
    EXPECT_EXIT(lose(), ::testing::KilledBySignal(SIGABRT), "te_stash_store: group 7 [a-z]+ 3 pages");
  } else {
    EXPECT_EXIT((dup2(STDERR_FILENO, STDOUT_FILENO), lose()), ::testing::ExitedWithCode(3),
                "te_stash_store: group 7 [a-z]+ 3 pages");
  }
}

// ---- what is refused ----

te_status created(const std::function<void(te_stash_options&)>& change) {
  static Buffer<unsigned char> memory(TE_DEVICE_CPU, 1, 1 << 20);
  te_stash_options options = StashPool::defaults(TE_DEVICE_CPU, 4096, 4, 2);
  options.pages = memory.data();
  options.control = memory.data() + (1 << 19);
  change(options);
  te_stash_pool* pool = nullptr;
  const te_status status = te_stash_pool_create(options, nullptr, &pool);
  if (status == TE_SUCCESS) {
    EXPECT_EQ(te_stash_pool_destroy(pool), TE_SUCCESS);
  }
  return status;
}

void expect_refused(te_status status, const char* words) {
  EXPECT_EQ(status, TE_INVALID_ARGUMENT) << words;
  EXPECT_NE(std::string(te_last_error()).find(words), std::string::npos)
      << "'" << te_last_error() << "' does not say '" << words << "'";
}

TEST(StashRefuses, BadOptions) {
  using O = te_stash_options;
  EXPECT_EQ(created([](O&) {}), TE_SUCCESS);
  EXPECT_EQ(created([](O& o) { o.device_pages = 0, o.pages = nullptr; }), TE_SUCCESS);
  expect_refused(created([](O& o) { o.device = -2; }), "'options.device' is -2");
  expect_refused(created([](O& o) { o.policy = 3; }), "'options.policy' is 3");
  expect_refused(created([](O& o) { o.page_bytes = 0; }), "'options.page_bytes' is 0, wanted a multiple of 128");
  expect_refused(created([](O& o) { o.page_bytes = 4100; }), "'options.page_bytes' is 4100");
  expect_refused(created([](O& o) { o.device_pages = -1; }), "'options.device_pages' is -1");
  expect_refused(created([](O& o) { o.device_pages = int64_t(1) << 31; }), "'options.device_pages'");
  expect_refused(created([](O& o) { o.host_pages = -1; }), "'options.host_pages' is -1");
  expect_refused(created([](O& o) { o.page_bytes = size_t(1) << 55; }), "at most");
  expect_refused(created([](O& o) { o.sm_budget = 0; }), "'options.sm_budget' is 0");
  expect_refused(created([](O& o) { o.pages = nullptr; }), "'options.pages' is NULL");
  expect_refused(created([](O& o) { o.pages = static_cast<char*>(o.pages) + 64; }), "on 128 bytes");
  expect_refused(created([](O& o) { o.control = nullptr; }), "'options.control' is NULL");
  expect_refused(te_stash_pool_create({}, nullptr, nullptr), "'out' is NULL");
  if (!te_built_with_cuda()) {
    EXPECT_EQ(created([](O& o) { o.device = 0; }), TE_NOT_IMPLEMENTED);
  }
  te_stash_options bad = StashPool::defaults(TE_DEVICE_CPU, 4100, 4);
  EXPECT_EQ(te_stash_pages_bytes(bad), 0u);
  EXPECT_EQ(te_stash_control_bytes(bad), 0u);
  EXPECT_GT(te_stash_control_bytes(StashPool::defaults(TE_DEVICE_CPU, 4096, 0)), sizeof(te_stash_report));
}

TEST(StashRefuses, BadMembers) {
  const StashPool pool(TE_DEVICE_CPU, 4096, 4), bump(TE_DEVICE_CPU, 4096, 4, 0, TE_STASH_BUMP);
  const StashEntry entry(pool, 4);
  Group group(TE_DEVICE_CPU, {{64, 8}, {64, 8, TE_STASH_TAIL_TILE, 4}});
  const auto stored = [&](const std::function<void(te_stash_member&)>& change, int32_t count = 2) {
    auto table = group.stored();
    change(table[1]);
    return te_stash_store(pool.handle, table.data(), count, entry.data(), 0, nullptr);
  };
  const auto loaded = [&](const std::function<void(te_stash_member&)>& change) {
    auto table = group.loaded();
    change(table[1]);
    return te_stash_load(pool.handle, table.data(), 2, entry.data(), 0, nullptr);
  };
  using M = te_stash_member;
  expect_refused(stored([](M&) {}, 0), "'count' is 0");
  expect_refused(stored([](M&) {}, 17), "'count' is 17, wanted 1 to 16 members; store more as several groups");
  expect_refused(stored([](M& m) { m.data = nullptr; }), "'members[1].data' is NULL");
  expect_refused(stored([](M& m) { m.counter = nullptr; }), "'members[1].counter' is NULL");
  expect_refused(stored([](M& m) { m.counter_bytes = 2; }), "'members[1].counter_bytes' is 2");
  expect_refused(stored([](M& m) { m.counter = static_cast<const char*>(m.counter) + 1; }), "'members[1].counter'");
  expect_refused(stored([](M& m) { m.unit_bytes = 0; }), "'members[1].unit_bytes' is 0");
  expect_refused(stored([](M& m) { m.most = -1; }), "'members[1].most' is -1");
  expect_refused(stored([](M& m) { m.most = int64_t(1) << 60; }), "at most");
  expect_refused(stored([](M& m) { m.repeats = -1; }), "'members[1].repeats' is -1");
  const auto repeated = [](int64_t repeats, int64_t pitch) {
    return [=](M& m) { m.repeats = repeats, m.pitch = pitch; };
  };
  for (const int64_t pitch : {int64_t(0), int64_t(-64), int64_t(64 * 8 - 1)}) {
    expect_refused(stored(repeated(2, pitch)), "'members[1].pitch' is");
    expect_refused(loaded(repeated(2, pitch)), "at least 512, the bytes of a buffer: repeats may not overlap");
  }
  expect_refused(stored(repeated(int64_t(1) << 40, int64_t(1) << 20)), "'members[1].repeats' is");
  expect_refused(loaded([](M& m) { m.tail = 3; }), "'members[1].tail' is 3");
  expect_refused(loaded([](M& m) { m.tile_units = 0; }), "'members[1].tile_units' is 0");
  expect_refused(loaded([](M& m) { m.unit_bytes = -4; }), "'members[1].unit_bytes' is -4");
  const auto table = group.stored();
  char* odd = static_cast<char*>(entry.data()) + 8;
  expect_refused(te_stash_store(nullptr, table.data(), 2, entry.data(), 0, nullptr), "'pool' is NULL");
  expect_refused(te_stash_store(pool.handle, nullptr, 2, entry.data(), 0, nullptr), "'members' is NULL");
  expect_refused(te_stash_store(pool.handle, table.data(), 2, nullptr, 0, nullptr), "'entry' is NULL");
  expect_refused(te_stash_load(pool.handle, table.data(), 2, odd, 0, nullptr), "on 128 bytes");
  expect_refused(te_stash_drop(pool.handle, nullptr, nullptr), "'entry' is NULL");
  expect_refused(te_stash_evict(bump.handle, entry.data(), 1, nullptr), "of policy BUMP");
  expect_refused(te_stash_read(pool.handle, nullptr, nullptr), "'out' is NULL");
  expect_refused(te_stash_read_entry(pool.handle, entry.data(), nullptr, nullptr), "'out' is NULL");
  expect_refused(te_stash_read_map(pool.handle, entry.data(), nullptr, 0, nullptr), "'count' is NULL");
  expect_refused(te_stash_reset(nullptr, nullptr), "'pool' is NULL");
  expect_refused(te_stash_capture(nullptr, nullptr), "'number' is NULL");
  expect_refused(te_stash_pool_destroy(nullptr), "'pool' is NULL");
  int64_t pages = 0;
  expect_refused(te_stash_most_pages(table.data(), 2, 100, &pages), "'page_bytes' is 100");
  expect_refused(te_stash_most_pages(table.data(), 2, 128, nullptr), "'pages' is NULL");
  EXPECT_EQ(pool.report().groups, 0);
  EXPECT_EQ(pool.report().flags, 0u);
  EXPECT_EQ(te_stash_load_waits(nullptr), 1);
  EXPECT_EQ(te_stash_load_waits(pool.handle), 1);
  TE_EXPECT_OK(te_stash_drop(pool.handle, entry.data(), nullptr));
  EXPECT_EQ(te_stash_load_waits(pool.handle), 0) << "a refused load was counted";
}

TEST(StashSizes, PagesAndEntriesHaveTheSizesOfTheContract) {
  const auto pages = [](const std::vector<te_stash_member>& members, size_t page_bytes) {
    int64_t out = -1;
    TE_EXPECT_OK(te_stash_most_pages(members.data(), int32_t(members.size()), page_bytes, &out));
    return out;
  };
  const auto member = [](int64_t unit, int64_t most) {
    return te_stash_member{nullptr, nullptr, 0, 0, unit, most, 0, 0, 0, 0};
  };
  EXPECT_EQ(pages({member(1, 0)}, 128), 0);
  EXPECT_EQ(pages({member(1, 1)}, 128), 1);
  EXPECT_EQ(pages({member(1, 128), member(1, 1)}, 128), 2);
  EXPECT_EQ(pages({member(1, 129), member(1, 1)}, 128), 3);
  EXPECT_EQ(pages({member(7168, 64 * 1024)}, 524288), 896);
  EXPECT_EQ(pages({member(7168, 64 * 1024), member(4, 1)}, 524288), 897);
  EXPECT_EQ(te_stash_entry_bytes(0), te_stash_entry_bytes(-5));
  EXPECT_EQ(te_stash_entry_bytes(33) - te_stash_entry_bytes(0), 256u);
  EXPECT_GE(te_stash_entry_bytes(0), sizeof(te_stash_entry));
  const auto control = [](te_stash_policy policy) {
    return te_stash_control_bytes(StashPool::defaults(TE_DEVICE_CPU, 128, 1000, 1, policy));
  };
  EXPECT_EQ(control(TE_STASH_RING), control(TE_STASH_BUMP) + 4096);
  EXPECT_EQ(control(TE_STASH_RING), control(TE_STASH_STACK));
}

TEST(StashSizes, HostPagesAreCountedAndGivenBack) {
  te_pinned_bytes before{}, during{}, after{};
  TE_ASSERT_OK(te_pinned_usage("stash", &before));
  {
    const StashPool pool(TE_DEVICE_CPU, 4096, 1, 1000);
    TE_ASSERT_OK(te_pinned_usage("stash", &during));
  }
  TE_ASSERT_OK(te_pinned_usage("stash", &after));
  EXPECT_EQ(during.used - before.used, 4096u * 1000);
  EXPECT_EQ(during.slots - before.slots, 1);
  EXPECT_EQ(after.used, before.used);
  EXPECT_EQ(after.reserved, before.reserved);
}

}  // namespace
}  // namespace te
