// router through the C API, on every device here: choice, probabilities, scores, the loss and all gradients against a
// long double oracle, maps, poisoned outputs at a pitch, errors.
#include "transformer_engine/router.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "ops/router/router_math.h"
#include "router_case.h"

namespace te {
namespace {

using namespace testing;

constexpr Real kUnit = 0x1p-24;

class Router : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, Router, ::testing::ValuesIn(testing::devices()), testing::device_name);

// Relative error of a share of a sum over E experts. exp is within 2 u, and its argument, a difference below 2^4,
// rounds by 2^4 u at most; sigmoid and sqrt(softplus) are within 6 u. A sum takes E / 32 + 5 additions, whose terms
// have that error too. Then a division and a product.
Real share_error(int64_t experts) { return (2 * 16 + Real(experts) / 32 + 19) * kUnit; }

template <class T>
void expect_near(T got, Real want, Real before, const std::string& what) {
  const Real bound = before + Rounding<T>::kRelative * (std::fabs(want) + before) + Rounding<T>::kAbsolute + 1e-37L;
  ASSERT_LE(std::fabs(Real(to_float(got)) - want), bound) << what << ": " << to_float(got) << ", wanted " << want;
}

// Shares of the experts in `members`, 0 for others, and the factor of their gradient.
struct Exact {
  std::vector<Real> share, factor;

  template <class T>
  Exact(const RouterProblem<T>& p, int64_t row, const std::vector<int>& members, bool divided)
      : share(size_t(p.shape.experts)), factor(share) {
    Real sum = 0;
    for (const int e : members) sum += exact_score(p.shape.score, p.logit(row, e));
    if (!divided) sum = 1;
    for (const int e : members) {
      const Real x = p.logit(row, e);
      share[size_t(e)] = exact_score(p.shape.score, x) / sum;
      factor[size_t(e)] = p.shape.score == TE_ROUTER_SOFTMAX ? share[size_t(e)] : exact_slope(p.shape.score, x) / sum;
    }
  }

  // factor (g - sum of g share), and its error: that of a share for each operand, 10 u for a slope.
  template <class T>
  void expect_gradient(const std::vector<Real>& g, const T* got, bool divided, const std::string& what) const {
    Real dot = 0, size = 0;
    for (size_t e = 0; e < g.size(); ++e) {
      dot += divided ? g[e] * share[e] : 0;
      size += std::fabs(g[e] * share[e]);
    }
    for (size_t e = 0; e < g.size(); ++e) {
      const Real want = factor[e] * (g[e] - dot);
      const Real before =
          std::fabs(factor[e]) * (std::fabs(g[e]) + size) * (4 * share_error(int64_t(g.size())) + 20 * kUnit);
      expect_near(got[e], want, before, concat(what, " gradient of expert ", e));
    }
  }
};

template <class T>
void expect_map(const RouterProblem<T>& p, const Buffer<uint8_t>& map, int64_t row, const std::vector<int>& chosen) {
  std::vector<uint8_t> want(static_cast<size_t>(p.map_cols));
  for (const int e : chosen) {
    if (p.shape.map_format == TE_ROUTER_BYTES) {
      want[size_t(e)] = 1;
    } else {
      want[size_t(e / 8)] = uint8_t(want[size_t(e / 8)] | 1 << (e % 8));
    }
  }
  const std::vector<uint8_t> all = map.read();
  const std::vector<uint8_t> got(all.begin() + row * p.map_cols, all.begin() + (row + 1) * p.map_cols);
  ASSERT_EQ(got, want) << "map of row " << row;
}

template <class T>
void expect_oracle(const RouterProblem<T>& p) {
  const auto probs = p.probs.read(), dlogits = p.dlogits.read(), score_dlogits = p.score_dlogits.read();
  const auto scores = p.scores.read();
  const auto chosen = p.chosen.read();
  const int64_t experts = p.shape.experts;
  std::vector<int> everyone(static_cast<size_t>(experts));
  std::iota(everyone.begin(), everyone.end(), 0);
  const bool divided = p.shape.score == TE_ROUTER_SOFTMAX || p.shape.topk > 1;
  const Real scale = Real(p.plan.scaling_factor);
  for (int64_t row = 0; row < p.shape.rows; ++row) {
    const std::string what = concat("row ", row);
    const std::vector<int> want = p.exact_choice(row);
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(chosen[size_t(row * p.shape.topk) + i], want[i]) << what << " place " << i;
    }
    expect_map(p, p.map, row, want);
    const bool over_all = p.shape.score == TE_ROUTER_SOFTMAX && p.shape.pre_softmax;
    const Exact of_choice(p, row, over_all ? everyone : want, divided), of_all(p, row, everyone, true);
    std::vector<Real> g(static_cast<size_t>(experts)), g_all(g), prob(g);
    for (int64_t e = 0; e < experts; ++e) g_all[size_t(e)] = Real(p.g_host[size_t(row * experts + e)]);
    for (const int e : want) {
      g[size_t(e)] = scale * g_all[size_t(e)];
      prob[size_t(e)] = scale * of_choice.share[size_t(e)];
    }
    const size_t at = size_t(row * experts);
    for (size_t e = 0; e < prob.size(); ++e) {
      expect_near(probs[at + e], prob[e], prob[e] * share_error(experts), concat(what, " probability ", e));
      const Real score = of_all.share[e];
      expect_near(scores[at + e], score, score * share_error(experts), concat(what, " score ", e));
    }
    of_choice.expect_gradient(g, dlogits.data() + at, divided, what);
    of_all.expect_gradient(g_all, score_dlogits.data() + at, true, what + " scores:");
    if (!p.shape.bias && p.shape.num_groups == 0) expect_map(p, p.score_map, row, want);
  }
  EXPECT_TRUE(p.probs.padding_untouched() && p.chosen.padding_untouched() && p.map.padding_untouched());
  EXPECT_TRUE(p.dlogits.padding_untouched() && p.scores.padding_untouched() && p.score_map.padding_untouched());
}

