// stash through the C API, on every device here: live parts come back bit for bit, whatever their sizes, counts, pages
// and tiers; tails have the values that the member asked for; nothing else is touched; and lost groups are NaN in every
// live row.
#include <gtest/gtest.h>

#include <algorithm>

#include "stash_pool.h"

namespace te {
namespace {

using testing::Bytes;
using testing::Group;
using testing::MemberSpec;
using testing::round_trip;
using testing::StashEntry;
using testing::StashPool;

class Stash : public ::testing::TestWithParam<int32_t> {
 protected:
  int32_t device() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Devices, Stash, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(Stash, EveryWidthAndCountComesBack) {
  for (const int64_t unit : {4, 12, 100, 128, 2048, 7168, 28672}) {
    const int64_t most = unit > 2048 ? 130 : 300;
    Group group(device(), {{unit, most}});
    const StashPool pool(device(), 32768, group.most_pages(32768));
    const StashEntry entry(pool, group.most_pages(32768));
    for (const int64_t count :
         {int64_t(0), int64_t(1), int64_t(63), int64_t(64), int64_t(65), int64_t(127), int64_t(128), most}) {
      round_trip(pool, entry, group, {count});
    }
    const te_stash_report report = pool.report();
    EXPECT_EQ(report.flags, 0u);
    EXPECT_EQ(report.device_in_use, 0);
    EXPECT_EQ(report.groups, 8);
  }
}

TEST_P(Stash, PanelsAreUnits) {
  Group group(device(), {{128 * 7168, 3, TE_STASH_TAIL_TILE, 1}, {7168, 384, TE_STASH_TAIL_TILE, 128}});
  const StashPool pool(device(), 524288, group.most_pages(524288));
  const StashEntry entry(pool, group.most_pages(524288));
  round_trip(pool, entry, group, {2, 200});
  round_trip(pool, entry, group, {0, 0});
  round_trip(pool, entry, group, {3, 384});
}

TEST_P(Stash, SixteenMembersOfAnyAlignmentShareATable) {
  std::vector<MemberSpec> specs;
  std::vector<int64_t> counts;
  const te_stash_tail tails[] = {TE_STASH_TAIL_KEEP, TE_STASH_TAIL_TILE, TE_STASH_TAIL_ZERO};
  for (int64_t m = 0; m < TE_STASH_MOST_MEMBERS; ++m) {
    specs.push_back({1 + m * m * 37, 200, tails[m % 3], 128 >> (m % 4), m, m % 2 == 0 ? 4 : 8});
    counts.push_back(m * 13 % 200);
  }
  for (const size_t page : {size_t(128), size_t(16384), size_t(16384 + 128), size_t(40064)}) {
    Group group(device(), specs);
    const StashPool pool(device(), page, group.most_pages(page));
    const StashEntry entry(pool, group.most_pages(page));
    round_trip(pool, entry, group, counts);
    round_trip(pool, entry, group, std::vector<int64_t>(16, 200));
    round_trip(pool, entry, group, std::vector<int64_t>(16, 1));
    EXPECT_EQ(pool.report().flags, 0u);
  }
}

TEST_P(Stash, UnitsBehindTheLiveOnesComeToo) {
  const int64_t most = 300;
  Group group(device(), {{100, most, TE_STASH_TAIL_ZERO, 128, 0, 4, 127}, {7, most, TE_STASH_TAIL_KEEP, 128, 3, 8, 1}});
  const StashPool pool(device(), 16384, group.most_pages(16384));
  const StashEntry entry(pool, group.most_pages(16384));
  for (const int64_t count : {int64_t(0), int64_t(1), int64_t(172), int64_t(173), int64_t(174), most - 1, most}) {
    round_trip(pool, entry, group, {count, most - count});
    EXPECT_EQ(pool.report().flags, 0u) << count;
  }
  round_trip(pool, entry, group, {most + 5, -5});
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_OVER_CAPACITY | TE_STASH_NEGATIVE));
}

TEST_P(Stash, TheCallersGateIsTheReports) {
  testing::Buffer<float> gate(device(), 1, 1);
  gate.fill({0.5f});
  te_stash_options options = StashPool::defaults(device(), 4096, 2);
  options.gate = gate.data();
  StashPool pool(options);
  const auto shown = [&] {
    pool.wait();
    return gate.read()[0];
  };
  EXPECT_EQ(shown(), 0.f);
  const StashEntry entry(pool, 8);
  Group group(device(), {{4096, 4}});
  for (int turn = 0; turn < 2; ++turn) {
    group.set({2});
    TE_ASSERT_OK(group.store(pool, entry));
    TE_ASSERT_OK(group.load(pool, entry));
    EXPECT_EQ(shown(), 0.f);
    group.set({3});
    TE_ASSERT_OK(group.store(pool, entry));
    EXPECT_EQ(shown(), 1.f);
    pool.reset();
    EXPECT_EQ(shown(), 0.f);
  }
  TE_ASSERT_OK(group.load(pool, entry));  // of nothing
  EXPECT_EQ(shown(), 1.f);
  EXPECT_EQ(pool.report().gate, 1.f);
}

TEST_P(Stash, CountersOfOneByteAreUnsigned) {
  Group group(device(), {{64, 300, TE_STASH_TAIL_ZERO, 1, 0, 1}});
  const StashPool pool(device(), 16384, 2);
  const StashEntry entry(pool, 2);
  round_trip(pool, entry, group, {255});
  EXPECT_EQ(entry.head().counts[0], 255);
  EXPECT_EQ(pool.report().flags, 0u);
}

TEST_P(Stash, TailsEndAsTheMemberRequests) {
  for (const te_stash_tail tail : {TE_STASH_TAIL_KEEP, TE_STASH_TAIL_TILE, TE_STASH_TAIL_ZERO}) {
    for (const int64_t shift : {0, 4, 7}) {
      Group group(device(), {{48, 1000, tail, 128, shift}, {3, 1000, tail, 7, shift}, {16, 100, tail, 1000, shift}});
      const StashPool pool(device(), 16384, group.most_pages(16384));
      const StashEntry entry(pool, group.most_pages(16384));
      for (const auto& counts : std::vector<std::vector<int64_t>>{
               {0, 0, 0}, {1, 1, 1}, {127, 6, 99}, {128, 7, 100}, {129, 8, 50}, {999, 999, 2}, {1000, 1000, 100}}) {
        round_trip(pool, entry, group, counts);
      }
    }
  }
}

TEST_P(Stash, PagesOfBothTiersHoldOneGroup) {
  for (const int64_t device_pages : {0, 1, 3, 7}) {
    Group group(device(), {{7168, 64}, {56, 64}, {1, 50000}});
    const int64_t most = group.most_pages(65536);
    const StashPool pool(device(), 65536, device_pages, most);
    const StashEntry entry(pool, most);
    for (const int64_t count : {0, 5, 40, 64}) round_trip(pool, entry, group, {count, count, count * 700});
    group.set({64, 64, 50000});
    const int64_t spilled = pool.report().spilled_bytes;
    TE_ASSERT_OK(group.store(pool, entry, 3));
    EXPECT_EQ(pool.report().spilled_bytes - spilled, std::max<int64_t>(0, group.stream_bytes() - device_pages * 65536));
    const te_stash_entry head = entry.head();
    EXPECT_EQ(head.pages, most);
    EXPECT_EQ(head.host_pages, most - device_pages);
    EXPECT_EQ(pool.report().flags, 0u);
  }
}

// Many more tiles a block than there are on their way at once: every stage and job of the pipeline is used again.
TEST_P(Stash, OneBlockMovesEverything) {
  for (const int64_t host_pages : {0, 80}) {
    te_stash_options options = StashPool::defaults(device(), 16384 * 2 + 128, 80 - host_pages / 2, host_pages);
    options.sm_budget = 1;
    const StashPool pool(options);
    Group group(device(), {{7168, 340}, {3, 20000, TE_STASH_TAIL_KEEP, 1, 1}, {100, 300}});
    const StashEntry entry(pool, 80);
    round_trip(pool, entry, group, {340, 20000, 299});
    round_trip(pool, entry, group, {201, 777, 300});
    if (host_pages == 0) continue;
    group.set({340, 20000, 299});
    group.poison_targets();
    TE_ASSERT_OK(group.store(pool, entry));
    TE_ASSERT_OK(te_stash_evict(pool.handle, entry.data(), 80, nullptr));
    EXPECT_EQ(entry.head().host_pages, entry.head().pages);
    TE_ASSERT_OK(group.load(pool, entry));
    group.expect_targets();
  }
}

TEST_P(Stash, PagesAreTakenInAnyOrder) {
  for (const te_stash_policy policy : {TE_STASH_RING, TE_STASH_STACK}) {
    Group a(device(), {{512, 100}}, 1), b(device(), {{512, 100}, {20, 100}}, 2), c(device(), {{100, 500}}, 3);
    StashPool pool(device(), 4096, 40, 4, policy);
    const StashEntry of_a(pool, 40), of_b(pool, 40), of_c(pool, 40);
    for (int64_t i = 0; i < 60; ++i) {
      a.set({i * 7 % 101});
      b.set({i * 11 % 101, i * 13 % 101});
      c.set({i * 17 % 501});
      for (Group* g : {&a, &b, &c}) g->poison_targets();
      TE_ASSERT_OK(a.store(pool, of_a));
      TE_ASSERT_OK(b.store(pool, of_b));
      TE_ASSERT_OK(a.load(pool, of_a));
      TE_ASSERT_OK(c.store(pool, of_c));
      TE_ASSERT_OK(i % 2 == 0 ? b.load(pool, of_b) : c.load(pool, of_c));
      TE_ASSERT_OK(i % 2 == 0 ? c.load(pool, of_c) : b.load(pool, of_b));
      for (const Group* g : {&a, &b, &c}) g->expect_targets();
    }
    EXPECT_EQ(pool.report().flags, 0u);
    EXPECT_EQ(pool.report().device_in_use, 0);
  }
}

TEST_P(Stash, ALostGroupIsNaNAndTakesNothing) {
  for (const int64_t host_pages : {0, 2}) {
    Group kept(device(), {{512, 32}}, 1), lost(device(), {{512, 100, TE_STASH_TAIL_TILE, 64, 1}, {24, 100}}, 2);
    StashPool pool(device(), 4096, 8, host_pages);
    const StashEntry of_kept(pool, 4), of_lost(pool, 20);
    kept.set({32});
    lost.set({70, 90});
    kept.poison_targets();
    lost.poison_targets();
    TE_ASSERT_OK(kept.store(pool, of_kept, 11));
    TE_ASSERT_OK(lost.store(pool, of_lost, 12));
    te_stash_report report = pool.report();
    EXPECT_EQ(report.flags, uint32_t(TE_STASH_LOST));
    EXPECT_EQ(report.gate, 1.f);
    EXPECT_EQ(report.flagged_entry, 12);
    EXPECT_EQ(report.groups, 2);
    EXPECT_EQ(report.lost_groups, 1);
    EXPECT_EQ(report.device_in_use, 4);
    EXPECT_EQ(report.host_in_use, 0);
    EXPECT_EQ(report.live_bytes, kept.live_bytes());
    EXPECT_EQ(report.demand, 4 + (lost.stream_bytes() + 4095) / 4096);
    EXPECT_EQ(of_lost.head().state, TE_STASH_STATE_LOST);
    EXPECT_TRUE(of_lost.map().empty());
    TE_ASSERT_OK(lost.load(pool, of_lost));
    TE_ASSERT_OK(kept.load(pool, of_kept));
    lost.expect_targets(Group::Found::kLost);
    kept.expect_targets();
    pool.reset();
    report = pool.report();
    EXPECT_EQ(report.flags, 0u);
    EXPECT_EQ(report.gate, 0.f);
    EXPECT_EQ(report.step, 1);
    EXPECT_EQ(report.flagged_entry, -1);
  }
}

TEST_P(Stash, WithoutAnyPageGroupsAreLostUnlessTheyAreEmpty) {
  Group group(device(), {{64, 10}});
  const StashPool pool(device(), 128, 0, 0);
  const StashEntry entry(pool, 5);
  round_trip(pool, entry, group, {0});
  EXPECT_EQ(pool.report().flags, 0u);
  group.set({1});
  group.poison_targets();
  TE_ASSERT_OK(group.store(pool, entry));
  TE_ASSERT_OK(group.load(pool, entry));
  group.expect_targets(Group::Found::kLost);
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_LOST));
}

