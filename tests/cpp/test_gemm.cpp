// gemm through the C API, on every device here: layouts, dtypes, epilogues and accumulation against float64, poisoned
// outputs, pitches, empty extents, repeatability, errors.
#include "transformer_engine/gemm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gemm_case.h"

namespace te {
namespace {

using namespace testing;

class Gemm : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, Gemm, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(Gemm, PlainProductAndBias) {
  for (const bool with_bias : {false, true}) {
    for_problems(GetParam(), [&](auto& p, const std::string& name) {
      using D = ElementOf<decltype(p.d)>;
      const std::vector<D> bias = draw<D>(p.shape.cols, 3);
      if (with_bias) {
        p.bias.fill(bias);
        p.problem.bias = p.bias.tensor();
        p.problem.epilogue = TE_GEMM_BIAS;
      }
      TE_ASSERT_OK(p.run());
      const std::vector<double> d = testing::widened(p.d.read());
      for (size_t i = 0; i < d.size(); ++i) {
        const double add = with_bias ? to_float(bias[i % size_t(p.shape.cols)]) : 0;
        const double error = p.sum_error(i, add, 1) + (with_bias ? p.first_rounding(p.product[i]) : 0);
        ASSERT_NO_FATAL_FAILURE(expect_near<D>(d[i], p.product[i] + add, error, name));
      }
    });
  }
}

TEST_P(Gemm, AccumulateAdds) {
  for_problems(GetParam(), [&](auto& p, const std::string& name) {
    using D = ElementOf<decltype(p.d)>;
    const std::vector<D> before = draw<D>(p.shape.rows * p.shape.cols, 4);
    p.d.fill(before);
    p.problem.accumulate = 1;
    TE_ASSERT_OK(p.run());
    const std::vector<double> d = testing::widened(p.d.read());
    for (size_t i = 0; i < d.size(); ++i) {
      const double add = to_float(before[i]);
      const double error = p.sum_error(i, add, 2) + p.first_rounding(p.product[i]);
      ASSERT_NO_FATAL_FAILURE(expect_near<D>(d[i], p.product[i] + add, error, name));
    }
  });
}

struct ValueAndSlope {
  double value, slope;
};

ValueAndSlope gelu(double x) {
  const double c = std::sqrt(2 / std::acos(-1.0));
  const double t = std::tanh(c * (x + 0.044715 * x * x * x));
  return {0.5 * x * (1 + t), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)};
}

// gelu and its slope are made of a tanh within 4u, or on CUDA, where the fast instruction may be used, within 2^-11 of
// itself (the PTX ISA's bound for tanh.approx): value = x/2 (1 + t), slope = (1 + t)/2 + x/2 (1 - t^2) du.
double tanh_error(int32_t device) { return device == TE_DEVICE_CPU ? 4 * kU : 0x1p-11; }

TEST_P(Gemm, GeluKeepsThePreActivation) {
  for (const bool with_bias : {false, true}) {
    for_problems(GetParam(), [&](auto& p, const std::string& name) {
      using D = ElementOf<decltype(p.d)>;
      const std::vector<D> bias = draw<D>(p.shape.cols, 5);
      p.bias.fill(bias);
      if (with_bias) p.problem.bias = p.bias.tensor();
      p.problem.aux = p.aux.tensor();
      p.problem.epilogue = TE_GEMM_GELU;
      const te_status status = p.run();
      if (p.refused(status)) return;
      TE_ASSERT_OK(status);
      const std::vector<double> d = testing::widened(p.d.read()), aux = testing::widened(p.aux.read());
      for (size_t i = 0; i < d.size(); ++i) {
        const double add = with_bias ? to_float(bias[i % size_t(p.shape.cols)]) : 0;
        const double pre = p.product[i] + add;
        double error = p.sum_error(i, add, 1) + p.first_rounding(p.product[i]);
        ASSERT_NO_FATAL_FAILURE(expect_near<D>(aux[i], pre, error, name + " aux"));
        error += p.first_rounding(pre);  // gelu may be taken of what aux holds
        const ValueAndSlope want = gelu(pre);
        const double own = std::fabs(pre) * (tanh_error(GetParam()) / 2 + 4 * kU);
        // |gelu''| < 1
        ASSERT_NO_FATAL_FAILURE(expect_near<D>(d[i], want.value, error * (std::fabs(want.slope) + error) + own, name));
      }
      EXPECT_TRUE(p.aux.padding_untouched()) << name;
    });
  }
}

TEST_P(Gemm, DgeluScalesByTheSlope) {
  for_problems(GetParam(), [&](auto& p, const std::string& name) {
    using D = ElementOf<decltype(p.d)>;
    const std::vector<D> aux = draw<D>(p.shape.rows * p.shape.cols, 6);
    p.aux.fill(aux);
    p.problem.aux = p.aux.tensor();
    p.problem.epilogue = TE_GEMM_DGELU;
    const te_status status = p.run();
    if (p.refused(status)) return;
    TE_ASSERT_OK(status);
    const std::vector<double> d = testing::widened(p.d.read());
    for (size_t i = 0; i < d.size(); ++i) {
      const double x = to_float(aux[i]), slope = gelu(x).slope;
      const double slope_error = (tanh_error(GetParam()) + 8 * kU) * (1 + std::fabs(x) * 0.8 * (1 + 0.135 * x * x));
      const double before = p.sum_error(i) + p.first_rounding(p.product[i]);
      const double error = before * (std::fabs(slope) + slope_error) + std::fabs(p.product[i]) * slope_error;
      ASSERT_NO_FATAL_FAILURE(expect_near<D>(d[i], p.product[i] * slope, error, name));
    }
  });
}

TEST_P(Gemm, BiasGradientSumsTheRowsOfB) {
  for_problems(GetParam(), [&](auto& p, const std::string& name) {
    using D = ElementOf<decltype(p.d)>;
    if (p.problem.layout != TE_GEMM_NT) return;
    p.problem.bias = p.sums.tensor();
    p.problem.epilogue = TE_GEMM_BGRAD;
    const te_status status = p.run();
    if (p.refused(status)) return;
    TE_ASSERT_OK(status);
    const std::vector<double> d = testing::widened(p.d.read()), sums = testing::widened(p.sums.read());
    for (size_t i = 0; i < d.size(); ++i) {
      ASSERT_NO_FATAL_FAILURE(expect_near<D>(d[i], p.product[i], p.sum_error(i), name));
    }
    for (int64_t row = 0; row < p.shape.rows; ++row) {
      double sum = 0, magnitude = 0;
      for (int64_t k = 0; k < p.shape.depth; ++k) {
        sum += p.b_at(row, k);
        magnitude += std::fabs(p.b_at(row, k));
      }
      const double error = double(2 * p.shape.depth) * kU * magnitude;
      ASSERT_NO_FATAL_FAILURE(expect_near<D>(sums[size_t(row)], sum, error, name + " bias gradient"));
    }
    EXPECT_TRUE(p.sums.padding_untouched()) << name;
  });
}

TEST_P(Gemm, EmptyExtents) {
  for (const te_gemm_layout layout : kLayouts) {
    for (const Shape& s : {Shape{0, 8, 16, 0}, Shape{8, 0, 16, 0}, Shape{8, 16, 0, 0}, Shape{5, 7, 0, 3}}) {
      Problem<bf16, bf16> p(GetParam(), layout, s);
      TE_ASSERT_OK(p.run());
      for (const double v : testing::widened(p.d.read())) EXPECT_EQ(v, 0) << name_of(layout, s);
      const std::vector<bf16> ones(size_t(s.rows * s.cols), from_float<bf16>(1.f));
      p.d.fill(ones);
      p.problem.accumulate = 1;
      TE_ASSERT_OK(p.run());
      for (const double v : testing::widened(p.d.read())) EXPECT_EQ(v, 1) << name_of(layout, s);
      EXPECT_TRUE(p.d.padding_untouched());
    }
  }
}

TEST_P(Gemm, RepeatsItsBits) {
  for (const te_gemm_layout layout : kLayouts) {
    const Shape s{72, 88, 2000, 0};
    Problem<bf16, float> p(GetParam(), layout, s), twin(GetParam(), layout, s);
    TE_ASSERT_OK(p.run());
    TE_ASSERT_OK(twin.run());
    const std::vector<float> first = p.d.read();
    EXPECT_EQ(twin.d.read(), first);
    p.d.poison();
    TE_ASSERT_OK(p.run());
    EXPECT_EQ(p.d.read(), first);
  }
}

// Runs of a product's rows, by the full product's algorithm. Mutant: takes_runs() that returns 1 for a split reduction.
TEST_P(Gemm, RunsHaveTheBitsOfTheWhole) {
  for (const te_gemm_layout layout : {TE_GEMM_TN, TE_GEMM_NN}) {
    for (const Shape& s : {Shape{256, 136, 520, 0}, Shape{48, 64, 4096, 8}}) {
      Problem<bf16, bf16> p(GetParam(), layout, s);
      TE_ASSERT_OK(p.run());
      const std::vector<bf16> whole = p.d.read();
      int32_t does = -1;
      TE_ASSERT_OK(te_gemm_takes_runs(&p.problem, &does, nullptr));
      EXPECT_TRUE(does == 1 || (does == 0 && GetParam() != TE_DEVICE_CPU)) << does;
      if (does != 1) continue;
      p.d.poison();
      const te_gemm_problem all = p.problem;
      for (int64_t first = 0; first < s.rows; first += 16 * (1 + first / 16)) {
        const int64_t count = std::min(s.rows - first, 16 * (1 + first / 16));
        p.problem = all;
        p.problem.whole_rows = s.rows;
        for (te_tensor* t : {&p.problem.b, &p.problem.d}) {
          t->data = static_cast<bf16*>(t->data) + first * t->row_pitch;
          t->rows = count;
        }
        TE_ASSERT_OK(p.run());
      }
      EXPECT_EQ(testing::widened(p.d.read()), testing::widened(whole)) << name_of(layout, s);
    }
  }
}

struct Bad {
  const char* what;
  const char* argument;
  std::function<void(te_gemm_problem&)> change;
};

TEST_P(Gemm, BadArgumentsAreNamedAndWriteNothing) {
  const int32_t elsewhere = GetParam() == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU;
  Problem<float, float> p(GetParam(), TE_GEMM_NT, {8, 16, 24, 0});
  const te_tensor aux = p.aux.tensor(), bias = p.bias.tensor();
  const Bad cases[] = {
      {"depth", "'b'", [](auto& q) { q.b.rows -= 1; }},
      {"rows of d", "'d'", [](auto& q) { q.d.rows -= 1; }},
      {"columns of d", "'d'", [](auto& q) { q.d.cols -= 1; }},
      {"layout", "'layout'", [](auto& q) { q.layout = te_gemm_layout(3); }},
      {"epilogue", "'epilogue'", [](auto& q) { q.epilogue = te_gemm_epilogue(9); }},
      {"dtype mix", "'b'", [](auto& q) { q.b.dtype = TE_FLOAT16; }},
      {"dtype of d", "'d'", [](auto& q) { q.a.dtype = q.b.dtype = TE_FLOAT16, q.d.dtype = TE_BFLOAT16; }},
      {"integers", "'a'", [](auto& q) { q.a.dtype = q.b.dtype = TE_INT32; }},
      {"device of b", "'b'", [=](auto& q) { q.b.device = elsewhere; }},
      {"device of d", "'d'", [=](auto& q) { q.d.device = elsewhere; }},
      {"NULL a", "'a'", [](auto& q) { q.a.data = nullptr; }},
      {"pitch of b", "'b'", [](auto& q) { q.b.row_pitch = 1; }},
      {"no bias", "'bias'", [](auto& q) { q.epilogue = TE_GEMM_BIAS; }},
      {"bias of another size", "'bias'", [=](auto& q) { q.epilogue = TE_GEMM_BIAS, q.bias = bias, q.bias.cols -= 1; }},
      {"unused bias", "'bias'", [=](auto& q) { q.bias = bias; }},
      {"no aux", "'aux'", [](auto& q) { q.epilogue = TE_GEMM_DGELU; }},
      {"aux of another dtype", "'aux'",
       [=](auto& q) { q.epilogue = TE_GEMM_GELU, q.aux = aux, q.aux.dtype = TE_BFLOAT16; }},
      {"unused aux", "'aux'", [=](auto& q) { q.aux = aux; }},
      {"runs of a sum over rows", "'whole_rows'", [](auto& q) { q.whole_rows = 8; }},
      {"more rows than the whole", "'whole_rows'",
       [](auto& q) {
         q.layout = TE_GEMM_NN, q.whole_rows = 7;
         q.b = {q.b.data, 8, 24, 24, q.b.dtype, q.b.device};
       }},
      {"bgrad of no gradient", "'epilogue'",
       [=](auto& q) {
         q.epilogue = TE_GEMM_BGRAD, q.layout = TE_GEMM_NN, q.bias = bias;
         q.b = {q.b.data, 8, 24, 24, q.b.dtype, q.b.device};
         q.bias.cols = 8;
       }},
      {"accumulated gelu", "'accumulate'", [=](auto& q) { q.epilogue = TE_GEMM_GELU, q.aux = aux, q.accumulate = 1; }},
  };
  for (const Bad& bad : cases) {
    const te_gemm_problem good = p.problem;
    bad.change(p.problem);
    EXPECT_EQ(p.run(), TE_INVALID_ARGUMENT) << bad.what;
    EXPECT_EQ(te_gemm(&p.problem, nullptr, 0, nullptr), TE_INVALID_ARGUMENT) << bad.what;
    const std::string message = te_last_error();
    EXPECT_NE(message.find(bad.argument), std::string::npos) << bad.what << ": " << message;
    EXPECT_NE(message.find("te_gemm"), std::string::npos) << message;
    p.problem = good;
  }
  for (const float v : p.d.read()) EXPECT_TRUE(std::isnan(v)) << "a refused call wrote";
  TE_EXPECT_OK(p.run());
}

// ---- the choice of an algorithm ----

std::vector<te_gemm_choice> candidates_of(const te_gemm_key& key, int32_t most) {
  std::vector<te_gemm_choice> choices(static_cast<size_t>(most));
  int32_t found = 0;
  TE_EXPECT_OK(te_gemm_candidates(&key, most, choices.data(), &found));
  choices.resize(size_t(found));
  return choices;
}

TEST_P(Gemm, EveryCandidateIsRightAndRepeatsItsBits) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "cuBLASLt's algorithms are on CUDA";
  for (const te_gemm_layout layout : kLayouts) {
    const Shape s{72, 88, 2000, 0};
    Problem<bf16, float> p(GetParam(), layout, s);
    TE_ASSERT_OK(p.run());
    const std::vector<float> by_default = p.d.read();
    te_gemm_key key;
    TE_ASSERT_OK(te_gemm_key_of(&p.problem, &key));
    const std::vector<te_gemm_choice> choices = candidates_of(key, 64);
    ASSERT_FALSE(choices.empty());
    for (size_t i = 0; i < choices.size(); ++i) {
      TE_ASSERT_OK(te_gemm_choose(&key, &choices[i], 1));
      p.d.poison();
      TE_ASSERT_OK(p.run());
      const std::vector<float> got = p.d.read();
      if (i == 0) {
        EXPECT_EQ(got, by_default) << "the first candidate is not the one that runs by_default";
      }
      for (size_t j = 0; j < got.size(); ++j) ASSERT_NEAR(got[j], p.product[j], p.sum_error(j)) << "candidate " << i;
      p.d.poison();
      const Buffer<uint8_t> workspace(GetParam(), 1, int64_t(choices[i].workspace_bytes));
      const te_gemm_operands operands{p.a.data(), p.b.data(), p.d.data(), nullptr, nullptr, nullptr, nullptr};
      TE_ASSERT_OK(te_gemm_try(&key, &choices[i], &operands, 2, workspace.data(), choices[i].workspace_bytes, nullptr));
      EXPECT_EQ(p.d.read(), got) << "candidate " << i << " in " << name_of(layout, s);
    }
    TE_ASSERT_OK(te_gemm_forget_choices());
    p.d.poison();
    TE_ASSERT_OK(p.run());
    EXPECT_EQ(p.d.read(), by_default);
  }
}

