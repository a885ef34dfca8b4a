// The two FP8 formats as element types, read as floats, exactly, on host and device alike. ops/quantize converts floats
// to FP8.
#pragma once

#include "core/dtype.h"

namespace te {

struct e4m3 {  // sign, 4 bits of exponent (bias 7), 3 of mantissa; no Inf, NaN is all ones
  uint8_t bits;
};
struct e5m2 {  // sign, 5 bits of exponent (bias 15), 2 of mantissa; the upper byte of an fp16
  uint8_t bits;
};

// The largest finite value.
template <class T>
inline constexpr float kFp8Max = 0.f;
template <>
inline constexpr float kFp8Max<e4m3> = 448.f;
template <>
inline constexpr float kFp8Max<e5m2> = 57344.f;

// Scaling by a power of two moves the exponent bias to 127 and normalises subnormals, exactly.
TE_HOST_DEVICE float to_float(e4m3 x) {
  const uint32_t sign = uint32_t(x.bits & 0x80u) << 24;
  const uint32_t rest = x.bits & 0x7fu;
  if (rest == 0x7fu) return detail::float_of(sign | 0x7fc00000u);
  return detail::float_of(sign | detail::bits_of(detail::float_of(rest << 20) * 0x1p120f));
}

TE_HOST_DEVICE float to_float(e5m2 x) {
  const uint32_t sign = uint32_t(x.bits & 0x80u) << 24;
  const uint32_t rest = x.bits & 0x7fu;
  if (rest > 0x7cu) return detail::float_of(sign | 0x7fc00000u);
  if (rest == 0x7cu) return detail::float_of(sign | 0x7f800000u);
  return detail::float_of(sign | detail::bits_of(detail::float_of(rest << 21) * 0x1p112f));
}

inline bool is_fp8(te_dtype dtype) { return dtype == TE_FLOAT8_E4M3 || dtype == TE_FLOAT8_E5M2; }

// Calls f(T{}) with the C++ type of an FP8 dtype; `op` and `argument` are for the error.
template <class F>
auto dispatch_fp8(te_dtype dtype, const char* op, const char* argument, F&& f) {
  if (dtype == TE_FLOAT8_E4M3) return f(e4m3{});
  if (dtype == TE_FLOAT8_E5M2) return f(e5m2{});
  const char* name = te_dtype_name(dtype);
  bad_argument(op, argument, concat("of dtype ", name ? name : "unknown"), "float8_e4m3 or float8_e5m2");
}

}  // namespace te
