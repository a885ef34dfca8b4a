// Refusals of te_grouped_gemm, on every device here: arguments that do not go together are named, and nothing is
// written.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "grouped_case.h"

namespace te {
namespace {

using testing::GroupedCase;
using testing::GroupedShape;
using testing::is_poison;

class Grouped : public ::testing::TestWithParam<int32_t> {
 protected:
  bool on_cpu() const { return GetParam() == TE_DEVICE_CPU; }
};

INSTANTIATE_TEST_SUITE_P(On, Grouped, ::testing::ValuesIn(testing::devices()), testing::device_name);

struct Bad {
  const char* what;
  const char* argument;
  std::function<void(te_grouped_gemm_problem&)> change;
};

TEST_P(Grouped, BadArgumentsAreNamedAndWriteNothing) {
  const int32_t elsewhere = on_cpu() ? 0 : TE_DEVICE_CPU;
  const GroupedShape s{{3, 0, 4}, 1, 16, 24};
  GroupedCase<bf16> c(GetParam(), TE_GROUPED_FPROP, s), back(GetParam(), TE_GROUPED_DGRAD, s);
  GroupedCase<bf16, float> wgrad(GetParam(), TE_GROUPED_WGRAD, s);
  const std::vector<uint8_t> accumulate(3, 0);
  // Changes go into copies of the lists, which live as long as the call.
  static std::vector<te_tensor> list;
  const auto nth = [](const te_tensor* tensors, int i, auto&& change) {
    list.assign(tensors, tensors + 3);
    change(list[size_t(i)]);
    return list.data();
  };
  const auto refused = [&](auto& good, const std::vector<Bad>& cases) {
    for (const Bad& bad : cases) {
      te_grouped_gemm_problem p = good.problem;
      bad.change(p);
      EXPECT_EQ(te_grouped_gemm(&p, nullptr), TE_INVALID_ARGUMENT) << bad.what;
      const std::string message = te_last_error();
      EXPECT_NE(message.find(bad.argument), std::string::npos) << bad.what << ": " << message;
      EXPECT_NE(message.find("te_grouped_gemm"), std::string::npos) << message;
    }
  };
  refused(c, {{"product", "'product'", [](auto& p) { p.product = te_grouped_product(3); }},
              {"no groups", "'groups'", [](auto& p) { p.groups = 0; }},
              {"no offsets", "'offsets'", [](auto& p) { p.offsets = nullptr; }},
              {"no weights", "'weights'", [](auto& p) { p.weights = nullptr; }},
              {"results", "'results'", [&](auto& p) { p.results = wgrad.problem.results; }},
              {"accumulate", "'accumulate'", [&](auto& p) { p.accumulate = accumulate.data(); }},
              {"depth", "'depth_rows'", [&](auto& p) { p.depth_rows = wgrad.problem.depth_rows; }},
              {"integers", "'rows'", [](auto& p) { p.rows.dtype = TE_INT32; }},
              {"2^31 rows", "'rows'", [](auto& p) { p.rows.rows = int64_t(1) << 31; }},
              {"rows of result", "'result'", [](auto& p) { p.result.rows -= 1; }},
              {"dtype of result", "'result'", [](auto& p) { p.result.dtype = TE_FLOAT16; }},
              {"device of result", "'result'", [=](auto& p) { p.result.device = elsewhere; }},
              {"inputs of a weight", "'weights[1]'",
               [=](auto& p) { p.weights = nth(p.weights, 1, [](te_tensor& t) { t.cols -= 1; }); }},
              {"dtype of a weight", "'weights[2]'",
               [=](auto& p) { p.weights = nth(p.weights, 2, [](te_tensor& t) { t.dtype = TE_FLOAT16; }); }},
              {"device of a weight", "'weights[0]'",
               [=](auto& p) { p.weights = nth(p.weights, 0, [=](te_tensor& t) { t.device = elsewhere; }); }},
              {"a NULL weight", "'weights[1]'",
               [=](auto& p) { p.weights = nth(p.weights, 1, [](te_tensor& t) { t.data = nullptr; }); }},
              {"a bias's size", "'biases[1]'",
               [=, &c](auto& p) { p.biases = nth(c.bias_tensors.data(), 1, [](te_tensor& t) { t.cols -= 1; }); }}});
  refused(back, {{"bias", "'biases'", [&](auto& p) { p.biases = c.bias_tensors.data(); }}});
  refused(wgrad, {{"weights", "'weights'", [&](auto& p) { p.weights = c.weight_tensors.data(); }},
                  {"result", "'result'", [&](auto& p) { p.result = c.y.tensor(); }},
                  {"tail", "'zero_tail'", [](auto& p) { p.zero_tail = 1; }},
                  {"no results", "'results'", [](auto& p) { p.results = nullptr; }},
                  {"rows of x", "'depth_rows'", [](auto& p) { p.depth_rows.rows -= 1; }},
                  {"dtype of x", "'depth_rows'", [](auto& p) { p.depth_rows.dtype = TE_FLOAT16; }},
                  {"shape of a result", "'results[2]'",
                   [=](auto& p) { p.results = nth(p.results, 2, [](te_tensor& t) { t.rows -= 1; }); }},
                  {"dtype of a result", "'results[0]'",
                   [=](auto& p) { p.results = nth(p.results, 0, [](te_tensor& t) { t.dtype = TE_FLOAT16; }); }}});
  for (const bf16& v : c.y.read()) EXPECT_TRUE(is_poison(v)) << "a refused call wrote";
  for (const auto& result : wgrad.results) {
    for (const float v : result->read()) EXPECT_TRUE(is_poison(v)) << "a refused call wrote";
  }
}

TEST_P(Grouped, InvalidOffsetsAreRefusedOnTheCpuAndHarmlessOnCuda) {
  const std::vector<int32_t> wrong[] = {{1, 3, 8}, {0, 5, 4}, {0, 3, 10}, {0, -1, 8}};
  for (const std::vector<int32_t>& offsets : wrong) {
    GroupedCase<bf16> c(GetParam(), TE_GROUPED_FPROP, {{4, 4}, 1, 16, 24});
    c.device_offsets.fill(offsets);
    c.problem.zero_tail = 1;
    const te_status status = te_grouped_gemm(&c.problem, nullptr);
    if (on_cpu()) {
      EXPECT_EQ(status, TE_INVALID_ARGUMENT);
      EXPECT_NE(std::string(te_last_error()).find("'offsets["), std::string::npos) << te_last_error();
    } else {
      TE_EXPECT_OK(status);
      c.y.read();
    }
    EXPECT_TRUE(c.y.padding_untouched());
  }
}

TEST_P(Grouped, WhatCudaCannotReadIsRefused) {
  if (on_cpu()) GTEST_SKIP() << "the CPU reads any alignment";
  const GroupedShape s{{3, 4}, 1, 16, 24};
  GroupedCase<bf16> c(GetParam(), TE_GROUPED_FPROP, s);
  const auto refused = [&](te_grouped_gemm_problem p, const char* argument) {
    EXPECT_EQ(te_grouped_gemm(&p, nullptr), TE_INVALID_ARGUMENT) << argument;
    EXPECT_NE(std::string(te_last_error()).find(argument), std::string::npos) << te_last_error();
  };
  te_grouped_gemm_problem p = c.problem;
  p.rows.data = static_cast<char*>(p.rows.data) + 2;
  refused(p, "'rows'");
  p = c.problem;
  p.rows.row_pitch += 1;
  refused(p, "'rows'");
  std::vector<te_tensor> weights = c.weight_tensors;
  weights[1].row_pitch += 4;
  p = c.problem;
  p.weights = weights.data();
  refused(p, "'weights[1]'");
  GroupedCase<float> floats(GetParam(), TE_GROUPED_FPROP, s);
  EXPECT_EQ(te_grouped_gemm(&floats.problem, nullptr), TE_NOT_IMPLEMENTED);
  EXPECT_NE(std::string(te_last_error()).find("m_splits as a list"), std::string::npos) << te_last_error();
}

}  // namespace
}  // namespace te
