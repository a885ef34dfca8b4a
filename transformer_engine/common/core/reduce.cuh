// Sums over a warp and over a block, in a fixed order that depends on nothing but the block's shape. No atomics.
#pragma once

namespace te {

constexpr int kWarp = 32;

// Butterfly: every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// Sum over `warps` consecutive warps that share `scratch` (warps floats, one set for each group of warps); every
// thread gets the same bits. All threads of the block call it, with `groups` of equal size. The two barriers let the
// caller reuse scratch at once.
__device__ __forceinline__ float group_sum(float x, int warps, float* scratch) {
  x = warp_sum(x);
  if (warps == 1) return x;
  const int lane = threadIdx.x % kWarp;
  const int warp = (threadIdx.x / kWarp) % warps;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_sum(lane < warps ? scratch[lane] : 0.f);
  __syncthreads();
  return x;
}

}  // namespace te