TEST_P(Gemm, WrongChoicesAreNamedAndChangeNothing) {
  Problem<bf16, bf16> p(GetParam(), TE_GEMM_TN, {16, 24, 40, 0});
  te_gemm_key key{};
  int32_t found = 0;
  te_gemm_choice choice{};
  const auto refused = [](te_status status, const char* words) {
    EXPECT_EQ(status, TE_INVALID_ARGUMENT) << words;
    EXPECT_NE(std::string(te_last_error()).find(words), std::string::npos) << te_last_error();
  };
  if (GetParam() == TE_DEVICE_CPU) {
    refused(te_gemm_key_of(&p.problem, &key), "the CPU");
    key.device = TE_DEVICE_CPU;
    refused(te_gemm_candidates(&key, 1, &choice, &found), "the CPU");
    refused(te_gemm_choose(&key, &choice, 1), "the CPU");
    refused(te_gemm_try(&key, &choice, nullptr, 1, nullptr, 0, nullptr), "the CPU");
    return;
  }
  TE_ASSERT_OK(te_gemm_key_of(&p.problem, &key));
  TE_ASSERT_OK(te_gemm_candidates(&key, 1, &choice, &found));
  refused(te_gemm_candidates(&key, 0, &choice, &found), "'most'");
  te_gemm_key keys[2] = {key, key};
  te_gemm_choice choices[2] = {choice, choice};
  std::fill(std::begin(choices[1].algorithm), std::end(choices[1].algorithm), ~uint64_t(0));
  refused(te_gemm_choose(keys, choices, 2), "'choice'");
  keys[1].a_alignment = 3;
  refused(te_gemm_choose(keys, choices, 2), "'key'");
  keys[1] = key;
  keys[1].tf32 = 1;  // of bfloat16 operands
  refused(te_gemm_choose(keys, choices, 2), "'key'");
  keys[1].device = 99;
  refused(te_gemm_choose(keys, choices, 2), "'keys'");
  const te_gemm_operands askew{p.a.data() + 1, p.b.data(), p.d.data(), nullptr, nullptr, nullptr, nullptr};
  refused(te_gemm_try(&key, &choice, &askew, 1, nullptr, 0, nullptr), "'operands'");
  Problem<bf16, bf16> nothing(GetParam(), TE_GEMM_TN, {0, 24, 40, 0});
  refused(te_gemm_key_of(&nothing.problem, &key), "'problem'");
  TE_EXPECT_OK(p.run());
}

}  // namespace
}  // namespace te