TEST_P(Stash, CountsBeyondTheBufferAreCutAndFlagged) {
  Group group(device(), {{96, 50}, {32, 60, TE_STASH_TAIL_KEEP, 1, 3, 8}});
  StashPool pool(device(), 4096, 4);
  const StashEntry entry(pool, 4);
  round_trip(pool, entry, group, {51, 60});
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_OVER_CAPACITY));
  pool.reset();
  round_trip(pool, entry, group, {-1, 5});
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_NEGATIVE));
  EXPECT_EQ(pool.report().gate, 1.f);
  pool.reset();
  round_trip(pool, entry, group, {INT32_MIN, INT64_MAX});
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_NEGATIVE | TE_STASH_OVER_CAPACITY));
}

TEST_P(Stash, KeptPagesAreLoadedAgainAndAnEmptyEntryIsNaN) {
  Group group(device(), {{512, 32, TE_STASH_TAIL_KEEP}});
  StashPool pool(device(), 4096, 4);
  const StashEntry entry(pool, 4);
  group.set({20});
  TE_ASSERT_OK(group.store(pool, entry, 5));
  for (int i = 0; i < 3; ++i) {
    group.poison_targets();
    TE_ASSERT_OK(group.load(pool, entry, i < 2));
    group.expect_targets();
    EXPECT_EQ(pool.report().device_in_use, i < 2 ? 3 : 0);
  }
  EXPECT_EQ(pool.report().flags, 0u);
  group.poison_targets();
  TE_ASSERT_OK(group.load(pool, entry));
  group.expect_targets(Group::Found::kNothing);
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_EMPTY));
  EXPECT_EQ(pool.report().flagged_entry, 5);
  EXPECT_EQ(pool.report().device_in_use, 0);
}

