// grouped gemm of FP8 operands through the C API, on every device here: each product against float64 per group, exact
// operands bit for bit against the header's formula, poisoned results and strangers (everything outside of groups is
// NaN), panels, empty groups, many groups, te_gemm of each group, errors.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "grouped_fp8_case.h"
#include "transformer_engine/gemm.h"

namespace te {
namespace {

using testing::Draw;
using testing::Fp8Case;
using testing::GroupedShape;
using testing::is_poison;

constexpr te_scaling kScalings[] = {TE_SCALING_BLOCK_1D, TE_SCALING_TENSOR};
constexpr te_grouped_product kRowProducts[] = {TE_GROUPED_FPROP, TE_GROUPED_DGRAD};

const GroupedShape kShapes[] = {{{1}, 0, 1, 1},
                                {{0}, 3, 16, 16},
                                {{5, 0, 3}, 0, 17, 33, 3},
                                {{0, 128, 64, 0}, 5, 144, 272},
                                {{63, 1, 65, 0, 260, 2}, 7, 130, 129, 1},
                                {{300, 9}, 40, 24, 300},
                                {{129, 0, 1, 128, 70}, 5, 136, 72, 8}};

class GroupedFp8 : public ::testing::TestWithParam<int32_t> {
 protected:
  bool on_cpu() const { return GetParam() == TE_DEVICE_CPU; }
};

INSTANTIATE_TEST_SUITE_P(On, GroupedFp8, ::testing::ValuesIn(testing::devices()), testing::device_name);

// Of the sums: on the CPU scaled values are rounded before they are multiplied, which costs a term u each. Hopper's
// tensor cores cut every term of 33 (32 products and the sum so far) off at 13 bits below the largest; four such
// instructions make a partial sum.
template <class D>
double bound_of(bool on_cpu, double want, double magnitude, int64_t terms) {
  const double cut = on_cpu ? 0 : 4 * 33 * 0x1p-13 * magnitude;
  return testing::grouped_bound<D>(want, magnitude, terms + 4) + cut * (1 + 0x1p-8);
}

template <class Left, class D>
void check_rows(Fp8Case<Left, D>& c, Draw draw, bool on_cpu, const std::string& name) {
  int64_t wrong = 0;
  testing::for_rows(c, [&](D got, int32_t g, int64_t i, int64_t col) {
    if (g < 0) {
      const D zero{};
      wrong += c.problem.zero_tail ? std::memcmp(&got, &zero, sizeof(D)) != 0 : !is_poison(got);
      return;
    }
    auto sum = c.sum(g, i, col);
    const double bias = c.bias_values.empty() ? 0 : c.bias_values[size_t(g)][size_t(col)];
    if (draw == Draw::kExact) {
      const D want = from_float<D>(sum.formula + float(bias));
      wrong += std::memcmp(&got, &want, sizeof(D)) != 0;
    }
    const double bound = bound_of<D>(on_cpu, sum.value + bias, sum.magnitude + std::fabs(bias), c.depth() + 1);
    wrong += !(std::fabs(to_float(got) - sum.value - bias) <= bound);
  });
  EXPECT_EQ(wrong, 0) << name;
  EXPECT_TRUE(c.result->padding_untouched()) << name;
}

template <class Left, class D>
void check_weights(Fp8Case<Left, D>& c, int32_t g, bool added, Draw draw, bool on_cpu, const std::string& name) {
  const std::vector<D> got = c.results[size_t(g)]->read();
  int64_t wrong = 0;
  for (int64_t n = 0; n < c.shape.n; ++n) {
    for (int64_t k = 0; k < c.shape.k; ++k) {
      const size_t at = size_t(n * c.shape.k + k);
      const auto sum = c.sum(g, n, k);
      const double old = added ? c.old_values[size_t(g)][at] : 0;
      if (draw == Draw::kExact) {
        const D want = from_float<D>(sum.formula + float(old));
        wrong += std::memcmp(&got[at], &want, sizeof(D)) != 0;
      }
      const double bound =
          bound_of<D>(on_cpu, sum.value + old, sum.magnitude + std::fabs(old), c.shape.splits[size_t(g)] + 1);
      wrong += !(std::fabs(to_float(got[at]) - sum.value - old) <= bound);
    }
  }
  EXPECT_EQ(wrong, 0) << name << " group " << g;
  EXPECT_TRUE(c.results[size_t(g)]->padding_untouched()) << name << " group " << g;
}

template <class Left, class D>
void row_products(int32_t device) {
  for (const te_scaling scaling : kScalings) {
    for (const te_grouped_product product : kRowProducts) {
      for (const GroupedShape& s : kShapes) {
        for (const Draw draw : {Draw::kExact, Draw::kAny}) {
          Fp8Case<Left, D> c(device, product, scaling, s, draw);
          if (product == TE_GROUPED_FPROP && draw == Draw::kExact) c.with_bias();
          c.problem.zero_tail = draw == Draw::kExact;
          TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
          check_rows(c, draw, device == TE_DEVICE_CPU, name_of(s, product) + testing::scaling_name(scaling));
        }
      }
    }
  }
}

TEST_P(GroupedFp8, RowProducts) {
  row_products<e4m3, bf16>(GetParam());
  row_products<e5m2, fp16>(GetParam());
  row_products<e4m3, float>(GetParam());
}

template <class Left, class D>
void weight_gradients(int32_t device) {
  for (const te_scaling scaling : kScalings) {
    for (const GroupedShape& s : kShapes) {
      for (const Draw draw : {Draw::kExact, Draw::kAny}) {
        Fp8Case<Left, D> c(device, TE_GROUPED_WGRAD, scaling, s, draw);
        c.fill_results();
        std::vector<uint8_t> accumulate(size_t(s.groups()), 0);
        for (int32_t g = 0; g < s.groups(); g += 2) accumulate[size_t(g)] = 1;
        c.problem.accumulate = accumulate.data();
        const int32_t unwanted = s.groups() > 2 ? 1 : -1;
        if (unwanted >= 0) c.result_tensors[size_t(unwanted)].data = nullptr;
        TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
        const std::string name = name_of(s, TE_GROUPED_WGRAD) + testing::scaling_name(scaling);
        for (int32_t g = 0; g < s.groups(); ++g) {
          if (g != unwanted) check_weights(c, g, g % 2 == 0, draw, device == TE_DEVICE_CPU, name);
        }
        if (unwanted < 0) continue;
        EXPECT_EQ(testing::widened(c.results[1]->read()), c.old_values[1]) << name;
      }
    }
  }
}

TEST_P(GroupedFp8, WeightGradients) {
  weight_gradients<e4m3, float>(GetParam());
  weight_gradients<e5m2, bf16>(GetParam());
}

TEST_P(GroupedFp8, WeightGradientsOfTwoDtypesInOneCall) {
  const GroupedShape s{{65, 3, 140}, 0, 24, 40};
  Fp8Case<e4m3, float> floats(GetParam(), TE_GROUPED_WGRAD, TE_SCALING_BLOCK_1D, s, Draw::kExact);
  Fp8Case<e4m3, bf16> halves(GetParam(), TE_GROUPED_WGRAD, TE_SCALING_BLOCK_1D, s, Draw::kExact);
  floats.result_tensors[1] = halves.result_tensors[1];
  TE_ASSERT_OK(te_grouped_gemm(&floats.problem, nullptr));
  for (const int32_t g : {0, 2}) check_weights(floats, g, false, Draw::kExact, on_cpu(), "float32");
  check_weights(halves, 1, false, Draw::kExact, on_cpu(), "bfloat16");
  for (const float v : floats.results[1]->read()) ASSERT_TRUE(is_poison(v));
}

TEST_P(GroupedFp8, MoreGroupsThanOneLaunchTakes) {
  GroupedShape s{{}, 9, 40, 136};
  for (int32_t g = 0; g < 500; ++g) s.splits.push_back(g % 7 == 0 ? 0 : g == 300 ? 150 : g % 5);
  for (const te_scaling scaling : kScalings) {
    Fp8Case<e4m3, bf16> fprop(GetParam(), TE_GROUPED_FPROP, scaling, s, Draw::kExact);
    fprop.problem.zero_tail = 1;
    TE_ASSERT_OK(te_grouped_gemm(&fprop.problem, nullptr));
    check_rows(fprop, Draw::kExact, on_cpu(), "500 groups");
    for (const bool add : {false, true}) {
      Fp8Case<e4m3, float> wgrad(GetParam(), TE_GROUPED_WGRAD, scaling, s, Draw::kExact);
      wgrad.fill_results();
      const std::vector<uint8_t> accumulate(size_t(s.groups()), add);
      wgrad.problem.accumulate = accumulate.data();
      TE_ASSERT_OK(te_grouped_gemm(&wgrad.problem, nullptr));
      for (int32_t g = 0; g < s.groups(); ++g) check_weights(wgrad, g, add, Draw::kExact, on_cpu(), "500 groups");
    }
  }
}

TEST_P(GroupedFp8, NothingToReduce) {
  for (const te_scaling scaling : kScalings) {
    Fp8Case<e4m3, bf16> fprop(GetParam(), TE_GROUPED_FPROP, scaling, {{3, 0, 2}, 2, 9, 0}, Draw::kExact);
    fprop.with_bias();
    TE_ASSERT_OK(te_grouped_gemm(&fprop.problem, nullptr));
    check_rows(fprop, Draw::kExact, on_cpu(), "K = 0");
    Fp8Case<e4m3, float> wgrad(GetParam(), TE_GROUPED_WGRAD, scaling, {{0, 0}, 0, 9, 5}, Draw::kExact);
    TE_ASSERT_OK(te_grouped_gemm(&wgrad.problem, nullptr));
    for (const int32_t g : {0, 1}) check_weights(wgrad, g, false, Draw::kExact, on_cpu(), "no rows");
    for (const GroupedShape& s : {GroupedShape{{4, 1}, 0, 0, 5}, GroupedShape{{4}, 0, 5, 0}}) {
      Fp8Case<e4m3, float> none(GetParam(), TE_GROUPED_WGRAD, scaling, s, Draw::kExact);
      TE_EXPECT_OK(te_grouped_gemm(&none.problem, nullptr));
    }
    for (const GroupedShape& s : {GroupedShape{{0, 0}, 0, 9, 5}, GroupedShape{{4, 1}, 0, 0, 5}}) {
      Fp8Case<e4m3, bf16> none(GetParam(), TE_GROUPED_FPROP, scaling, s, Draw::kExact);
      TE_EXPECT_OK(te_grouped_gemm(&none.problem, nullptr));
    }
  }
}

// More rows than blocks after the groups, and pieces of 16 bytes that no power of two divides.
TEST_P(GroupedFp8, LongTails) {
  for (const te_grouped_product product : kRowProducts) {
    for (const GroupedShape& s : {GroupedShape{{3, 0, 130}, 700, 1096, 1096, 8}, GroupedShape{{0}, 300, 8, 8}}) {
      Fp8Case<e4m3, bf16> c(GetParam(), product, TE_SCALING_BLOCK_1D, s, Draw::kExact);
      c.problem.zero_tail = 1;
      TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
      check_rows(c, Draw::kExact, on_cpu(), name_of(s, product));
    }
  }
}

// Adding zeros keeps the bits of subnormal and infinite values, with few rows and with many; NaN stays NaN.
TEST_P(GroupedFp8, AddedZerosKeepOldValues) {
  const GroupedShape s{{1100, 0, 129}, 0, 136, 72, 8};
  const float specials[] = {1e-45f, -3e-39f, 1.17e-38f, INFINITY, -INFINITY, NAN, 1.f};
  std::vector<float> old(size_t(s.n * s.k));
  for (size_t i = 0; i < old.size(); ++i) old[i] = specials[i % 7];
  for (const te_scaling scaling : kScalings) {
    Fp8Case<e4m3, float> c(GetParam(), TE_GROUPED_WGRAD, scaling, s, Draw::kExact);
    for (auto& result : c.results) result->fill(old);
    const std::vector<uint8_t> accumulate(3, 1);
    c.problem.accumulate = accumulate.data();
    const te_tensor& scales = c.problem.rows_scale_inv;
    testing::Buffer<float> zeros(GetParam(), scales.rows, scales.cols);
    zeros.fill(std::vector<float>(size_t(scales.rows * scales.cols), 0.f));
    c.problem.rows_scale_inv = zeros.tensor();
    for (int i = 0; i < 2; ++i) TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
    for (const auto& result : c.results) {
      const std::vector<float> got = result->read();
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(std::isnan(old[i]) ? std::isnan(got[i]) : got[i] == old[i]) << old[i] << " became " << got[i];
      }
    }
  }
}

TEST_P(GroupedFp8, NoOutputIsWanted) {
  Fp8Case<e4m3, float> c(GetParam(), TE_GROUPED_WGRAD, TE_SCALING_BLOCK_1D, {{3, 4}, 0, 9, 5}, Draw::kExact);
  for (te_tensor& t : c.result_tensors) t.data = nullptr;
  TE_EXPECT_OK(te_grouped_gemm(&c.problem, nullptr));
}

// One group that is all rows: te_gemm takes the very tensors.
TEST_P(GroupedFp8, CpuGroupsAreProductsOfTeGemm) {
  if (!on_cpu()) GTEST_SKIP() << "cuBLASLt may split the reduction";
  const GroupedShape s{{64}, 0, 144, 272};
  for (const te_scaling scaling : kScalings) {
    for (const te_grouped_product product : {TE_GROUPED_FPROP, TE_GROUPED_DGRAD, TE_GROUPED_WGRAD}) {
      Fp8Case<e5m2, float> c(TE_DEVICE_CPU, product, scaling, s, Draw::kAny);
      const bool wgrad = product == TE_GROUPED_WGRAD, blocks = scaling == TE_SCALING_BLOCK_1D;
      te_gemm_problem one{};
      one.layout = TE_GEMM_TN;
      one.a = wgrad ? c.problem.depth_rows : c.weight_tensors[0];
      one.b = c.problem.rows;
      one.a_scale_inv = wgrad ? c.problem.depth_rows_scale_inv : c.scale_tensors[0];
      one.b_scale_inv = c.problem.rows_scale_inv;
      one.b_scaling = scaling;
      one.a_scaling = wgrad || !blocks ? scaling : TE_SCALING_BLOCK_2D;
      if (wgrad) {  // of the one panel
        for (te_tensor* t : {&one.a, &one.b}) t->rows /= c.panels(), t->cols = 64;
        if (blocks) one.a_scale_inv.rows = one.b_scale_inv.rows = 1;
      }
      testing::Buffer<float> d(TE_DEVICE_CPU, one.b.rows, one.a.rows);
      one.d = d.tensor();
      TE_ASSERT_OK(te_gemm(&one, nullptr, 0, nullptr));
      TE_ASSERT_OK(te_grouped_gemm(&c.problem, nullptr));
      EXPECT_TRUE(testing::same((wgrad ? c.results[0] : c.result)->read(), d.read())) << name_of(s, product);
    }
  }
}

template <class Case>
void refused(const Case& good, const char* argument, const std::function<void(te_grouped_gemm_problem&)>& change,
             te_status status = TE_INVALID_ARGUMENT) {
  te_grouped_gemm_problem p = good.problem;
  change(p);
  EXPECT_EQ(te_grouped_gemm(&p, nullptr), status) << argument;
  const std::string message = te_last_error();
  EXPECT_NE(message.find(argument), std::string::npos) << argument << ": " << message;
}

TEST_P(GroupedFp8, BadArgumentsAreNamedAndWriteNothing) {
  const int32_t elsewhere = on_cpu() ? 0 : TE_DEVICE_CPU;
  const GroupedShape s{{3, 0, 130}, 1, 144, 272};
  for (const te_scaling scaling : kScalings) {
    Fp8Case<e4m3, bf16> c(GetParam(), TE_GROUPED_FPROP, scaling, s, Draw::kExact);
    c.with_bias();
    std::vector<te_tensor> list;
    const auto second = [&](const te_tensor* tensors, auto&& change) {
      list.assign(tensors, tensors + 3);
      change(list[1]);
      return list.data();
    };
    const auto weight = [&](auto&& change) {
      return [&, change](te_grouped_gemm_problem& p) { p.weights = second(p.weights, change); };
    };
    const auto scale = [&](auto&& change) {
      return [&, change](te_grouped_gemm_problem& p) { p.weights_scale_inv = second(p.weights_scale_inv, change); };
    };
    refused(c, "'scaling'", [](auto& p) { p.scaling = TE_SCALING_BLOCK_2D; });
    refused(c, "'weights_scale_inv'", [](auto& p) { p.weights_scale_inv = nullptr; });
    refused(c, "'depth_rows_scale_inv'", [](auto& p) { p.depth_rows_scale_inv = p.rows_scale_inv; });
    refused(c, "'rows_scale_inv'", [](auto& p) { p.rows_scale_inv.rows += 1; });
    refused(c, "'rows_scale_inv'", [](auto& p) { p.rows_scale_inv.cols = 1; });
    refused(c, "'rows_scale_inv'", [](auto& p) { p.rows_scale_inv.dtype = TE_INT32; });
    refused(c, "'rows_scale_inv'", [=](auto& p) { p.rows_scale_inv.device = elsewhere; });
    refused(c, "'rows_scale_inv'", [](auto& p) { p.rows_scale_inv.data = nullptr; });
    refused(c, "'result'", [](auto& p) { p.result.dtype = TE_INT32; });
    refused(c, "'result'", [](auto& p) { p.result.rows -= 1; });
    refused(c, "'result'", [=](auto& p) { p.result.device = elsewhere; });
    refused(c, "'weights[1]'", weight([](te_tensor& t) { t.cols -= 1; }));
    refused(c, "'weights[1]'", weight([](te_tensor& t) { t.dtype = TE_BFLOAT16; }));
    refused(c, "'weights[1]'", weight([=](te_tensor& t) { t.device = elsewhere; }));
    refused(c, "weights[1]", weight([](te_tensor& t) { t.dtype = TE_FLOAT8_E5M2; }), TE_NOT_IMPLEMENTED);
    refused(c, "'weights_scale_inv[1]'", scale([](te_tensor& t) { t.rows += 1; }));
    refused(c, "'weights_scale_inv[1]'", scale([](te_tensor& t) { t.dtype = TE_FLOAT16; }));
    refused(c, "'weights_scale_inv[1]'", scale([=](te_tensor& t) { t.device = elsewhere; }));
    refused(c, "'biases[1]'",
            [&](auto& p) { p.biases = second(p.biases, [](te_tensor& t) { t.dtype = TE_FLOAT16; }); });
    for (const bf16 v : c.result->read()) ASSERT_TRUE(is_poison(v)) << "a refused call wrote";

    Fp8Case<e4m3, float> w(GetParam(), TE_GROUPED_WGRAD, scaling, s, Draw::kExact);
    refused(w, "'weights_scale_inv'", [&](auto& p) { p.weights_scale_inv = c.scale_tensors.data(); });
    refused(w, "'rows'", [](auto& p) { p.rows.rows -= 1; });
    refused(w, "'rows'", [](auto& p) { p.rows.cols -= 1; });
    refused(w, "'depth_rows'", [](auto& p) { p.depth_rows.rows -= p.depth_rows.rows / 5; });
    refused(w, "'depth_rows'", [](auto& p) { p.depth_rows.dtype = TE_FLOAT16; });
    refused(
        w, "depth_rows", [](auto& p) { p.depth_rows.dtype = TE_FLOAT8_E5M2; }, TE_NOT_IMPLEMENTED);
    refused(w, "'rows_scale_inv'", [](auto& p) { p.rows_scale_inv.cols -= 1; });
    refused(w, "'depth_rows_scale_inv'", [](auto& p) { p.depth_rows_scale_inv.cols -= 1; });
    refused(w, "'results[1]'", [&](auto& p) { p.results = second(p.results, [](te_tensor& t) { t.rows -= 1; }); });
    refused(w, "'results[1]'",
            [&](auto& p) { p.results = second(p.results, [](te_tensor& t) { t.dtype = TE_FLOAT8_E4M3; }); });
    for (const float v : w.results[0]->read()) ASSERT_TRUE(is_poison(v)) << "a refused call wrote";
  }
}

TEST_P(GroupedFp8, OthersHaveNoScales) {
  const GroupedShape s{{3, 4}, 0, 16, 24};
  testing::GroupedCase<bf16> c(GetParam(), TE_GROUPED_FPROP, s);
  refused(c, "'scaling'", [](auto& p) { p.scaling = TE_SCALING_BLOCK_1D; });
  refused(c, "'rows_scale_inv'", [](auto& p) { p.rows_scale_inv = p.rows; });
  refused(c, "'depth_rows_scale_inv'", [](auto& p) { p.depth_rows_scale_inv = p.rows; });
  refused(c, "'weights_scale_inv'", [](auto& p) { p.weights_scale_inv = p.weights; });
}

TEST_P(GroupedFp8, InvalidOffsetsAreRefusedOnTheCpuAndHarmlessOnCuda) {
  const GroupedShape s{{4, 4}, 1, 16, 24};
  const std::vector<int32_t> wrong[] = {{1, 3, 8}, {0, 5, 4}, {0, 3, 1 << 30}, {0, -1, 8}};
  for (const std::vector<int32_t>& offsets : wrong) {
    Fp8Case<e4m3, float> rows(GetParam(), TE_GROUPED_FPROP, TE_SCALING_BLOCK_1D, s, Draw::kExact);
    Fp8Case<e4m3, float> wgrad(GetParam(), TE_GROUPED_WGRAD, TE_SCALING_BLOCK_1D, s, Draw::kExact);
    const auto run = [&](auto& c) {
      c.device_offsets->fill(offsets);
      const te_status status = te_grouped_gemm(&c.problem, nullptr);
      EXPECT_EQ(status, on_cpu() ? TE_INVALID_ARGUMENT : TE_SUCCESS);
      if (status == TE_SUCCESS) return;
      EXPECT_NE(std::string(te_last_error()).find("'offsets"), std::string::npos) << te_last_error();
    };
    run(rows);
    run(wgrad);
    EXPECT_TRUE(rows.result->padding_untouched() && wgrad.results[0]->padding_untouched());
  }
  if (!on_cpu()) return;
  Fp8Case<e4m3, float> c(TE_DEVICE_CPU, TE_GROUPED_WGRAD, TE_SCALING_TENSOR, s, Draw::kExact);
  c.device_offsets->fill({0, 300, 512});  // 5 panels of 4
  refused(c, "'offsets'", [](auto&) {});
}

}  // namespace
}  // namespace te
