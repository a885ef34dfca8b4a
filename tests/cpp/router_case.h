// A routing problem in one device's memory, and its oracle in long double. For the suites of the router; computes
// nothing by the engine itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "rounding.h"
#include "transformer_engine/router.h"

namespace te::testing {

using Real = long double;

struct RouterShape {
  int64_t rows, experts;
  int32_t topk;
  int32_t score = TE_ROUTER_SOFTMAX;
  int32_t pre_softmax = 0;
  int32_t num_groups = 0, group_topk = 0;
  bool bias = false;
  int32_t map_format = TE_ROUTER_BYTES;
};

// Every score, groups of several sizes, one expert, more than a warp, all of them, no rows, maps with a tail.
const RouterShape kRouterShapes[] = {
    {9, 128, 8, TE_ROUTER_SOFTMAX, 0},
    {6, 64, 6, TE_ROUTER_SOFTMAX, 1, 0, 0, false, TE_ROUTER_BITS},
    {7, 33, 32, TE_ROUTER_SIGMOID, 0, 0, 0, true, TE_ROUTER_BITS},
    {5, 1, 1, TE_ROUTER_SOFTMAX, 1},
    {5, 3, 1, TE_ROUTER_SQRTSOFTPLUS, 0, 0, 0, false, TE_ROUTER_BITS},
    {3, 1024, 32, TE_ROUTER_SQRTSOFTPLUS, 0, 0, 0, true},
    {2, 1000, 7, TE_ROUTER_SOFTMAX, 1, 0, 0, false, TE_ROUTER_BITS},
    {6, 256, 8, TE_ROUTER_SIGMOID, 0, 8, 4, true},
    {6, 60, 6, TE_ROUTER_SOFTMAX, 0, 5, 3},
    {5, 48, 4, TE_ROUTER_SOFTMAX, 1, 48, 4, false, TE_ROUTER_BITS},
    {4, 64, 2, TE_ROUTER_SQRTSOFTPLUS, 0, 1, 1},
    {0, 16, 2},
};

inline std::string describe(const RouterShape& s) {
  return concat("[", s.rows, ", ", s.experts, "] topk ", s.topk, " score ", s.score, " pre ", s.pre_softmax, " groups ",
                s.num_groups, "/", s.group_topk, s.bias ? " bias" : "");
}

// Multiples of 1/64: scores are far apart or equal, so that rounding does not change the choice.
inline std::vector<double> router_values(int64_t count, unsigned seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(std::round(normal(engine) * 96) / 64);
  return values;
}

inline Real exact_score(int32_t score, Real x) {
  if (score == TE_ROUTER_SOFTMAX) return std::exp(x);
  return score == TE_ROUTER_SIGMOID ? 1 / (1 + std::exp(-x)) : std::sqrt(std::log1p(std::exp(x)));
}
inline Real exact_slope(int32_t score, Real x) {
  const Real s = 1 / (1 + std::exp(-x));
  return score == TE_ROUTER_SIGMOID ? s * (1 - s) : s / (2 * exact_score(score, x));
}

template <class T>
struct RouterProblem {
  RouterProblem(int32_t device, const RouterShape& s, unsigned seed = 5)
      : shape(s),
        map_cols(s.map_format == TE_ROUTER_BYTES ? s.experts : (s.experts + 7) / 8),
        logits(device, s.rows, s.experts, s.experts + 3),
        dprobs(device, s.rows, s.experts, s.experts + 1),
        probs(device, s.rows, s.experts, s.experts + 2),
        dlogits(device, s.rows, s.experts, s.experts + 5),
        score_dlogits(device, s.rows, s.experts, s.experts + 5),
        bias(device, 1, s.experts),
        dscores(device, s.rows, s.experts, s.experts + 1),
        scores(device, s.rows, s.experts, s.experts + 3),
        chosen(device, s.rows, s.topk, s.topk + 1),
        map(device, s.rows, map_cols, map_cols + 1),
        score_map(device, s.rows, map_cols, map_cols + 1),
        x(rounded<T>(router_values(s.rows * s.experts, seed))),
        g(rounded<T>(router_values(s.rows * s.experts, seed + 1))) {
    for (const double v : router_values(s.experts, seed + 2)) bias_host.push_back(float(v) / 4);
    for (const T v : g) g_host.push_back(to_float(v));
    logits.fill(x);
    dprobs.fill(g);
    bias.fill(bias_host);
    dscores.fill(g_host);
    plan.logits = logits.tensor();
    if (s.bias) plan.expert_bias = bias.tensor();
    plan.topk = s.topk;
    plan.num_groups = s.num_groups;
    plan.group_topk = s.group_topk;
    plan.score = s.score;
    plan.pre_softmax = s.pre_softmax;
    plan.map_format = s.map_format;
    plan.scaling_factor = 2.5f;
  }

  void run() {
    TE_ASSERT_OK(te_router_forward(&plan, probs.tensor(), chosen.tensor(), map.tensor(), nullptr));
    TE_ASSERT_OK(te_router_backward(&plan, dprobs.tensor(), chosen.tensor(), dlogits.tensor(), nullptr));
    te_router_plan scored = scores_plan();
    TE_ASSERT_OK(te_router_scores_forward(&scored, scores.tensor(), score_map.tensor(), nullptr));
    TE_ASSERT_OK(te_router_scores_backward(&scored, dscores.tensor(), score_dlogits.tensor(), nullptr));
  }

