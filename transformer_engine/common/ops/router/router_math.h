// Formulas that the CPU and the CUDA path of the router share. Both give the same bits, so that both choose the same
// experts: every multiply-add is an explicit fma, since compilers contract differently on host and device, and each sum
// runs in 32 lanes (a warp), element i in lane i % 32, which are then added by halves.
#pragma once

#include <cmath>

#include "core/dtype.h"
#include "transformer_engine/router.h"

namespace te::router {

constexpr int kSumLanes = 32;
constexpr float kEpsilon = 1e-20f;

// A product that no compiler fuses with an addition after it.
TE_HOST_DEVICE float product(float a, float b) { return fmaf(a, b, 0.f); }

// exp(x) for x <= 0 or NaN, within 1 ulp: the polynomial of te::cpu::exp, which leaves contraction to the compiler.
TE_HOST_DEVICE float exp_of(float given) {
  const float x = given < -104.f ? -104.f : given;         // exp(-104) rounds to 0
  const float shifted = fmaf(x, 1.44269504f, 12582912.f);  // 1.5 * 2^23: the low bits are round(x / ln2)
  const float n = shifted - 12582912.f;
  const int32_t k = int32_t(te::detail::bits_of(shifted) - 0x4b400000u);
  const float r = fmaf(n, -1.42860677e-6f, fmaf(n, -0.693145752f, x));
  float p = fmaf(0.00138145988f, r, 0.00836871658f);
  p = fmaf(p, r, 0.041668389f);
  p = fmaf(p, r, 0.166665211f);
  p = fmaf(p, r, 0.49999994f);
  p = fmaf(p, r, 1.f);
  p = fmaf(p, r, 1.f);
  const int32_t half = k >> 1;
  const float a = te::detail::float_of(uint32_t(half + 127) << 23);
  const float b = te::detail::float_of(uint32_t(k - half + 127) << 23);
  return product(p * a, b);
}

// log(1 + y) for y in [0, 1], within 3 ulp: 2 atanh(z) with z = y / (2 + y) <= 1 / 3; the next term is below 2^-32.
TE_HOST_DEVICE float log1p_of(float y) {
  const float z = y / (2.f + y), z2 = z * z, twice = z + z;
  float q = fmaf(z2, 1.f / 17.f, 1.f / 15.f);
  q = fmaf(q, z2, 1.f / 13.f);
  q = fmaf(q, z2, 1.f / 11.f);
  q = fmaf(q, z2, 1.f / 9.f);
  q = fmaf(q, z2, 1.f / 7.f);
  q = fmaf(q, z2, 1.f / 5.f);
  q = fmaf(q, z2, 1.f / 3.f);
  return fmaf(twice * z2, q, twice);
}

// A score of one logit alone: sigmoid or sqrt(softplus).
TE_HOST_DEVICE float score_of(int score, float x) {
  const float e = exp_of(-fabsf(x));
  if (score == TE_ROUTER_SIGMOID) return (x < 0.f ? e : 1.f) / (1.f + e);
  const float rest = log1p_of(e);
  return sqrtf(x > 0.f ? x + rest : rest);
}

// Its derivative. A score that underflows to 0 has the slope 0.
TE_HOST_DEVICE float slope_of(int score, float x) {
  const float e = exp_of(-fabsf(x));
  if (score == TE_ROUTER_SIGMOID) return e / (1.f + e) / (1.f + e);
  const float root = score_of(TE_ROUTER_SQRTSOFTPLUS, x);
  return root == 0.f ? 0.f : score_of(TE_ROUTER_SIGMOID, x) / (root + root);
}

// Shares of a sum, over all experts or over the chosen ones: numerator / sum. Their gradient too, given
// dot = sum of (incoming gradient * share), 0 where nothing is divided.
struct Shares {
  int score;
  float top;  // SOFTMAX: the largest logit
  float sum;  // 1 where nothing is divided

  TE_HOST_DEVICE float numerator(float x) const {
    return score == TE_ROUTER_SOFTMAX ? exp_of(x - top) : score_of(score, x);
  }
  TE_HOST_DEVICE float of(float x) const { return numerator(x) / sum; }
  TE_HOST_DEVICE float gradient(float x, float incoming, float dot) const {
    const float rest = incoming - dot;
    return score == TE_ROUTER_SOFTMAX ? of(x) * rest : rest / sum * slope_of(score, x);
  }
};

// Only softmax over all experts needs the other logits before the choice.
TE_HOST_DEVICE bool softmax_over_all(const te_router_plan& plan) {
  return plan.score == TE_ROUTER_SOFTMAX && plan.pre_softmax != 0;
}
// A single sigmoid or sqrt(softplus) is not divided by itself.
TE_HOST_DEVICE bool divides(const te_router_plan& plan) { return plan.score == TE_ROUTER_SOFTMAX || plan.topk > 1; }

// The value that the choice compares. `all`: the shares over all experts, read with softmax_over_all.
TE_HOST_DEVICE float choice_value(const te_router_plan& plan, const Shares& all, float x, float bias) {
  if (plan.score != TE_ROUTER_SOFTMAX) return score_of(plan.score, x) + bias;
  return plan.pre_softmax != 0 ? all.of(x) : x;
}

// Keys order floats as unsigned integers: -0 as 0, NaN above Inf. 0 is no key.
constexpr uint32_t kNanKey = 0xff800001u;
TE_HOST_DEVICE uint32_t key_of(float x) {
  if (x != x) return kNanKey;
  const uint32_t u = te::detail::bits_of(x + 0.f);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}
TE_HOST_DEVICE float value_of_key(uint32_t key) {
  if (key == kNanKey) return te::detail::float_of(0x7fffffffu);
  return te::detail::float_of((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

// Key and index as one number: the larger value comes first, of equal ones the lower index. 0 is none.
using Rank = unsigned long long;
TE_HOST_DEVICE Rank rank_of(uint32_t key, int index) {
  return key == 0 ? 0 : Rank(key) << 32 | (0xffffffffu - uint32_t(index));
}
TE_HOST_DEVICE int index_of(Rank rank) { return int(0xffffffffu - uint32_t(rank)); }
TE_HOST_DEVICE uint32_t key_in(Rank rank) { return uint32_t(rank >> 32); }

// The lanes of a partial sum of the loss, element (row, column) in lane (row % 8) * 32 + column % 32.
constexpr int kLossRows = 8;
constexpr int kLossLanes = kLossRows * kSumLanes;

// The factor of the loss's sum. Double, since total^2 exceeds float32's integers.
TE_HOST_DEVICE float loss_scale(const te_router_loss_plan& plan, int64_t total) {
  if (total == 0) return 0.f;
  return float(plan.coeff * double(plan.num_experts) / double(plan.topk) / double(total) / double(total));
}

// tokens_per_expert[column] as float32.
TE_HOST_DEVICE float tokens_at(const te_tensor& tokens, int64_t column) {
  if (tokens.dtype == TE_INT32) return float(static_cast<const int32_t*>(tokens.data)[column]);
  if (tokens.dtype == TE_INT64) return float(static_cast<const int64_t*>(tokens.data)[column]);
  return static_cast<const float*>(tokens.data)[column];
}

}  // namespace te::router
