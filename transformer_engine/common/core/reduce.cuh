// Sums over a warp and over the threads of a row, in a fixed order that depends on the block's shape alone. No atomics.
#pragma once

namespace te {

constexpr int kWarp = 32;

// Butterfly: every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// kSums sums at once over the blockDim.x threads of a row; every thread of the row gets the same bits. Either
// blockDim.x is a power of two up to 32 (rows share a warp; no shared memory and no barrier), or it is a multiple of 32
// and the block is one row. All threads of the block call it. `scratch` holds 32 * kSums floats. There is one barrier
// only, so that consecutive sums alternate between two scratch buffers.
template <int kSums>
__device__ __forceinline__ void row_sum(float (&x)[kSums], float* scratch) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    if (offset < int(blockDim.x)) {
#pragma unroll
      for (int k = 0; k < kSums; ++k) x[k] += __shfl_xor_sync(0xffffffffu, x[k], offset);
    }
  }
  if (blockDim.x <= kWarp) return;
  const int lane = threadIdx.x % kWarp;
  const int warps = blockDim.x / kWarp;
#pragma unroll
  for (int k = 0; k < kSums; ++k) {
    if (lane == 0) scratch[k * kWarp + threadIdx.x / kWarp] = x[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kSums; ++k) x[k] = warp_sum(lane < warps ? scratch[k * kWarp + lane] : 0.f);
}

}  // namespace te