  // Without what the scores do not read.
  te_router_plan scores_plan() const {
    te_router_plan scored{};
    scored.logits = plan.logits;
    scored.topk = plan.topk;
    scored.score = plan.score;
    scored.map_format = plan.map_format;
    return scored;
  }

  // All results of both problems are equal, byte for byte.
  template <class Other>
  void expect_same_bytes(const Other& other, const std::string& what) const {
    const auto same = [&](const auto& a, const auto& b, const char* name) {
      const auto left = a.read(), right = b.read();
      ASSERT_EQ(left.size(), right.size());
      for (size_t i = 0; i < left.size(); ++i) {
        ASSERT_EQ(std::memcmp(&left[i], &right[i], sizeof(left[i])), 0) << what << " " << name << " element " << i;
      }
      ASSERT_TRUE(a.padding_untouched() && b.padding_untouched()) << what << " " << name;
    };
    same(probs, other.probs, "probs");
    same(chosen, other.chosen, "chosen");
    same(map, other.map, "map");
    same(dlogits, other.dlogits, "dlogits");
    same(scores, other.scores, "scores");
    same(score_map, other.score_map, "map of the scores");
    same(score_dlogits, other.score_dlogits, "dlogits of the scores");
  }

  Real logit(int64_t row, int64_t e) const { return to_float(x[size_t(row * shape.experts + e)]); }

  std::vector<int> first(const std::vector<Real>& values, size_t count) const {
    std::vector<int> order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[size_t(a)] > values[size_t(b)]; });
    order.resize(count);
    return order;
  }

  // The choice of a row.
  std::vector<int> exact_choice(int64_t row) const {
    std::vector<Real> values;
    Real sum = 0;
    for (int64_t e = 0; e < shape.experts; ++e) sum += std::exp(logit(row, e));
    for (int64_t e = 0; e < shape.experts; ++e) {
      const Real s = shape.score == TE_ROUTER_SOFTMAX
                         ? (shape.pre_softmax ? std::exp(logit(row, e)) / sum : logit(row, e))
                         : exact_score(shape.score, logit(row, e));
      values.push_back(s + (shape.bias ? Real(bias_host[size_t(e)]) : 0));
    }
    if (shape.num_groups > 0) {
      const size_t size = size_t(shape.experts / shape.num_groups);
      std::vector<Real> sums;
      for (size_t g0 = 0; g0 < size_t(shape.num_groups); ++g0) {
        std::vector<Real> members(values.begin() + long(g0 * size), values.begin() + long((g0 + 1) * size));
        std::sort(members.rbegin(), members.rend());
        sums.push_back(std::accumulate(members.begin(), members.begin() + shape.topk / shape.group_topk, Real(0)));
      }
      const std::vector<int> stay = first(sums, size_t(shape.group_topk));
      for (size_t e = 0; e < values.size(); ++e) {
        if (std::find(stay.begin(), stay.end(), int(e / size)) == stay.end()) values[e] = -1e30L;
      }
    }
    return first(values, size_t(shape.topk));
  }

  RouterShape shape;
  int64_t map_cols;
  Buffer<T> logits, dprobs, probs, dlogits, score_dlogits;
  Buffer<float> bias, dscores, scores;
  Buffer<int32_t> chosen;
  Buffer<uint8_t> map, score_map;
  std::vector<T> x, g;
  std::vector<float> bias_host, g_host;
  te_router_plan plan{};
};

// The loss of random probabilities.
template <class T>
struct LossProblem {
  LossProblem(int32_t device, int64_t rows, int64_t cols, bool on_device = false)
      : probs(device, rows, cols, cols + 3),
        dprobs(device, rows, cols, cols + 1),
        loss(device, 1, 1),
        dloss(device, 1, 1),
        partials(device, 1, std::max<int64_t>(1, (rows + TE_ROUTER_LOSS_ROWS - 1) / TE_ROUTER_LOSS_ROWS)),
        tokens(device, 1, cols),
        total(device, 1, 1) {
    std::mt19937 engine(4);
    std::uniform_real_distribution<double> uniform(0, 1);
    std::vector<double> values;
    for (int64_t i = 0; i < rows * cols; ++i) values.push_back(uniform(engine));
    p = rounded<T>(values);
    for (int64_t c = 0; c < cols; ++c) counts.push_back(int64_t(engine() % 300));
    probs.fill(p);
    tokens.fill(counts);
    dloss.fill({from_float<T>(3.f)});
    total.fill({rows + 1});
    plan.tokens_per_expert = tokens.tensor();
    if (on_device) plan.total_tensor = total.tensor();
    plan.total = on_device ? 0 : rows + 1;
    plan.num_experts = cols;
    plan.topk = 2;
    plan.coeff = 0.001;
  }

  void run() {
    TE_ASSERT_OK(te_router_loss_forward(&plan, probs.tensor(), partials.tensor(), loss.tensor(), nullptr));
    TE_ASSERT_OK(te_router_loss_backward(&plan, dloss.tensor(), dprobs.tensor(), nullptr));
  }

  Buffer<T> probs, dprobs, loss, dloss;
  Buffer<float> partials;
  Buffer<int64_t> tokens, total;
  std::vector<T> p;
  std::vector<int64_t> counts;
  te_router_loss_plan plan{};
};

template <class F>
void for_router_dtypes(F&& f) {
  f(float{});
  f(fp16{});
  f(bf16{});
}

}  // namespace te::testing
