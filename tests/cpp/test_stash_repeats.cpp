// Members of several repeats through the C API, on every device here: the live part of each repeat comes back bit for
// bit, for any pitch, count and page, from both tiers; between repeats nothing is touched; a lost one is NaN.
#include <gtest/gtest.h>

#include <algorithm>

#include "stash_pool.h"

namespace te {
namespace {

using testing::Group;
using testing::MemberSpec;
using testing::round_trip;
using testing::StashEntry;
using testing::StashPool;

class StashRepeats : public ::testing::TestWithParam<int32_t> {
 protected:
  int32_t device() const { return GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(Devices, StashRepeats, ::testing::ValuesIn(testing::devices()), testing::device_name);

// Buffers of one member with one count: rows of a matrix of scales, of any pitch.
TEST_P(StashRepeats, RepeatsOfAnyPitch) {
  for (const int64_t repeats : {1, 2, 56, 224}) {
    for (const int64_t more : {0, 4, 16, 52}) {
      const int64_t most = repeats == 224 ? 150 : 700;
      const std::vector<MemberSpec> specs = {
          {100, 9},
          {4, most, TE_STASH_TAIL_ZERO, 128, 0, 4, 0, repeats, 4 * most + more},
          {12, most, TE_STASH_TAIL_TILE, 128, 3, 8, 1, repeats, 12 * most + more},
          {1, 300, TE_STASH_TAIL_KEEP, 128, 0, 4, 0, repeats, 300 + more},
      };
      for (const size_t page : {size_t(128), size_t(4096), size_t(32768), size_t(40064)}) {
        Group group(device(), specs);
        const int64_t pages = group.most_pages(page);
        EXPECT_EQ(pages,
                  (((100 * 9 + 127) / 128 + repeats * ((4 * most + 127) / 128 + (12 * most + 127) / 128 + 3)) * 128 +
                   int64_t(page) - 1) /
                      int64_t(page));
        te_stash_options options = StashPool::defaults(device(), page, pages / 2);
        options.host_pages = pages - pages / 2;  // tiles of both tiers
        options.debug = more == 4 ? 1 : 0;
        const StashPool pool(options);
        const StashEntry entry(pool, pages);
        for (const int64_t count : {int64_t(0), int64_t(1), int64_t(127), int64_t(128), most}) {
          round_trip(pool, entry, group, {3, count, most - count, std::min<int64_t>(count, 300)});
          const te_stash_report report = pool.report();
          EXPECT_EQ(report.flags, 0u) << repeats << " " << more << " " << page << " " << count;
          EXPECT_EQ(report.device_in_use + report.host_in_use, 0);
        }
      }
    }
  }
}

// Buffers of more than a tile, and of more than a page.
TEST_P(StashRepeats, RepeatsOfManyTiles) {
  for (const size_t page : {size_t(16384), size_t(65536), size_t(40064), size_t(524288)}) {
    Group group(device(), {{4, 50000, TE_STASH_TAIL_ZERO, 128, 0, 4, 0, 5, 4 * 50000 + 32}});
    const int64_t pages = group.most_pages(page);
    te_stash_options options = StashPool::defaults(device(), page, pages / 3);
    options.host_pages = pages - pages / 3;
    const StashPool pool(options);
    const StashEntry entry(pool, pages);
    for (const int64_t count : {1, 4096, 16384, 20001, 50000}) round_trip(pool, entry, group, {count});
    const te_stash_report report = pool.report();
    EXPECT_EQ(report.flags, 0u);
    EXPECT_EQ(report.live_bytes, 5 * 4 * (1 + 4096 + 16384 + 20001 + 50000));
  }
}

TEST_P(StashRepeats, ALostGroupOfRepeatsIsNan) {
  Group group(device(), {{4, 300, TE_STASH_TAIL_KEEP, 128, 0, 4, 0, 7, 1216}});
  const StashPool pool(device(), 4096, 1);
  const StashEntry entry(pool, group.most_pages(4096));
  group.set({200});
  group.poison_targets();
  TE_ASSERT_OK(group.store(pool, entry));
  TE_ASSERT_OK(group.load(pool, entry));
  group.expect_targets(Group::Found::kLost);
  EXPECT_EQ(pool.report().flags, uint32_t(TE_STASH_LOST));
}

}  // namespace
}  // namespace te