TEST_P(Stash, AFullEntryTakesNoSecondStore) {
  Group first(device(), {{512, 32}}, 1), second(device(), {{512, 32}}, 2);
  StashPool pool(device(), 4096, 8);
  const StashEntry entry(pool, 4);
  first.set({32});
  second.set({9});
  TE_ASSERT_OK(first.store(pool, entry, 1));
  TE_ASSERT_OK(second.store(pool, entry, 2));
  te_stash_report report = pool.report();
  EXPECT_EQ(report.flags, uint32_t(TE_STASH_EMPTY));
  EXPECT_EQ(report.flagged_entry, 2);
  EXPECT_EQ(report.device_in_use, 4);
  EXPECT_EQ(report.groups, 1);
  first.poison_targets();
  TE_ASSERT_OK(first.load(pool, entry));
  first.expect_targets();
  EXPECT_EQ(pool.report().device_in_use, 0);
}

TEST_P(Stash, ALoadOfOtherSizesGetsNoneOfTheBytes) {
  Group stored(device(), {{512, 32}}), shorter(device(), {{512, 31}}), wider(device(), {{516, 32}}),
      more(device(), {{512, 32}, {4, 1}});
  StashPool pool(device(), 4096, 8);
  const StashEntry entry(pool, 4);
  for (Group* other : {&shorter, &wider, &more}) {
    stored.set({32});
    other->poison_targets();
    TE_ASSERT_OK(stored.store(pool, entry));
    TE_ASSERT_OK(other->load(pool, entry));
    other->expect_targets(Group::Found::kNothing);
    EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_EMPTY));
    EXPECT_EQ(pool.report().device_in_use, 0);
    pool.reset();
  }
}

