// FP8 formats on host and device alike: conversion of saturated values, and scales from amaxes. NaN becomes 0x7f on
// both.
#pragma once

#include <cfloat>
#include <cmath>

#include "core/fp8.h"
#if defined(__CUDACC__)
#include <cuda_fp8.h>
#endif

namespace te::quantize {

constexpr int kBlock = 128;  // of BLOCK_1D and BLOCK_2D, and rows of a partial column sum
TE_HOST_DEVICE int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

template <bool kE5m2>
struct Format;
template <>
struct Format<false> {                                                         // E4M3: bias 7, no Inf
  static constexpr uint32_t kMaxBits = 0x43e00000u, kMinNormal = 0x3c800000u;  // 448, 2^-6 as float32
  static constexpr int kDropped = 20;                                          // of the 23 bits of a float's mantissa
  static constexpr uint32_t kRebias = (127 - 7) << 3;
  static constexpr float kSubnormal = 16384.f;  // its ulp, 2^-9, is that of E4M3's subnormals
};
template <>
struct Format<true> {                                                          // E5M2: bias 15
  static constexpr uint32_t kMaxBits = 0x47600000u, kMinNormal = 0x38800000u;  // 57344, 2^-14
  static constexpr int kDropped = 21;
  static constexpr uint32_t kRebias = (127 - 15) << 2;
  static constexpr float kSubnormal = 128.f;  // ulp 2^-16
};

TE_HOST_DEVICE float fp8_max(bool is_e5m2) { return is_e5m2 ? kFp8Max<e5m2> : kFp8Max<e4m3>; }

// The host's fp8(clamp(x, -max, max)), to nearest even, without branches, so that loops over it are vectorised.
template <bool kE5m2>
inline uint32_t to_fp8(float x) {
  using F = Format<kE5m2>;
  const uint32_t bits = detail::bits_of(x), magnitude = bits & 0x7fffffffu;
  const uint32_t a = magnitude < F::kMaxBits ? magnitude : F::kMaxBits;
  const uint32_t half = (1u << (F::kDropped - 1)) - 1 + ((a >> F::kDropped) & 1u);
  const uint32_t normal = ((a + half) >> F::kDropped) - F::kRebias;
  // Float addition rounds; a value that rounds up to the smallest normal one gets the right code without a special
  // case.
  const uint32_t subnormal = detail::bits_of(detail::float_of(a) + F::kSubnormal) - detail::bits_of(F::kSubnormal);
  const uint32_t rounded = (a < F::kMinNormal ? subnormal : normal) | ((bits >> 24) & 0x80u);
  return magnitude > 0x7f800000u ? 0x7fu : rounded;
}

TE_HOST_DEVICE float from_fp8(uint8_t byte, bool is_e5m2) {
  return is_e5m2 ? to_float(e5m2{byte}) : to_float(e4m3{byte});
}

// The rules of transformer_engine/quantize.h. IEEE division on both sides.
TE_HOST_DEVICE float drop_mantissa(float scale) { return detail::float_of(detail::bits_of(scale) & 0xff800000u); }

TE_HOST_DEVICE bool makes_no_scale(float amax) { return !(amax > 0.f) || amax > FLT_MAX; }

TE_HOST_DEVICE float scale_of(float amax, float amax_epsilon, float max, bool pow_2) {
  const float a = amax > amax_epsilon ? amax : amax_epsilon;
  if (makes_no_scale(a)) return 1.f;
  const float quotient = max / a;
  const float scale = quotient > FLT_MAX ? FLT_MAX : quotient;
  return pow_2 ? drop_mantissa(scale) : scale;
}

// Delayed scaling; `old` is kept if the amax is 0, Inf or NaN. A scale that the margin would make subnormal stays
// normal.
TE_HOST_DEVICE float updated_scale(float old, float amax, float max, int margin, bool pow_2) {
  if (makes_no_scale(amax)) return old;
  const float scale = ldexpf(max / amax, -margin);
  const float bounded = scale > FLT_MAX ? FLT_MAX : (scale < FLT_MIN ? FLT_MIN : scale);
  return pow_2 ? drop_mantissa(bounded) : bounded;
}

#if defined(__CUDACC__)

// Converts four values to four bytes, the first lowest, by the hardware's instruction for two.
template <bool kE5m2>
__device__ __forceinline__ uint32_t to_fp8_word(float a, float b, float c, float d) {
  uint32_t word;
  if constexpr (kE5m2) {
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, %2, %1; cvt.rn.satfinite.e5m2x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high};}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  } else {
    asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; "
        "mov.b32 %0, {low, high};}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
  }
  return word;
}

#endif

}  // namespace te::quantize
