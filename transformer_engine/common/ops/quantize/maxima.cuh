// How a block of threads holds a tile of values in their own dtype, and the largest magnitudes of its vectors and rows,
// ignoring NaN: 16-bit values are compared in pairs.
#pragma once

#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "ops/quantize/fp8.h"
#if !defined(TE_EMULATED_GPU)  // the emulation of tests/cpp defines functions of the same names
#include "ops/quantize/ptx.cuh"
#endif

namespace te::quantize {

constexpr int kTile = 128;  // rows and columns
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = 8, kColumns = 8;  // of each thread

static_assert(kTile == kBlock && kThreads * kRows * kColumns == kTile * kTile);

template <class T>
using Vector = Packed<T, kColumns>;

// ---- values in their own dtype ----

constexpr uint32_t kMagnitudes = 0x7fff7fffu;

// The two 16-bit values of a word.
template <class T>
__device__ __forceinline__ float2 floats_of(uint32_t word) {
  if constexpr (std::is_same_v<T, bf16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    __half2 pair;
    memcpy(&pair, &word, 4);
    return __half22float2(pair);
  }
}

// Columns 2w and 2w + 1.
template <class T>
__device__ __forceinline__ float2 pair_of(const Vector<T>& x, int w) {
  if constexpr (kPaired<T, kColumns>) {
    return floats_of<T>(x.v[w]);
  } else {
    return make_float2(x.v[2 * w], x.v[2 * w + 1]);
  }
}

// largest = max(|largest|, |x|), element by element, ignoring NaN; signs as in larger_pair.
template <class T>
__device__ __forceinline__ void take_magnitudes(Vector<T>& largest, const Vector<T>& x) {
#pragma unroll
  for (int w = 0; w < int(sizeof(x.v) / sizeof(x.v[0])); ++w) {
    if constexpr (kPaired<T, kColumns>) {
      largest.v[w] = larger_pair<T>(largest.v[w], x.v[w]);
    } else {
      largest.v[w] = fmaxf(fabsf(largest.v[w]), fabsf(x.v[w]));
    }
  }
}

// The largest magnitude of the 8; for 16-bit values, a pair that contains it.
template <class T>
__device__ __forceinline__ auto largest_word(const Vector<T>& x) {
  if constexpr (kPaired<T, kColumns>) {
    return larger_pair<T>(larger_pair<T>(x.v[0], x.v[1]), larger_pair<T>(x.v[2], x.v[3]));
  } else {
    float largest = fabsf(x.v[0]);
#pragma unroll
    for (int j = 1; j < kColumns; ++j) largest = fmaxf(largest, fabsf(x.v[j]));
    return largest;
  }
}

template <class T>
__device__ __forceinline__ float largest_of(const Vector<T>& x) {
  if constexpr (kPaired<T, kColumns>) {
    const float2 pair = floats_of<T>(largest_word<T>(x) & kMagnitudes);
    return fmaxf(pair.x, pair.y);
  } else {
    return largest_word<T>(x);
  }
}

template <class T>
__device__ __forceinline__ void clear_from(Vector<T>& x, int n) {
  T elements[kColumns];
  memcpy(elements, &x, sizeof(x));
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    if (j >= n) elements[j] = T{};
  }
  memcpy(&x, elements, sizeof(x));
}

// The row whose maximum row_maxima leaves in a lane, and the lane of a half warp that has the maximum of row i.
__device__ __forceinline__ int row_of_lane(unsigned lane) {
  return int((lane / 8 % 2) * 2 + lane / 4 % 2 + (lane / 2 % 2) * 4);
}
__device__ __forceinline__ constexpr unsigned lane_of_row(int i) { return (i / 2 % 2) * 8 + (i % 2) * 4 + (i / 4) * 2; }

// Halves a list between lanes `distance` apart, each of which keeps one half.
template <int kHalf, class X, class Larger>
__device__ __forceinline__ void halve(X* x, int distance, Larger&& larger) {
  const bool upper = (threadIdx.x & unsigned(distance)) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const X kept = upper ? x[kHalf + i] : x[i], given = upper ? x[i] : x[kHalf + i];
    x[i] = larger(kept, __shfl_xor_sync(0xffffffffu, given, distance));
  }
}

// The largest magnitude of a row over a half warp's 16 threads, for the lanes of that row. All NaN may give NaN.
template <class T>
__device__ __forceinline__ float row_maxima(const Vector<T> (&values)[kRows]) {
  if constexpr (kPaired<T, kColumns>) {
    const auto larger = [](uint32_t a, uint32_t b) { return larger_pair<T>(a, b); };
    uint32_t x[kRows / 2];  // rows i and i + 4
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const uint32_t a = largest_word<T>(values[i]), b = largest_word<T>(values[i + 4]);
      x[i] = larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
    }
    halve<2>(x, 8, larger);
    halve<1>(x, 4, larger);
    x[0] = larger(x[0], __shfl_xor_sync(0xffffffffu, x[0], 2));
    x[0] = larger(x[0], __shfl_xor_sync(0xffffffffu, x[0], 1)) & kMagnitudes;
    const float2 rows = floats_of<T>(x[0]);
    return (threadIdx.x & 2) != 0 ? rows.y : rows.x;
  } else {
    const auto larger = [](float a, float b) { return fmaxf(a, b); };
    float x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = largest_word<T>(values[i]);
    halve<4>(x, 2, larger);
    halve<2>(x, 8, larger);
    halve<1>(x, 4, larger);
    return larger(x[0], __shfl_xor_sync(0xffffffffu, x[0], 1));
  }
}

}  // namespace te::quantize