TEST_P(Stash, AResetDropsTheContentsOfEntries) {
  Group group(device(), {{512, 32}});
  StashPool pool(device(), 4096, 4);
  const StashEntry entry(pool, 4);
  group.set({32});
  TE_ASSERT_OK(group.store(pool, entry));
  pool.reset();
  group.poison_targets();
  TE_ASSERT_OK(group.load(pool, entry));
  group.expect_targets(Group::Found::kNothing);
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_EMPTY));
  pool.reset();
  TE_ASSERT_OK(group.store(pool, entry));
  pool.reset();
  round_trip(pool, entry, group, {32});  // into an entry of the last step
  EXPECT_EQ(pool.report().flags, 0u);
  EXPECT_EQ(pool.report().device_in_use, 0);
}

TEST_P(Stash, EvictedPagesComeBackFromTheHost) {
  for (const te_stash_policy policy : {TE_STASH_RING, TE_STASH_STACK}) {
    Group a(device(), {{512, 100}, {3, 99, TE_STASH_TAIL_ZERO, 1, 1}}, 1), b(device(), {{640, 100}}, 2);
    const StashPool pool(device(), 4224, 20, 14, policy);
    const StashEntry of_a(pool, 14), of_b(pool, 16);
    a.set({90, 99});
    b.set({50});
    a.poison_targets();
    b.poison_targets();
    TE_ASSERT_OK(a.store(pool, of_a, 0));  // from here on neighbours in a stack's group are none in memory
    TE_ASSERT_OK(te_stash_drop(pool.handle, of_a.data(), nullptr));
    TE_ASSERT_OK(a.store(pool, of_a, 1));
    const int64_t pages = of_a.head().pages;
    EXPECT_EQ(of_a.head().host_pages, 0);
    TE_ASSERT_OK(te_stash_evict(pool.handle, of_a.data(), 20 - pages, nullptr));  // enough are free
    EXPECT_EQ(of_a.head().host_pages, 0);
    TE_ASSERT_OK(te_stash_evict(pool.handle, of_a.data(), 20 - pages + 1, nullptr));
    EXPECT_EQ(of_a.head().host_pages, pages);
    EXPECT_EQ(pool.report().device_in_use, 0);
    EXPECT_EQ(pool.report().host_in_use, pages);
    EXPECT_EQ(pool.report().host_peak, pages);
    EXPECT_EQ(pool.report().evicted_pages, pages);
    TE_ASSERT_OK(b.store(pool, of_b, 2));
    TE_ASSERT_OK(te_stash_evict(pool.handle, of_b.data(), 100, nullptr));  // the host has not enough: all or none
    EXPECT_EQ(of_b.head().host_pages, 0);
    TE_ASSERT_OK(a.load(pool, of_a));
    TE_ASSERT_OK(b.load(pool, of_b));
    a.expect_targets();
    b.expect_targets();
    EXPECT_EQ(pool.report().flags, 0u);
    EXPECT_EQ(pool.report().device_in_use, 0);
    EXPECT_EQ(pool.report().host_in_use, 0);
    TE_ASSERT_OK(te_stash_evict(pool.handle, of_a.data(), 100, nullptr));  // holds nothing: let be
    TE_ASSERT_OK(te_stash_drop(pool.handle, of_a.data(), nullptr));
    EXPECT_EQ(pool.report().flags, 0u);
  }
}

}  // namespace
}  // namespace te
