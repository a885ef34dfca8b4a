// The functions of ops/quantize/ptx.cuh on the emulated CTAs of emulated_gpu.h. Include it before the kernels.
#pragma once

#include "emulated_intrinsics.h"

#include "ops/quantize/fp8.h"

namespace te::quantize {

// PTX: max.xorsign.abs without .NaN; of two NaN a NaN.
template <class T>
uint32_t larger_pair(uint32_t a, uint32_t b) {
  const uint32_t infinity = std::is_same_v<T, bf16> ? 0x7f80 : 0x7c00;
  const auto larger = [&](uint32_t x, uint32_t y) {
    const uint32_t sign = (x ^ y) & 0x8000, left = x & 0x7fff, right = y & 0x7fff;
    if (left > infinity && right > infinity) return uint32_t(0x7fff);
    return sign | (left > infinity ? right : right > infinity ? left : std::max(left, right));
  };
  return larger(a & 0xffff, b & 0xffff) | larger(a >> 16, b >> 16) << 16;
}

template <class Word>
void store_if(bool wanted, uint8_t* target, Word x) {
  if (!wanted) return;
  if (reinterpret_cast<uintptr_t>(target) % sizeof(Word) != 0) throw std::logic_error("a store at an odd address");
  std::memcpy(target, &x, sizeof(Word));
}

inline void copy_async_16(void* shared, const void* global) { std::memcpy(shared, global, 16); }
inline void wait_for_copies() {}
inline void* dynamic_shared() { return testing::gpu::Cluster::current().shared(); }

template <bool kE5m2>
uint32_t to_fp8_word(float a, float b, float c, float d) {
  return to_fp8<kE5m2>(a) | to_fp8<kE5m2>(b) << 8 | to_fp8<kE5m2>(c) << 16 | to_fp8<kE5m2>(d) << 24;
}

}  // namespace te::quantize