TEST_P(Router, MatchesTheOracle) {
  for (const RouterShape& shape : kRouterShapes) {
    for_router_dtypes([&](auto t) {
      SCOPED_TRACE(concat(describe(shape), " ", te_dtype_name(kDtype<decltype(t)>)));
      RouterProblem<decltype(t)> problem(GetParam(), shape);
      problem.run();
      expect_oracle(problem);
    });
    if (HasFatalFailure()) return;
  }
}

TEST_P(Router, DevicesGiveTheSameBits) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "compares a GPU with the CPU";
  for (const RouterShape& shape : kRouterShapes) {
    for_router_dtypes([&](auto t) {
      RouterProblem<decltype(t)> cpu(TE_DEVICE_CPU, shape), gpu(GetParam(), shape);
      cpu.run();
      gpu.run();
      gpu.expect_same_bytes(cpu, describe(shape));
    });
    if (HasFatalFailure()) return;
  }
}

TEST_P(Router, LossMatchesTheOracle) {
  for (const auto& [rows, cols] :
       {std::pair<int64_t, int64_t>{1, 1}, {70, 33}, {64, 128}, {1000, 40}, {3, 2048}, {17000, 3}, {0, 4}}) {
    for (const bool on_device : {false, true}) {
      for_router_dtypes([&](auto t) {
        LossProblem<decltype(t)> p(GetParam(), rows, cols, on_device);
        p.run();
        const Real total = Real(rows + 1), factor = Real(0.001) * Real(cols) / 2 / total / total;
        Real sum = 0;
        for (int64_t i = 0; i < rows * cols; ++i) {
          sum += Real(to_float(p.p[size_t(i)])) * Real(p.counts[size_t(i % cols)]);
        }
        // Terms are positive. A lane adds 8 ceil(cols / 32) fused products of its 64 rows, then 8 halvings; then sums
        // of 64 rows, rows / 64 / 256 + 1 a lane, and 8 halvings; the scale, its product and the counts round.
        const Real error = (8 * (Real(cols) / 32 + 1) + 8 + Real(rows) / 16384 + 9 + 3) * kUnit;
        expect_near(p.loss.read()[0], sum * factor, sum * factor * error, concat("loss of ", rows, " x ", cols));
        const auto got = p.dprobs.read();
        for (size_t i = 0; i < got.size(); ++i) {
          const Real want = 3 * factor * Real(p.counts[i % size_t(cols)]);
          expect_near(got[i], want, want * 4 * kUnit, concat("gradient ", i));
          if (HasFatalFailure()) return;
        }
        EXPECT_TRUE(p.dprobs.padding_untouched() && p.loss.padding_untouched() && p.partials.padding_untouched());
      });
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Router, WritesNoMapThatIsAbsent) {
  RouterProblem<float> p(GetParam(), kRouterShapes[0]);
  const te_tensor none{};
  TE_ASSERT_OK(te_router_forward(&p.plan, p.probs.tensor(), p.chosen.tensor(), none, nullptr));
  TE_ASSERT_OK(te_router_scores_forward(&p.plan, p.scores.tensor(), none, nullptr));
  for (const uint8_t byte : p.map.read()) ASSERT_EQ(byte, kPoison);
}

TEST_P(Router, BadPlansAreNamed) {
  const RouterShape shape{4, 24, 6, TE_ROUTER_SIGMOID, 0, 4, 2, true};
  const struct {
    const char* argument;
    std::function<void(te_router_plan&)> spoil;
  } mistakes[] = {
      {"plan.logits", [](te_router_plan& p) { p.logits.dtype = TE_INT32; }},
      {"plan.logits", [](te_router_plan& p) { p.logits.cols = 0; }},
      {"plan.logits", [](te_router_plan& p) { p.logits.cols = p.logits.row_pitch = 1025; }},
      {"plan.topk", [](te_router_plan& p) { p.topk = 0; }},
      {"plan.topk", [](te_router_plan& p) { p.topk = 25; }},
      {"plan.score", [](te_router_plan& p) { p.score = 3; }},
      {"plan.num_groups", [](te_router_plan& p) { p.num_groups = 5; }},
      {"plan.num_groups", [](te_router_plan& p) { p.num_groups = -1; }},
      {"plan.group_topk", [](te_router_plan& p) { p.group_topk = 4; }},
      {"plan.group_topk", [](te_router_plan& p) { p.group_topk = 0; }},
      {"plan.group_topk", [](te_router_plan& p) { p.num_groups = 8, p.group_topk = 1; }},
      {"plan.expert_bias", [](te_router_plan& p) { p.score = TE_ROUTER_SOFTMAX; }},
      {"plan.expert_bias", [](te_router_plan& p) { p.expert_bias.cols = 23; }},
      {"plan.expert_bias", [](te_router_plan& p) { p.expert_bias.dtype = TE_BFLOAT16; }},
      {"plan.map_format", [](te_router_plan& p) { p.map_format = 2; }},
      {"map", [](te_router_plan& p) { p.map_format = TE_ROUTER_BITS; }},
      {"probs", [](te_router_plan& p) { p.logits.rows = 3; }},
  };
  for (const auto& mistake : mistakes) {
    RouterProblem<float> p(GetParam(), shape);
    mistake.spoil(p.plan);
    EXPECT_EQ(te_router_forward(&p.plan, p.probs.tensor(), p.chosen.tensor(), p.map.tensor(), nullptr),
              TE_INVALID_ARGUMENT)
        << mistake.argument;
    const std::string message = te_last_error();
    EXPECT_EQ(message.rfind("te_router_forward: argument '", 0), 0u) << message;
    EXPECT_NE(message.find(concat("'", mistake.argument, "'")), std::string::npos) << message;
    for (const float v : p.probs.read()) ASSERT_TRUE(std::isnan(v));
  }
  EXPECT_EQ(te_router_forward(nullptr, {}, {}, {}, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_router_loss_forward(nullptr, {}, {}, {}, nullptr), TE_INVALID_ARGUMENT);
}

TEST_P(Router, ExpertsOutOfRangeAreSeen) {
  RouterProblem<float> p(GetParam(), kRouterShapes[0]);
  std::vector<int32_t> bad(size_t(p.shape.rows * p.shape.topk), 1);
  bad[3] = 128;
  p.chosen.fill(bad);
  const te_status status =
      te_router_backward(&p.plan, p.dprobs.tensor(), p.chosen.tensor(), p.dlogits.tensor(), nullptr);
  EXPECT_EQ(status, GetParam() == TE_DEVICE_CPU ? TE_INVALID_ARGUMENT : TE_SUCCESS);
  if (status != TE_SUCCESS) {
    EXPECT_NE(std::string(te_last_error()).find("'chosen' is 128 in row 0"), std::string::npos) << te_last_error();
  }
  EXPECT_TRUE(p.dlogits.padding_untouched());
}

// The shared functions themselves.
TEST(RouterMath, ExponentialAndLogarithmAreWithinTheirBounds) {
  Real worst_exp = 0, worst_log = 0;
  for (int i = 0; i <= 1000000; ++i) {
    const float x = -float(i) * 8.7e-5f;  // to -87, above which values are normal
    const Real want = std::exp(Real(x));
    worst_exp = std::max(worst_exp, std::fabs(router::exp_of(x) - want) / want);
    const float y = float(std::exp2(-double(i % 4000) / 100));
    const Real log = std::log1p(Real(y));
    worst_log = std::max(worst_log, std::fabs(router::log1p_of(y) - log) / log);
  }
  EXPECT_LE(worst_exp, 2 * kUnit);
  EXPECT_LE(worst_log, 6 * kUnit);
  EXPECT_EQ(router::exp_of(0.f), 1.f);
  EXPECT_EQ(router::exp_of(-INFINITY), 0.f);
  EXPECT_TRUE(std::isnan(router::exp_of(NAN)));
  EXPECT_EQ(router::log1p_of(0.f), 0.f);
}

TEST(RouterMath, KeysOrderFloats) {
  const float order[] = {-INFINITY, -2.f, -1e-40f, 0.f, 1e-40f, 3.f, INFINITY, NAN};
  for (size_t i = 0; i + 1 < std::size(order); ++i) {
    EXPECT_LT(router::key_of(order[i]), router::key_of(order[i + 1])) << i;
    EXPECT_EQ(router::value_of_key(router::key_of(order[i])), order[i]);
  }
  EXPECT_GT(router::key_of(-INFINITY), 0u);
  EXPECT_EQ(router::key_of(-0.f), router::key_of(0.f));
  EXPECT_EQ(router::key_of(-NAN), router::key_of(NAN));
  EXPECT_GT(router::rank_of(7, 3), router::rank_of(7, 4));
}

}  // namespace
}  // namespace te
