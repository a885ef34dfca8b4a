// Element types of the C++ side: the 16-bit floats, conversion to and from float, and dispatch from te_dtype to a type.
// Conversions round to nearest even and keep NaN (quiet) and Inf, on host and device alike. FP8: core/fp8.h reads it,
// ops/quantize writes it.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/error.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define TE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TE_HOST_DEVICE inline
#if defined(__F16C__)
#include <immintrin.h>
#endif
#endif

namespace te {

struct fp16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

namespace detail {

TE_HOST_DEVICE uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
TE_HOST_DEVICE float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

#if !defined(__CUDA_ARCH__) && !(defined(__F16C__) && !defined(__CUDACC__))
// Portable half conversions, for hosts without F16C.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000u) << 16;
  uint32_t rest = uint32_t(h & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return float_of(sign | (rest + 0x70000000u));  // Inf, NaN: exponent 31 -> 255
  // Scaling by 2^112 moves the exponent bias from 15 to 127 and normalises subnormals, exactly.
  return float_of(sign | bits_of(float_of(rest) * 0x1p112f));
}
inline uint16_t float_to_half(float x) {
  const uint32_t u = bits_of(x);
  const uint16_t sign = uint16_t((u >> 16) & 0x8000u);
  const uint32_t a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return sign | 0x7e00u | uint16_t((a >> 13) & 0x3ffu);
  if (a >= 0x47800000u) return sign | 0x7c00u;
  if (a < 0x38800000u) {  // subnormal half: float addition rounds (0.5 has the right ulp)
    return sign | uint16_t(bits_of(float_of(a) + 0.5f) - 0x3f000000u);
  }
  const uint32_t odd = (a >> 13) & 1u;
  return sign | uint16_t((a + 0xc8000fffu + odd) >> 13);
}
#endif

}  // namespace detail

TE_HOST_DEVICE float to_float(float x) { return x; }

TE_HOST_DEVICE float to_float(bf16 x) { return detail::float_of(uint32_t(x.bits) << 16); }

TE_HOST_DEVICE float to_float(fp16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#elif defined(__F16C__) && !defined(__CUDACC__)
  return _cvtsh_ss(x.bits);
#else
  return detail::half_to_float(x.bits);
#endif
}

template <class T>
TE_HOST_DEVICE T from_float(float x);

template <>
TE_HOST_DEVICE float from_float<float>(float x) {
  return x;
}

template <>
TE_HOST_DEVICE bf16 from_float<bf16>(float x) {
#if defined(__CUDA_ARCH__)
  return bf16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t u = detail::bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const uint32_t nan = (u >> 16) | 0x40u;  // quiet, payload's top bits kept
  return bf16{uint16_t((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
#endif
}

template <>
TE_HOST_DEVICE fp16 from_float<fp16>(float x) {
#if defined(__CUDA_ARCH__)
  return fp16{__half_as_ushort(__float2half_rn(x))};
#elif defined(__F16C__) && !defined(__CUDACC__)
  return fp16{static_cast<uint16_t>(_cvtss_sh(x, 0))};
#else
  return fp16{detail::float_to_half(x)};
#endif
}

// Calls f(T{}) with the C++ type of a floating dtype; `op` and `argument` are for the error.
template <class F>
auto dispatch_float(te_dtype dtype, const char* op, const char* argument, F&& f) {
  switch (dtype) {
    case TE_FLOAT32:
      return f(float{});
    case TE_FLOAT16:
      return f(fp16{});
    case TE_BFLOAT16:
      return f(bf16{});
    default: {
      const char* name = te_dtype_name(dtype);
      bad_argument(op, argument, concat("of dtype ", name ? name : "unknown"), "float32, float16 or bfloat16");
    }
  }
}

}  // namespace te
