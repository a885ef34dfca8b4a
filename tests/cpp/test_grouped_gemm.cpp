// grouped gemm through the C API, on every device here: each product against float64 per group, poisoned results,
// pitches, tails, empty groups, many groups, strangers' NaN, repeatability.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "grouped_case.h"
#include "transformer_engine/gemm.h"

namespace te {
namespace {

using testing::GroupedCase;
using testing::GroupedShape;
using testing::is_poison;

constexpr te_grouped_product kRowProducts[] = {TE_GROUPED_FPROP, TE_GROUPED_DGRAD};

const GroupedShape kShapes[] = {{{1}, 0, 1, 1},
                                {{0}, 3, 8, 8},
                                {{5, 0, 3}, 0, 17, 33, 3},
                                {{0, 64, 64, 0}, 5, 24, 40},
                                {{63, 1, 65, 0, 130, 2}, 7, 72, 64},
                                {{128, 128}, 0, 256, 64, 1},
                                {{7, 300, 0, 1}, 40, 264, 200},
                                {{200, 56, 9}, 1, 520, 300, 5}};

class Grouped : public ::testing::TestWithParam<int32_t> {
 protected:
  bool on_cpu() const { return GetParam() == TE_DEVICE_CPU; }
};

INSTANTIATE_TEST_SUITE_P(On, Grouped, ::testing::ValuesIn(testing::devices()), testing::device_name);

template <class T>
bool is_zero(const T& value) {
  const T zero{};
  return std::memcmp(&value, &zero, sizeof(T)) == 0;
}

// Rows of groups against float64; the tail against what was asked for.
template <class T, class D>
void check_rows(GroupedCase<T, D>& c, const std::string& name) {
  const std::vector<T> got = c.row_result().read();
  const int64_t cols = c.row_cols();
  for (int64_t row = 0; row < c.shape.rows(); ++row) {
    const int32_t g = c.group_of(row);
    for (int64_t col = 0; col < cols; ++col) {
      const T value = got[size_t(row * cols + col)];
      if (g < 0) {
        ASSERT_TRUE(c.problem.zero_tail ? is_zero(value) : is_poison(value)) << name << " tail row " << row;
        continue;
      }
      auto sum = c.row_sum(row, col);
      if (c.problem.biases != nullptr) sum.add(1, to_float(c.bias_values[size_t(g)][size_t(col)]));
      const double bound = testing::grouped_bound<T>(sum.value, sum.magnitude, c.depth() + 1);
      ASSERT_LE(std::fabs(to_float(value) - sum.value), bound) << name << " at " << row << ", " << col;
    }
  }
  EXPECT_TRUE(c.x.padding_untouched() && c.dy.padding_untouched() && c.row_result().padding_untouched()) << name;
}

template <class T, class D>
void check_weights(GroupedCase<T, D>& c, int32_t g, const std::vector<D>& before, const std::string& name) {
  const std::vector<D> got = c.results[size_t(g)]->read();
  for (int64_t n = 0; n < c.shape.n; ++n) {
    for (int64_t k = 0; k < c.shape.k; ++k) {
      const size_t i = size_t(n * c.shape.k + k);
      auto sum = c.weight_sum(g, n, k);
      if (!before.empty()) sum.add(1, to_float(before[i]));
      const double bound = testing::grouped_bound<D>(sum.value, sum.magnitude, c.shape.splits[size_t(g)] + 1);
      ASSERT_LE(std::fabs(to_float(got[i]) - sum.value), bound) << name << " group " << g << " at " << n << ", " << k;
    }
  }
  EXPECT_TRUE(c.results[size_t(g)]->padding_untouched()) << name << " group " << g;
}

// f(T{}) for the operands' dtypes of a device.
template <class F>
void for_dtypes(bool on_cpu, F&& f) {
  f(bf16{});
  f(fp16{});
  if (on_cpu) f(float{});
}

TEST_P(Grouped, RowProductsWithBiasAndTail) {
  for_dtypes(on_cpu(), [&](auto type) {
    using T = decltype(type);
    for (const te_grouped_product product : kRowProducts) {
      for (const GroupedShape& s : kShapes) {
        GroupedCase<T> c(GetParam(), product, s);
        for (const bool bias : {false, true}) {
          if (bias && product != TE_GROUPED_FPROP) continue;
          if (bias) c.with_bias();
          c.problem.zero_tail = bias || product == TE_GROUPED_DGRAD;
          c.row_result().poison();
          TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
          ASSERT_NO_FATAL_FAILURE(check_rows(c, name_of(s, product)));
        }
      }
    }
  });
}

template <class T, class D>
void weight_gradients(int32_t device) {
  for (const GroupedShape& s : kShapes) {
    GroupedCase<T, D> c(device, TE_GROUPED_WGRAD, s);
    const std::string name = name_of(s, TE_GROUPED_WGRAD);
    TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
    for (int32_t g = 0; g < s.groups(); ++g) ASSERT_NO_FATAL_FAILURE(check_weights(c, g, {}, name));
    // Every other group adds; the last one is not wanted.
    const std::vector<D> before = testing::normals<D>(s.n * s.k, 7);
    std::vector<uint8_t> accumulate(size_t(s.groups()), 0);
    for (int32_t g = 0; g < s.groups(); ++g) {
      accumulate[size_t(g)] = g % 2 == 0;
      c.results[size_t(g)]->fill(before);
    }
    const bool skips = s.groups() > 1;
    if (skips) c.result_tensors.back().data = nullptr;
    c.problem.accumulate = accumulate.data();
    TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
    for (int32_t g = 0; g < s.groups() - (skips ? 1 : 0); ++g) {
      ASSERT_NO_FATAL_FAILURE(check_weights(c, g, g % 2 == 0 ? before : std::vector<D>(), name + " accumulated"));
    }
    if (skips) {
      const std::vector<D> kept = c.results.back()->read();
      ASSERT_EQ(std::memcmp(kept.data(), before.data(), kept.size() * sizeof(D)), 0) << name << ": not wanted, written";
    }
  }
}

TEST_P(Grouped, WeightGradients) {
  for_dtypes(on_cpu(), [&](auto type) {
    using T = decltype(type);
    weight_gradients<T, float>(GetParam());
    if (!std::is_same_v<T, float>) weight_gradients<T, T>(GetParam());
  });
}

TEST_P(Grouped, WeightGradientsOfTwoDtypesInOneCall) {
  const GroupedShape s{{65, 3, 40}, 2, 24, 40};
  GroupedCase<bf16, float> floats(GetParam(), TE_GROUPED_WGRAD, s);
  GroupedCase<bf16, bf16> halves(GetParam(), TE_GROUPED_WGRAD, s);
  floats.result_tensors[1] = halves.result_tensors[1];
  TE_ASSERT_OK(te_grouped_gemm(&floats.problem, nullptr));
  for (const int32_t g : {0, 2}) ASSERT_NO_FATAL_FAILURE(check_weights(floats, g, {}, "float32"));
  ASSERT_NO_FATAL_FAILURE(check_weights(halves, 1, {}, "bfloat16"));
  for (const float v : floats.results[1]->read()) ASSERT_TRUE(is_poison(v));
}

TEST_P(Grouped, AnEmptyGroupThatAddsKeepsItsBits) {
  GroupedCase<bf16, float> c(GetParam(), TE_GROUPED_WGRAD, {{3, 0}, 0, 8, 8});
  const std::vector<float> before(64, -0.f);
  c.results[1]->fill(before);
  const std::vector<uint8_t> accumulate(2, 1);
  c.problem.accumulate = accumulate.data();
  TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
  for (const float v : c.results[1]->read()) ASSERT_TRUE(std::signbit(v));
}

TEST_P(Grouped, MoreGroupsThanOneLaunchTakes) {
  GroupedShape s{{}, 9, 40, 24};
  for (int32_t g = 0; g < 500; ++g) s.splits.push_back(g % 7 == 0 ? 0 : g % 5);
  for (const te_grouped_product product : kRowProducts) {
    GroupedCase<bf16> c(GetParam(), product, s);
    c.problem.zero_tail = 1;
    TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
    ASSERT_NO_FATAL_FAILURE(check_rows(c, "500 groups"));
  }
  GroupedCase<bf16, float> c(GetParam(), TE_GROUPED_WGRAD, s);
  TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
  for (int32_t g = 0; g < s.groups(); ++g) ASSERT_NO_FATAL_FAILURE(check_weights(c, g, {}, "500 groups"));
}

TEST_P(Grouped, NothingToReduce) {
  for (const bool bias : {false, true}) {
    GroupedCase<bf16> c(GetParam(), TE_GROUPED_FPROP, {{3, 0, 2}, 2, 9, 0});
    if (bias) c.with_bias();
    TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
    ASSERT_NO_FATAL_FAILURE(check_rows(c, "K = 0"));
  }
  GroupedCase<bf16> dgrad(GetParam(), TE_GROUPED_DGRAD, {{3, 0, 2}, 2, 0, 9});
  dgrad.problem.zero_tail = 1;
  TE_ASSERT_OK(te_grouped_gemm(&dgrad.problem, nullptr));
  ASSERT_NO_FATAL_FAILURE(check_rows(dgrad, "N = 0"));
  for (const GroupedShape& s :
       {GroupedShape{{0, 0}, 0, 9, 5}, GroupedShape{{4, 1}, 0, 0, 5}, GroupedShape{{4}, 0, 5, 0}}) {
    GroupedCase<bf16, float> wgrad(GetParam(), TE_GROUPED_WGRAD, s);
    TE_ASSERT_OK(te_grouped_gemm(&wgrad.problem, nullptr));
    for (int32_t g = 0; g < s.groups(); ++g) ASSERT_NO_FATAL_FAILURE(check_weights(wgrad, g, {}, "empty"));
  }
  for (const GroupedShape& s : {GroupedShape{{0, 0}, 0, 9, 5}, GroupedShape{{4, 1}, 0, 0, 5}}) {
    GroupedCase<bf16> c(GetParam(), TE_GROUPED_FPROP, s);
    c.problem.zero_tail = 1;
    TE_EXPECT_OK(te_grouped_gemm(&c.problem, nullptr));
  }
}

// Group 1 holds NaN and Inf: the other groups' results are those without them.
TEST_P(Grouped, WhatOneGroupHoldsReachesNoOther) {
  const GroupedShape s{{33, 31, 70, 0, 65}, 6, 40, 72};
  const auto spoil = [&](auto& c) {
    for (auto* values : {&c.x_values, &c.dy_values}) {
      const int64_t cols = int64_t(values->size()) / s.rows();
      for (int64_t i = 33 * cols; i < 64 * cols; ++i) {
        (*values)[size_t(i)] = from_float<bf16>(i % 3 ? std::numeric_limits<float>::infinity() : std::nanf(""));
      }
      for (size_t i = size_t(s.live() * cols); i < values->size(); ++i) (*values)[i] = from_float<bf16>(std::nanf(""));
    }
    c.x.fill(c.x_values);
    c.dy.fill(c.dy_values);
  };
  for (const te_grouped_product product : kRowProducts) {
    GroupedCase<bf16> clean(GetParam(), product, s), dirty(GetParam(), product, s);
    spoil(dirty);
    TE_ASSERT_OK(te_grouped_gemm(&clean.problem, nullptr));
    TE_ASSERT_OK(te_grouped_gemm(&dirty.problem, nullptr));
    const std::vector<bf16> want = clean.row_result().read(), got = dirty.row_result().read();
    for (size_t i = 0; i < want.size(); ++i) {
      if (clean.group_of(int64_t(i) / clean.row_cols()) == 1) continue;
      ASSERT_EQ(got[i].bits, want[i].bits) << i;
    }
  }
  GroupedCase<bf16, float> clean(GetParam(), TE_GROUPED_WGRAD, s), dirty(GetParam(), TE_GROUPED_WGRAD, s);
  spoil(dirty);
  TE_ASSERT_OK(te_grouped_gemm(&clean.problem, nullptr));
  TE_ASSERT_OK(te_grouped_gemm(&dirty.problem, nullptr));
  for (const int g : {0, 2, 3, 4}) EXPECT_EQ(dirty.results[size_t(g)]->read(), clean.results[size_t(g)]->read()) << g;
}

// A group alone, and the same rows after others in a larger buffer.
TEST_P(Grouped, BitsDependOnTheGroupAlone) {
  const GroupedShape alone{{77}, 0, 136, 264}, among{{50, 77, 9}, 31, 136, 264};
  const auto shifted = [](const std::vector<bf16>& values, int64_t cols, std::vector<bf16> whole) {
    std::copy(values.begin(), values.end(), whole.begin() + 50 * cols);
    return whole;
  };
  const auto twins = [&](auto& one, auto& many) {
    many.x.fill(many.x_values = shifted(one.x_values, 264, many.x_values));
    many.dy.fill(many.dy_values = shifted(one.dy_values, 136, many.dy_values));
    many.weights[1]->fill(one.weight_values[0]);
    TE_ASSERT_OK(te_grouped_gemm(&one.problem, nullptr));
    TE_ASSERT_OK(te_grouped_gemm(&many.problem, nullptr));
  };
  for (const te_grouped_product product : kRowProducts) {
    GroupedCase<bf16> one(GetParam(), product, alone), many(GetParam(), product, among);
    ASSERT_NO_FATAL_FAILURE(twins(one, many));
    const std::vector<bf16> want = one.row_result().read(), got = many.row_result().read();
    EXPECT_EQ(std::memcmp(want.data(), got.data() + 50 * one.row_cols(), want.size() * sizeof(bf16)), 0);
  }
  GroupedCase<bf16, float> one(GetParam(), TE_GROUPED_WGRAD, alone), many(GetParam(), TE_GROUPED_WGRAD, among);
  ASSERT_NO_FATAL_FAILURE(twins(one, many));
  EXPECT_EQ(one.results[0]->read(), many.results[1]->read());
}

TEST_P(Grouped, CpuGroupsAreProductsOfTeGemm) {
  if (!on_cpu()) GTEST_SKIP() << "cuBLASLt may split the reduction";
  const GroupedShape s{{5, 0, 40}, 2, 24, 33};
  GroupedCase<bf16> c(GetParam(), TE_GROUPED_FPROP, s), one(GetParam(), TE_GROUPED_FPROP, s);
  c.with_bias();
  TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
  for (int32_t g = 0; g < s.groups(); ++g) {
    te_gemm_problem p{};
    p.a = c.weight_tensors[size_t(g)];
    p.b = c.x.tensor();
    p.d = one.y.tensor();
    for (te_tensor* t : {&p.b, &p.d}) {
      t->data = static_cast<bf16*>(t->data) + c.offsets[size_t(g)] * t->row_pitch;
      t->rows = s.splits[size_t(g)];
    }
    p.bias = c.bias_tensors[size_t(g)];
    p.epilogue = TE_GEMM_BIAS;
    TE_ASSERT_OK(te_gemm(&p, nullptr, 0, nullptr));
  }
  const std::vector<bf16> want = one.y.read(), got = c.y.read();
  EXPECT_EQ(std::memcmp(want.data(), got.data(), want.size() * sizeof(bf16)), 0);
}

}  // namespace
}  // namespace te
