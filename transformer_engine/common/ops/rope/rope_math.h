// Functions that the CPU and the CUDA path of rope share, so that they give the same bits: sine and cosine of an angle,
// the rotation of one element, and the plan's tensors as a list. Every multiply-add is an explicit fma, since compilers
// contract differently on host and device.
#pragma once

#include <cmath>

#include "core/dtype.h"
#include "transformer_engine/rope.h"

namespace te::rope {

struct SinCos {
  float sin;
  float cos;
};

constexpr uint32_t kNaNBits = 0x7fffffffu;

// Larger fp32 angles are 128 apart, twenty turns: they carry no position, and give NaN.
constexpr float kMaxAngle = 1073741824.f;  // 2^30

// Sine and cosine within 2^-23, without branches; NaN beyond kMaxAngle, and for NaN and Inf.
// The angle is reduced to r in [-pi/4, pi/4] in double: n = round(2 angle / pi) has at most 30 bits, each fma rounds
// once, and pi/2 has 107 bits, so that r has fp32 precision even if the angle is next to a multiple of pi/2. The
// polynomials are those of Cephes for fp32 (sinf.c, cosf.c), with an error below 1 ulp of 1.
TE_HOST_DEVICE SinCos sin_cos(float given) {
  const float angle = fabsf(given) <= kMaxAngle ? given : te::detail::float_of(kNaNBits);
  const double shifted = fma(double(angle), 0.63661977236758134, 6755399441055744.0);  // 2/pi; 1.5 * 2^52
  const double n = shifted - 6755399441055744.0;
  double reduced = fma(-n, 1.5707963267948966, double(angle));
  reduced = fma(-n, 6.123233995736766e-17, reduced);
  uint64_t quadrant;  // n modulo 4 is in the low bits of `shifted`
  memcpy(&quadrant, &shifted, 8);
  const float r = float(reduced);
  const float r2 = r * r;
  float s = fmaf(-1.9515295891e-4f, r2, 8.3321608736e-3f);
  s = fmaf(s, r2, -1.6666654611e-1f);
  s = fmaf(s * r2, r, r);
  float c = fmaf(2.443315711809948e-5f, r2, -1.388731625493765e-3f);
  c = fmaf(c, r2, 4.166664568298827e-2f);
  c = fmaf(c, r2, -0.5f);
  c = fmaf(c, r2, 1.f);
  const bool odd = (quadrant & 1u) != 0;
  const uint32_t sin_sign = uint32_t(quadrant & 2u) << 30;
  const uint32_t cos_sign = uint32_t((quadrant + 1u) & 2u) << 30;
  return {te::detail::float_of(te::detail::bits_of(odd ? c : s) ^ sin_sign),
          te::detail::float_of(te::detail::bits_of(odd ? s : c) ^ cos_sign)};
}

// y[i] from x[i], its partner in the pair, cos(a) and the partner's signed sine.
TE_HOST_DEVICE float rotated(float x, float partner, float cosine, float weight) {
  return fmaf(x, cosine, partner * weight);
}

// Forward, y_low = x_low cos(a_low) - x_high sin(a_low) and y_high = x_high cos(a_high) + x_low sin(a_high); the
// transpose swaps the two sines with their signs. So this function applies the sign to the sine of an element's angle,
// which multiplies that element forward, and its partner backward.
TE_HOST_DEVICE float signed_sine(bool low, float sine) { return low ? -sine : sine; }

// One of q, k, v: its input, output and rotation.
struct Part {
  te_rope_tensor in;
  te_rope_tensor out;
  int64_t heads;
  const te_tensor* freqs;  // nullptr: copied
};

constexpr int kParts = 3;

struct Parts {
  Part part[kParts];
};

inline Parts parts_of(const te_rope_plan& plan) {
  const te_tensor& k_freqs = plan.k_freqs.data != nullptr ? plan.k_freqs : plan.q_freqs;
  return {{{plan.q, plan.q_out, plan.q_heads, &plan.q_freqs},
           {plan.k, plan.k_out, plan.k_heads, &k_freqs},
           {plan.v, plan.v_out, plan.v_heads, nullptr}}};
}

}  // namespace te::rope
