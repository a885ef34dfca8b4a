// The formulas of transformer_engine/optimizer.h for one element, shared by the CPU and the CUDA path so that they give
// the same bits. Every multiply-add is an explicit fma, since compilers contract differently on host and device; no
// other product is added to a sum.
#pragma once

#include <cfloat>
#include <cmath>

#include "core/dtype.h"
#include "transformer_engine/optimizer.h"

namespace te::optimizer {

// ---- Adam ----

// A product that the compiler cannot contract with a sum.
TE_HOST_DEVICE double product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return fma(a, b, 0.0);
#endif
}

// base^n for n >= 0, by squaring: host and device round alike.
TE_HOST_DEVICE double power(double base, int64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) result = product(result, base);
    base = product(base, base);
  }
  return result;
}

// 1 / (1 - beta^step).
TE_HOST_DEVICE float bias_correction(double beta, int64_t step) { return float(1.0 / (1.0 - power(beta, step))); }

struct Adam {
  float lr, beta1, beta1_rest, beta2, beta2_rest, eps, weight_decay;
  float m_correction, v_correction;  // 1 / c1, 1 / c2
  float inv_scale, clip;

  explicit Adam(const te_adam_plan& plan)
      : lr(float(plan.lr)),
        beta1(float(plan.beta1)),
        beta1_rest(float(1.0 - plan.beta1)),
        beta2(float(plan.beta2)),
        beta2_rest(float(1.0 - plan.beta2)),
        eps(float(plan.eps)),
        weight_decay(float(plan.weight_decay)),
        m_correction(plan.bias_correction ? bias_correction(plan.beta1, plan.step) : 1.f),
        v_correction(plan.bias_correction ? bias_correction(plan.beta2, plan.step) : 1.f),
        inv_scale(1.f),
        clip(1.f) {}
};

// g has been multiplied by inv_scale.
template <bool kDecoupled>
TE_HOST_DEVICE void adam_step(const Adam& a, float g, float& p, float& m, float& v) {
  g = g * a.clip;
  if (!kDecoupled && a.weight_decay != 0.f) g = fmaf(a.weight_decay, p, g);  // skips 0 * Inf
  m = fmaf(a.beta1, m, a.beta1_rest * g);
  v = fmaf(a.beta2, v, a.beta2_rest * g * g);
  float u = (m * a.m_correction) / (sqrtf(v * a.v_correction) + a.eps);
  if (kDecoupled && a.weight_decay != 0.f) u = fmaf(a.weight_decay, p, u);
  p = fmaf(-a.lr, u, p);
}

// ---- states ----

// The largest magnitudes that scaled states hold.
constexpr float kHalfRange = 32752.f, kFp8Range = 448.f;

constexpr float range_of(te_dtype dtype) { return dtype == TE_FLOAT16 ? kHalfRange : kFp8Range; }

TE_HOST_DEVICE float state_scale(float amax, float range) {
  if (!(amax > 0.f) || amax > FLT_MAX) return 1.f;
  const float scale = amax / range;
  return scale < FLT_MIN ? FLT_MIN : scale;
}

// The smallest nonzero magnitude of a scaled state.
TE_HOST_DEVICE float least_of(te_dtype dtype) { return dtype == TE_FLOAT16 ? 0x1p-24f : 0x1p-9f; }

// A second moment as it is stored. A nonzero one never becomes 0: m would then be divided by eps alone, a step of lr *
// m / eps.
TE_HOST_DEVICE float scaled_second(float v, float scale, float least) {
  const float kept = v / scale;
  return v > 0.f && kept < least ? least : kept;
}

// A float32 master whose rounded high half is the bfloat16 weight, and whose low half is stored separately.
struct Halves {
  uint16_t weight;
  int16_t remainder;
};

TE_HOST_DEVICE float joined(uint16_t weight, int16_t remainder) {
  const uint32_t high = uint32_t(weight) - (remainder < 0 ? 1u : 0u);
  return detail::float_of((high << 16) | uint16_t(remainder));
}

// A NaN becomes the quiet one with a remainder of 0: rounding other NaNs up would give -0.
TE_HOST_DEVICE Halves halves_of(float master) {
  const uint32_t given = detail::bits_of(master);
  const bool is_nan = (given & 0x7fffffffu) > 0x7f800000u;
  const uint32_t bits = is_nan ? (given & 0x80000000u) | 0x7fc00000u : given;
  return {uint16_t((bits >> 16) + ((bits >> 15) & 1u)), int16_t(uint16_t(bits))};
}

// ---- SGD ----

struct Sgd {
  float lr, weight_decay, momentum, dampening_rest, scale;
  bool nesterov, first_run, decay_after_momentum;

  explicit Sgd(const te_sgd_plan& plan)
      : lr(float(plan.lr)),
        weight_decay(float(plan.weight_decay)),
        momentum(float(plan.momentum)),
        dampening_rest(float(1.0 - plan.dampening)),
        scale(float(plan.scale)),
        nesterov(plan.nesterov != 0),
        first_run(plan.first_run != 0),
        decay_after_momentum(plan.decay_after_momentum != 0) {}
};

template <bool kMomentum>
TE_HOST_DEVICE void sgd_step(const Sgd& s, float g, float& p, float& b) {
  g = g * s.scale;
  if (!s.decay_after_momentum && s.weight_decay != 0.f) g = fmaf(s.weight_decay, p, g);
  if (kMomentum) {
    b = s.first_run ? g : fmaf(s.momentum, b, s.dampening_rest * g);
    g = s.nesterov ? fmaf(s.momentum, b, g) : b;
  }
  if (s.decay_after_momentum && s.weight_decay != 0.f) g = fmaf(s.weight_decay, p, g);
  p = fmaf(-s.lr, g, p);
}

// Returns false for Inf and NaN.
TE_HOST_DEVICE bool is_finite(float x) { return (detail::bits_of(x) & 0x7f800000u) != 0x7f800000u; }

}  // namespace te::optimizer
