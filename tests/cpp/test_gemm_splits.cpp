// te_gemm_splits on every device here: its answers for each algorithm that may be chosen, against the bits of
// te_grouped_gemm, which has one accumulator for an element: where nothing is split they are the same. Mutants: a table
// that outlives a choice, a split that is not seen, rows where the depth was meant.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "gemm_case.h"
#include "transformer_engine/grouped_gemm.h"

namespace te {
namespace {

using testing::Buffer;
using testing::Problem;
using testing::Shape;

class GemmSplits : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, GemmSplits, ::testing::ValuesIn(testing::devices()), testing::device_name);

// The product of one group by the grouped kernel, into p's d.
std::vector<bf16> grouped(Problem<bf16, bf16>& p, int32_t device) {
  const bool wgrad = p.problem.layout == TE_GEMM_NT;
  Buffer<int32_t> offsets(device, 1, 2);
  offsets.fill({0, int32_t(p.problem.b.rows)});
  te_grouped_gemm_problem one{};
  one.product = wgrad ? TE_GROUPED_WGRAD : p.problem.layout == TE_GEMM_TN ? TE_GROUPED_FPROP : TE_GROUPED_DGRAD;
  one.groups = 1;
  one.offsets = offsets.data();
  one.rows = p.problem.b;
  (wgrad ? one.depth_rows : one.result) = wgrad ? p.problem.a : p.problem.d;
  (wgrad ? one.results : one.weights) = wgrad ? &p.problem.d : &p.problem.a;
  p.d.poison();
  TE_EXPECT_OK(te_grouped_gemm(&one, nullptr));
  return p.d.read();
}

uint8_t splits_of(const te_gemm_problem& problem, bool along_depth, int64_t count) {
  const int64_t counts[] = {0, count, count};
  uint8_t splits[] = {2, 2, 2};
  TE_EXPECT_OK(te_gemm_splits(&problem, along_depth, counts, 3, splits));
  EXPECT_EQ(splits[0], 0);
  EXPECT_EQ(splits[1], splits[2]);
  return splits[1];
}

TEST_P(GemmSplits, WhatIsNotSplitHasTheBitsOfOneAccumulator) {
  int split = 0, whole = 0;
  const std::pair<te_gemm_layout, Shape> cases[] = {{TE_GEMM_TN, {32, 64, 2048, 0}},   {TE_GEMM_TN, {32, 64, 4096, 0}},
                                                    {TE_GEMM_NN, {32, 256, 2048, 0}},  {TE_GEMM_NN, {32, 256, 8192, 0}},
                                                    {TE_GEMM_NT, {128, 128, 5000, 0}}, {TE_GEMM_NT, {64, 64, 256, 0}}};
  for (const auto& [layout, s] : cases) {
    const bool along_depth = layout == TE_GEMM_NT;
    const int64_t count = along_depth ? s.depth : s.rows;
    Problem<bf16, bf16> p(GetParam(), layout, s);
    const std::vector<bf16> want = grouped(p, GetParam());
    if (GetParam() == TE_DEVICE_CPU) {
      EXPECT_EQ(splits_of(p.problem, along_depth, count), 0);
      continue;
    }
    te_gemm_key key{};
    te_gemm_choice choices[64] = {};
    int32_t found = 0;
    TE_ASSERT_OK(te_gemm_key_of(&p.problem, &key));
    TE_ASSERT_OK(te_gemm_candidates(&key, 64, choices, &found));
    const uint8_t by_default = splits_of(p.problem, along_depth, count);
    for (int32_t i = 0; i < found; ++i) {
      TE_ASSERT_OK(te_gemm_choose(&key, &choices[i], 1));
      const uint8_t splits = splits_of(p.problem, along_depth, count);
      if (i == 0) {
        EXPECT_EQ(splits, by_default);
      }
      (splits != 0 ? split : whole) += 1;
      if (splits != 0) continue;
      p.d.poison();
      TE_ASSERT_OK(p.run());
      EXPECT_EQ(testing::widened(p.d.read()), testing::widened(want)) << name_of(layout, s) << " candidate " << i;
    }
    TE_ASSERT_OK(te_gemm_forget_choices());
    EXPECT_EQ(splits_of(p.problem, along_depth, count), by_default);
  }
  if (GetParam() != TE_DEVICE_CPU) {
    EXPECT_TRUE(split > 0 && whole > 0) << split << " split, " << whole << " whole";
  }
}

// Where device and host splits are compared bit for bit at large shapes (test_grouped_linear.py): nothing is split
// there.
TEST_P(GemmSplits, LargeGroupsAreNotSplit) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "cuBLASLt's algorithms";
  struct Large {
    int64_t groups, rows, n, k;
  };
  for (const Large& l : {Large{8, 16384, 28672, 4096}, Large{128, 65536, 1536, 2048}}) {
    std::vector<int64_t> counts;  // even, and falling as 1 / rank
    double shares = 0;
    for (int64_t g = 0; g < l.groups; ++g) shares += 1.0 / double(g + 1);
    for (int64_t g = 0; g < l.groups; ++g) {
      counts.push_back(l.rows / l.groups);
      counts.push_back(int64_t(double(l.rows) / double(g + 1) / shares));
    }
    for (const te_gemm_layout layout : {TE_GEMM_TN, TE_GEMM_NN, TE_GEMM_NT}) {
      Problem<bf16, bf16> p(GetParam(), layout, {16, 16, 16, 0});
      const auto resized = [](te_tensor& t, int64_t rows, int64_t cols) {
        t.rows = rows;
        t.cols = t.row_pitch = cols;
      };
      const int64_t depth = layout == TE_GEMM_NN ? l.n : l.k, cols = layout == TE_GEMM_TN ? l.n : l.k;
      resized(p.problem.a, layout == TE_GEMM_NT ? l.rows : l.n, l.k);
      resized(p.problem.b, l.rows, layout == TE_GEMM_NT ? l.n : depth);
      resized(p.problem.d, layout == TE_GEMM_NT ? l.n : l.rows, cols);
      std::vector<uint8_t> splits(counts.size(), 2);
      TE_ASSERT_OK(
          te_gemm_splits(&p.problem, layout == TE_GEMM_NT, counts.data(), int32_t(counts.size()), splits.data()));
      const auto split = std::count(splits.begin(), splits.end(), 1);
      std::printf("layout %d, N %lld, K %lld: %lld of %zu groups split\n", int(layout), (long long)l.n, (long long)l.k,
                  (long long)split, counts.size());
      EXPECT_EQ(split, 0);
    }
  }
}

