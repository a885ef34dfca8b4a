// The intrinsics of CUDA that kernels with plain blocks use, on the emulated CTAs of emulated_gpu.h, so that their
// sources run on the host, one CTA after the other. Include it before them.
#pragma once

#include <algorithm>

#include "emulated_gpu.h"

// One block runs at a time, so static variables of a kernel are its shared memory; they begin as the last block left
// them.
#undef __shared__
#define __shared__ static
#define __noinline__

inline EmulatedIndex blockDim;
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct __half2 {
  te::fp16 x, y;
};
struct __nv_bfloat162 {
  te::bf16 x, y;
};

inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float __uint_as_float(uint32_t x) { return te::detail::float_of(x); }
inline uint32_t __float_as_uint(float x) { return te::detail::bits_of(x); }
inline float2 __half22float2(__half2 x) { return {te::to_float(x.x), te::to_float(x.y)}; }
inline __half2 __floats2half2_rn(float x, float y) {
  return {te::from_float<te::fp16>(x), te::from_float<te::fp16>(y)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {te::from_float<te::bf16>(x), te::from_float<te::bf16>(y)};
}
inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }

// Byte i of the result is the byte of y:x, x lowest, that nibble i of `which` names.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
  const uint64_t both = uint64_t(y) << 32 | x;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) out |= uint32_t(both >> (which >> (4 * i) & 7u) * 8 & 0xffu) << (8 * i);
  return out;
}
inline uint32_t __reduce_max_sync(unsigned mask, uint32_t x) {
  for (int step = 16; step > 0; step /= 2) x = std::max(x, __shfl_xor_sync(mask, x, step));
  return x;
}
inline unsigned __ballot_sync(unsigned mask, bool x) {
  unsigned bits = x ? 1u << threadIdx.x % 32 : 0u;
  for (int step = 16; step > 0; step /= 2) bits |= __shfl_xor_sync(mask, bits, step);
  return bits;
}
inline unsigned __match_any_sync(unsigned mask, int x) {
  unsigned same = 0;
  for (int lane = 0; lane < 32; ++lane) same |= unsigned(__shfl_sync(mask, x, lane) == x) << lane;
  return same;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
// Fibers switch in waits alone, so that these are atomic.
template <class T>
T atomicAdd(T* at, T x) {
  const T before = *at;
  *at += x;
  return before;
}
inline unsigned atomicCAS(unsigned* at, unsigned expected, unsigned x) {
  const unsigned before = *at;
  if (before == expected) *at = x;
  return before;
}
inline unsigned atomicMax(unsigned* at, unsigned x) {
  const unsigned before = *at;
  *at = std::max(before, x);
  return before;
}
using std::max;
using std::min;

namespace te::testing {

// kernel() in every thread of `blocks` blocks, in an order that is not theirs.
inline void run_blocks(unsigned blocks, unsigned threads, unsigned seed, const std::function<void()>& kernel) {
  blockDim.x = threads;
  std::vector<unsigned> order(blocks);
  for (unsigned i = 0; i < blocks; ++i) order[i] = i;
  std::mt19937 random(seed);
  std::shuffle(order.begin(), order.end(), random);
  for (const unsigned block : order) {
    gpu::Cluster cluster(1, threads, seed + block);
    cluster.run(block, blocks, kernel);
  }
}

}  // namespace te::testing
