// Helpers of the CPU paths. Rows are processed in chunks that are widened to float once, so that the loops between load
// and store are plain float loops, which the compiler vectorises for every dtype. Host only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "core/dtype.h"

namespace te::cpu {

constexpr int64_t kChunk = 256;  // floats: 1 KiB a buffer, a handful of them stay in L1

namespace detail {

// The 16-bit types as plain integers, since the compiler has no vectors of structs.
using Bits16 = uint16_t __attribute__((may_alias));

inline void widen(const bf16* source, float* out, int64_t n) {
  const auto* bits = reinterpret_cast<const Bits16*>(source);
  for (int64_t i = 0; i < n; ++i) out[i] = te::detail::float_of(uint32_t(bits[i]) << 16);
}

#if defined(__AVX2__)
// from_float<bf16> of eight values, in 32-bit lanes.
inline __m256i rounded_to_bf16(__m256 x) {
  const __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
  const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(high, _mm256_set1_epi32(1)));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, half), 16);
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), is_nan);
}
#endif

inline void narrow(bf16* target, const float* values, int64_t n) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 16 <= n; i += 16) {
    const __m256i low = rounded_to_bf16(_mm256_loadu_ps(values + i));
    const __m256i high = rounded_to_bf16(_mm256_loadu_ps(values + i + 8));
    const __m256i packed =
        _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);  // undoes the lanes of packus
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), packed);
  }
#endif
  auto* bits = reinterpret_cast<Bits16*>(target);
  for (; i < n; ++i) bits[i] = from_float<bf16>(values[i]).bits;
}

inline void widen(const fp16* source, float* out, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
  }
#endif
  for (; i < n; ++i) out[i] = to_float(source[i]);
}

inline void narrow(fp16* target, const float* values, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__) && defined(__AVX__)
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0));
  }
#endif
  for (; i < n; ++i) target[i] = from_float<fp16>(values[i]);
}

}  // namespace detail

// fp32 data is used in place; other types are widened into `buffer`. Returns the address of the n floats.
inline const float* load_chunk(const float* source, float*, int64_t) { return source; }
template <class T>
const float* load_chunk(const T* source, float* buffer, int64_t n) {
  detail::widen(source, buffer, n);
  return buffer;
}

// The memory for a chunk's results: fp32 in place, other types in `buffer`, from which store_chunk rounds them.
inline float* chunk_target(float* target, float*) { return target; }
template <class T>
float* chunk_target(T*, float* buffer) {
  return buffer;
}

inline void store_chunk(float* target, const float* values, int64_t n) {
  if (target != values) std::copy(values, values + n, target);
}
// GCC warns in some callers as if more than the n written values of a buffer were read.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
template <class T>
void store_chunk(T* target, const float* values, int64_t n) {
  detail::narrow(target, values, n);
}
#pragma GCC diagnostic pop

// body(first, n) over [0, cols) in chunks.
template <class Body>
void for_chunks(int64_t cols, Body&& body) {
  for (int64_t first = 0; first < cols; first += kChunk) body(first, std::min(kChunk, cols - first));
}

constexpr int kLanes = 16;

inline float sum_of_lanes(const float (&lanes)[kLanes]) {
  float sum = 0.f;
  for (const float lane : lanes) sum += lane;
  return sum;
}

// Sum of f(i) over [0, n) in 16 running lanes that are then added in order: vectorises, and the order is fixed.
template <class F>
float lane_sum(int64_t n, F&& f) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += f(i + lane);
  }
  for (int lane = 0; i < n; ++i, ++lane) lanes[lane] += f(i);
  return sum_of_lanes(lanes);
}

// Two such sums at once, of the pairs f(i).
template <class F>
std::pair<float, float> lane_sums(int64_t n, F&& f) {
  float first[kLanes] = {}, second[kLanes] = {};
  const auto add = [&](int lane, std::pair<float, float> x) {
    first[lane] += x.first;
    second[lane] += x.second;
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(lane, f(i + lane));
  }
  for (int lane = 0; i < n; ++i, ++lane) add(lane, f(i));
  return {sum_of_lanes(first), sum_of_lanes(second)};
}

// exp(x) without branches, within 1 ulp of the exact value (test_core sweeps it): x = n ln2 + r with |r| <= ln2 / 2, a
// degree-6 polynomial in r, and two exact scalings, so that large arguments overflow to Inf and small ones underflow to
// 0 as with expf. NaN stays NaN. The polynomial is 1 + r + r^2 q(r), with q fitted for the least relative error over
// that range (weighted Lawson iteration, 3.1e-9; Taylor coefficients leave 1.7e-7, 2.7 ulp in all).
inline float exp(float x) {
  x = x > 89.f ? 89.f : x;                             // exp(89) overflows
  x = x < -104.f ? -104.f : x;                         // exp(-104) is 0
  const float shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the sum's low bits are round(x / ln2)
  const float n = shifted - 12582912.f;
  const int32_t k = int32_t(te::detail::bits_of(shifted)) - 0x4b400000;
  float r = x - n * 0.693145752f;  // ln2, high part (few bits, so n * hi is exact)
  r = r - n * 1.42860677e-6f;      // ln2, low part
  float p = 0.00138145988f;
  p = p * r + 0.00836871658f;
  p = p * r + 0.041668389f;
  p = p * r + 0.166665211f;
  p = p * r + 0.49999994f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const int32_t half = k >> 1;
  const float a = te::detail::float_of(uint32_t(half + 127) << 23);
  const float b = te::detail::float_of(uint32_t(k - half + 127) << 23);
  return p * a * b;
}

}  // namespace te::cpu