TEST_P(GemmSplits, CountsAreThoseOfTheGivenProblem) {  // of more counts than one, of which each is a problem for itself
  Problem<bf16, bf16> p(GetParam(), TE_GEMM_TN, {256, 64, 4096, 0});
  std::vector<int64_t> counts;
  for (int64_t count = 0; count <= 256; count += 8) counts.push_back(count);
  std::vector<uint8_t> splits(counts.size(), 2);
  TE_ASSERT_OK(te_gemm_splits(&p.problem, 0, counts.data(), int32_t(counts.size()), splits.data()));
  const te_gemm_problem all = p.problem;
  for (size_t i = 1; i < counts.size(); ++i) {
    p.problem = all;
    p.problem.b.rows = p.problem.d.rows = counts[i];
    int32_t does = -1;
    TE_ASSERT_OK(te_gemm_takes_runs(&p.problem, &does, nullptr));
    EXPECT_EQ(int(splits[i]), 1 - does) << counts[i];
  }
}

TEST_P(GemmSplits, BadCountsAreNamed) {
  Problem<bf16, bf16> p(GetParam(), TE_GEMM_TN, {16, 24, 40, 0});
  const int64_t counts[] = {1, -3};
  uint8_t splits[2] = {};
  EXPECT_EQ(te_gemm_splits(&p.problem, 0, counts, -1, splits), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'number'"), std::string::npos) << te_last_error();
  EXPECT_EQ(te_gemm_splits(&p.problem, 0, counts, 2, splits), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'counts' is -3"), std::string::npos) << te_last_error();
  TE_EXPECT_OK(te_gemm_splits(&p.problem, 0, counts, 0, splits));
}

}  // namespace
}  // namespace te
