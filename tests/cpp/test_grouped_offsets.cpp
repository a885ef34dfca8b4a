// te_grouped_offsets on every device here: any splits, those whose sum overflows too, against 128-bit sums; counters
// that stay; errors. te_grouped_offsets_of: lists of one and of several launches, from a caller that goes on at once.
// te_grouped_panels: the panels that such offsets have.
// Mutants: add_splits without its limit, a second launch that begins again.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/grouped_gemm.h"
#include "transformer_engine/grouped_quantize.h"

namespace te {
namespace {

class GroupedOffsets : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, GroupedOffsets, ::testing::ValuesIn(testing::devices()), testing::device_name);

template <class Int>
void check_offsets(int32_t device, const std::vector<Int>& splits, int64_t rows, uint32_t start = 0) {
  const auto groups = int32_t(splits.size());
  testing::Buffer<Int> source(device, 1, groups);
  testing::Buffer<int32_t> offsets(device, 1, groups + 1), counters(device, 1, 2);
  source.fill(splits);
  counters.fill({int32_t(start), int32_t(start)});
  // 1,000 times the largest int64 fit into 128 bits.
  __int128 sum = 0, negatives = 0;
  std::vector<int32_t> want(1, 0);
  for (const Int split : splits) {
    negatives += split < 0;
    sum += split < 0 ? 0 : split;
    want.push_back(int32_t(sum < rows ? sum : __int128(rows)));
  }
  const auto counted = [&](__int128 more) {
    const __int128 all = start + (more > 0 ? more : 0);
    return uint32_t(all < 0xffffffffu ? all : __int128(0xffffffffu));
  };
  const auto call = [&](uint32_t* to) {
    return te_grouped_offsets(source.data(), sizeof(Int) == 8, groups, rows, device, offsets.data(), to, nullptr);
  };
  TE_ASSERT_OK(call(reinterpret_cast<uint32_t*>(counters.data())));
  EXPECT_EQ(offsets.read(), want);
  EXPECT_EQ(uint32_t(counters.read()[0]), counted(negatives));
  EXPECT_EQ(uint32_t(counters.read()[1]), counted(sum - rows));
  offsets.poison();
  TE_ASSERT_OK(call(nullptr));
  EXPECT_EQ(offsets.read(), want);
  EXPECT_TRUE(offsets.padding_untouched() && counters.padding_untouched());
}

TEST_P(GroupedOffsets, OffsetsOfAnySplits) {
  constexpr int64_t kMost = INT64_MAX, kLeast = INT64_MIN;
  for (const uint32_t start : {0u, 0xfffffff0u, 0xffffffffu}) {
    check_offsets<int32_t>(GetParam(), {3, 0, 5}, 8, start);
    check_offsets<int32_t>(GetParam(), {3, -1, 5, INT32_MIN}, 7, start);
    check_offsets<int32_t>(GetParam(), {INT32_MAX, INT32_MAX, INT32_MAX}, INT32_MAX, start);
    check_offsets<int64_t>(GetParam(), {kMost, kMost, kLeast, 1, kMost}, 100, start);
    check_offsets<int64_t>(GetParam(), {1, 0xffffffff, 1}, 1, start);
    check_offsets<int64_t>(GetParam(), {5, 0x100000000, -7}, INT32_MAX, start);
  }
  check_offsets<int64_t>(GetParam(), {0}, 0);
  check_offsets<int64_t>(GetParam(), {-4}, 0);
  for (const int groups : {31, 32, 33, 128, 1000}) {
    std::mt19937_64 engine{unsigned(groups)};
    std::vector<int64_t> mild, wild;
    for (int g = 0; g < groups; ++g) {
      mild.push_back(int64_t(engine() % 50) - 3);
      wild.push_back(int64_t(engine()) >> (engine() % 60));
    }
    check_offsets(GetParam(), mild, int64_t(20 * groups));
    check_offsets(GetParam(), mild, INT32_MAX);
    check_offsets(GetParam(), wild, 1 << 20);
    check_offsets(GetParam(), std::vector<int64_t>(size_t(groups), kMost), 1 << 20);
  }
}

TEST_P(GroupedOffsets, BadSplitsAreNamed) {
  testing::Buffer<int32_t> splits(GetParam(), 1, 2), offsets(GetParam(), 1, 3);
  const auto refused = [&](const void* from, int32_t groups, int64_t rows, int32_t* to, const char* argument) {
    EXPECT_EQ(te_grouped_offsets(from, 0, groups, rows, GetParam(), to, nullptr, nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find(argument), std::string::npos) << te_last_error();
  };
  refused(splits.data(), 0, 5, offsets.data(), "'groups'");
  refused(splits.data(), 2, -1, offsets.data(), "'rows'");
  refused(splits.data(), 2, int64_t(1) << 31, offsets.data(), "'rows'");
  refused(nullptr, 2, 5, offsets.data(), "'splits'");
  refused(splits.data(), 2, 5, nullptr, "'offsets'");
}

TEST_P(GroupedOffsets, OffsetsOfAListOfTheHost) {
  for (const int groups : {1, 7, 999, 1000, 1001, 2500}) {
    testing::Buffer<int32_t> offsets(GetParam(), 1, groups + 1);
    std::vector<int64_t> splits;
    std::vector<int32_t> want(1, 0);
    for (int g = 0; g < groups; ++g) {
      splits.push_back(g % 3 == 1 ? 0 : 17 * g % 500);
      want.push_back(want.back() + int32_t(splits.back()));
    }
    TE_ASSERT_OK(te_grouped_offsets_of(splits.data(), groups, GetParam(), offsets.data(), nullptr));
    std::fill(splits.begin(), splits.end(), -1);
    EXPECT_EQ(offsets.read(), want) << groups;
    EXPECT_TRUE(offsets.padding_untouched());
  }
  testing::Buffer<int32_t> offsets(GetParam(), 1, 3);
  const auto refused = [&](const std::vector<int64_t>& splits, const char* words) {
    EXPECT_EQ(te_grouped_offsets_of(splits.data(), int32_t(splits.size()), GetParam(), offsets.data(), nullptr),
              TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find(words), std::string::npos) << te_last_error();
  };
  refused({3, -1}, "'splits' is -1");
  refused({INT32_MAX, 1}, "one below 2^31");
  refused({INT64_MAX, INT64_MAX}, "one below 2^31");
  refused({}, "'groups'");
  const int64_t split = 1;
  EXPECT_EQ(te_grouped_offsets_of(nullptr, 1, GetParam(), offsets.data(), nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_grouped_offsets_of(&split, 1, GetParam(), nullptr, nullptr), TE_INVALID_ARGUMENT);
}

TEST_P(GroupedOffsets, PanelsOfTheGroups) {
  const auto check = [&](const std::vector<int32_t>& sizes) {
    const auto groups = int32_t(sizes.size());
    std::vector<int32_t> at(1, 0);
    int32_t want = 0;
    for (const int32_t size : sizes) {
      at.push_back(at.back() + size);
      want += size / 128 + (size % 128 != 0);
    }
    testing::Buffer<int32_t> offsets(GetParam(), 1, groups + 1), panels(GetParam(), 1, 1);
    offsets.fill(at);
    TE_ASSERT_OK(te_grouped_panels(offsets.data(), groups, GetParam(), panels.data(), nullptr));
    EXPECT_EQ(panels.read()[0], want) << groups;
    EXPECT_TRUE(panels.padding_untouched());
  };
  for (const std::vector<int32_t>& sizes :
       {std::vector<int32_t>{0}, {1}, {127}, {128}, {129}, {0, 3, 17, 0}, {1, 128, 0, 255, 256, 257}, {INT32_MAX}}) {
    check(sizes);
  }
  for (const int groups : {31, 32, 33, 64, 1000}) {
    std::mt19937 engine{unsigned(groups)};
    std::vector<int32_t> sizes;
    for (int g = 0; g < groups; ++g) sizes.push_back(int32_t(engine() % 3 == 0 ? 0 : engine() % 700));
    check(sizes);
  }
  testing::Buffer<int32_t> offsets(GetParam(), 1, 3), panels(GetParam(), 1, 1);
  const auto refused = [&](const int32_t* from, int32_t groups, int32_t* to, const char* argument) {
    EXPECT_EQ(te_grouped_panels(from, groups, GetParam(), to, nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find(argument), std::string::npos) << te_last_error();
  };
  refused(offsets.data(), 0, panels.data(), "'groups'");
  refused(nullptr, 2, panels.data(), "'offsets'");
  refused(offsets.data(), 2, nullptr, "'panels'");
}

}  // namespace
}  // namespace te
