// Helpers of the CPU paths: the largest magnitudes of floats, ignoring NaN, and the value of a tensor of one element.
// Host only.
#pragma once

#include <algorithm>

#include "core/tensor.h"

namespace te::quantize::cpu {

inline float value_at(const te_tensor& t) { return *static_cast<const float*>(t.data); }

// |x|, NaN as 0, as integers, which compare like the floats and are vectorised.
inline uint32_t magnitude_bits(float x) {
  const uint32_t bits = te::detail::bits_of(x) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0 : bits;
}

inline float amax_of(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, magnitude_bits(x[i]));
  return te::detail::float_of(largest);
}

// Ignores a NaN in b.
inline float larger(float a, float b) { return b > a ? b : a; }

}  // namespace te::quantize::cpu
