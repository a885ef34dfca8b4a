// A block's work on its columns of a row: loads them, computes their maximum and the sum of their exponentials, and
// overwrites them by the gradient. For cross_entropy.cu alone.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "core/device.h"
#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "ops/cross_entropy/cross_entropy_math.h"

namespace te::cross_entropy::cuda {

namespace {

constexpr float kLog2e = 1.4426950408889634f;

// 2^x in one instruction, which flushes subnormal results to 0; exp2f spends three more instructions on them. The
// kernel computes about as long as it reads.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Near 0, exponents are relative to a whole number close to top log2(e), which takes one multiplication and addition,
// rounded once; farther away no such number is close enough.
constexpr float kFar = 1 << 22;
__device__ __forceinline__ float near_origin(float top) { return rintf(top * kLog2e); }

// Calls f(exponent, factor): exp(x - top) is factor times 2 to the power of exponent(x).
template <class F>
__device__ __forceinline__ void measured_from(float top, F&& f) {
  const float origin = near_origin(top);
  if (fabsf(origin) < kFar) {
    f([=](float x) { return fmaf(x, kLog2e, -origin); }, exp2_of(fmaf(-top, kLog2e, origin)));
  } else {
    f([=](float x) { return (x - top) * kLog2e; }, 1.f);
  }
}

// A block's columns, in slots of N.
template <class T>
struct Part {
  static constexpr int N = kVec<T>;
  T* data;         // its first column
  int cols;        // of the row; 0 if the block begins beyond the row's end
  int slots;       // including a partial one
  int full_slots;  // full ones, read by one access

  // Slots from `first` on, at most `most`, of a row of `cols`.
  __device__ __forceinline__ static Part of(T* row, int64_t first, int64_t most, int64_t cols, bool wide) {
    const int own = int(max(int64_t(0), min(cols - first * N, most * N)));
    return {row + first * N, own, (own + N - 1) / N, wide ? own / N : 0};
  }

  // Columns beyond the row's end are -Inf, which changes no maximum and no sum of exponentials.
  __device__ __forceinline__ Packed<T, N> load_narrow(int i) const {
    float x[N];
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = i * N + j < cols ? to_float(data[i * N + j]) : -INFINITY;
    return narrow<T, N>(x);
  }
  __device__ __forceinline__ void copy_to(Packed<T, N>* slot, int i) const {
    if (i < full_slots) {
      __pipeline_memcpy_async(slot, data + i * N, sizeof(*slot));
    } else {
      *slot = load_narrow(i);
    }
  }
  __device__ __forceinline__ Packed<T, N> load(int i) const {
    return i < full_slots ? load_packed<T, N>(data + i * N) : load_narrow(i);
  }
  __device__ __forceinline__ void store(int i, const float (&y)[N]) const {
    if (i < full_slots) return store_packed<T, N>(data + i * N, narrow<T, N>(y));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (i * N + j < cols) data[i * N + j] = from_float<T>(y[j]);
    }
  }
  __device__ __forceinline__ void fill(float value) const {
    float y[N];
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = value;
    for (int i = int(threadIdx.x); i < slots; i += int(blockDim.x)) store(i, y);
  }
};

// The largest of slots, ignoring NaN; two elements at a time for 16-bit types.
template <class T, bool kPairs = sizeof(T) == 2>
struct Top {
  static constexpr int N = kVec<T>;
  float top = -INFINITY;
  __device__ __forceinline__ void take(const Packed<T, N>& slot) {
    float x[N];
    widen<T, N>(slot, x);
#pragma unroll
    for (int j = 0; j < N; ++j) top = fmaxf(top, x[j]);
  }
  __device__ __forceinline__ float value() const { return top; }
};
template <class T>
struct Top<T, true> {
  static constexpr int N = kVec<T>;
  using Pair = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
  static constexpr uint32_t kNothing = std::is_same_v<T, bf16> ? 0xff80ff80u : 0xfc00fc00u;  // -Inf twice
  uint32_t top = kNothing;
  __device__ __forceinline__ void take(const Packed<T, N>& slot) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      Pair a, b;
      memcpy(&a, &top, 4);
      memcpy(&b, &slot.v[i], 4);
      const Pair larger = __hmax2(a, b);
      memcpy(&top, &larger, 4);
    }
  }
  __device__ __forceinline__ float value() const {
    Packed<T, 2> pair;
    pair.v[0] = top;
    float x[2];
    widen<T, 2>(pair, x);
    return fmaxf(x[0], x[1]);
  }
};

// A thread's sum of exponentials while its columns are loaded, relative to the largest so far.
struct Running {
  float origin = -kFar, sum = 0.f;

  template <int N>
  __device__ __forceinline__ void take(const float (&x)[N], float top) {
    const float higher = near_origin(top);
    if (higher > origin) {
      sum *= exp2_of(origin - higher);
      origin = higher;
    }
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int j = 0; j < N; ++j) sums[j % 2] += exp2_of(fmaf(x[j], kLog2e, -origin));
    sum += sums[0] + sums[1];
  }
  // Relative to `top`, which no column exceeds. Only if that is near 0.
  __device__ __forceinline__ float from(float top) const {
    const float top_origin = near_origin(top);
    return sum * exp2_of(origin - top_origin) * exp2_of(fmaf(-top, kLog2e, top_origin));
  }
};

__device__ __forceinline__ float block_max(float x, float* scratch) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  x = lane < int(blockDim.x / kWarp) ? scratch[lane] : -INFINITY;
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// Statistics of a block's columns, accumulated as they are loaded; in a second pass if exponents are far from 0, or if
// the mean of all logits is needed. view[i]: slot i in its memory format.
template <class T, class View>
__device__ __forceinline__ Statistic statistic_of(const Part<T>& part, float smoothing, float* scratch,
                                                  const View& view) {
  constexpr int N = kVec<T>;
  const int step = int(blockDim.x);
  float largest = -INFINITY;
  Running running;
  int i = int(threadIdx.x);
  view.in_parts([&](int end) {
    for (; i < end; i += step) {
      const Packed<T, N> slot = view[i];
      float x[N];
      Top<T> top;
      widen<T, N>(slot, x);
      top.take(slot);
      largest = fmaxf(largest, top.value());
      if (smoothing == 0.f) running.take(x, top.value());
    }
  });
  const float top = block_max(largest, scratch), origin = origin_of(top);
  float sums[2] = {0.f, 0.f};
  if (smoothing == 0.f && fabsf(near_origin(origin)) < kFar) {
    sums[0] = running.from(origin);
  } else {
    measured_from(origin, [&](auto&& exponent, float factor) {
      for (int i = int(threadIdx.x); i < part.slots; i += step) {
        float x[N];
        widen<T, N>(view[i], x);
#pragma unroll
        for (int j = 0; j < N; ++j) sums[0] += exp2_of(exponent(x[j]));
        if (smoothing > 0.f && top != -INFINITY) {
#pragma unroll
          for (int j = 0; j < N; ++j) sums[1] += i * N + j < part.cols ? x[j] - top : 0.f;
        }
      }
      sums[0] *= factor;
    });
  }
  // A block has at least one warp, so that these are sums of full warps.
  float total[2] = {warp_sum(sums[0]), warp_sum(sums[1])};
  const int lane = threadIdx.x % kWarp;
  if (lane == 0) {
    scratch[kWarp + threadIdx.x / kWarp] = total[0];
    scratch[2 * kWarp + threadIdx.x / kWarp] = total[1];
  }
  __syncthreads();
  const bool is_warp = lane < int(blockDim.x / kWarp);
  return {top, warp_sum(is_warp ? scratch[kWarp + lane] : 0.f), NAN,
          warp_sum(is_warp ? scratch[2 * kWarp + lane] : 0.f)};
}

// own: the target's column in the part, or a column outside of it.
template <class T, class View>
__device__ __forceinline__ void write_gradient(const Part<T>& part, int64_t own, const Slope& slope, const View& view) {
  constexpr int N = kVec<T>;
  const int own_slot = own >= 0 && own < part.cols ? int(own) / N : -1;
  measured_from(slope.top, [&](auto&& exponent, float factor) {
    const float weight = slope.weight * factor;
    for (int i = int(threadIdx.x); i < part.slots; i += int(blockDim.x)) {
      float x[N], y[N];
      widen<T, N>(view[i], x);
#pragma unroll
      for (int j = 0; j < N; ++j) y[j] = fmaf(exp2_of(exponent(x[j])), weight, -slope.base);
      if (i == own_slot) {
#pragma unroll
        for (int j = 0; j < N; ++j) y[j] -= j == int(own) % N ? slope.hit : 0.f;
      }
      part.store(i, y);
    }
  });
}

// A block's slots in shared memory, copied in four parts; a thread waits for the bytes that it copied.
template <class T>
struct HeldView {
  using Slot = Packed<T, kVec<T>>;
  Slot* slots;
  int quarter, end;

  __device__ HeldView(const Part<T>& part, void* memory) : slots(static_cast<Slot*>(memory)), end(part.slots) {
    const int step = int(blockDim.x);
    quarter = (part.slots / step + 4) / 4 * step;
    int i = int(threadIdx.x);
#pragma unroll
    for (int p = 1; p <= 4; ++p) {
      for (; i < min(p * quarter, end); i += step) part.copy_to(slots + i, i);
      __pipeline_commit();
    }
  }
  // Calls take(first slot after the part) when a part has arrived.
  template <class Take>
  __device__ __forceinline__ void in_parts(Take&& take) const {
    __pipeline_wait_prior(3);
    take(min(quarter, end));
    __pipeline_wait_prior(2);
    take(min(2 * quarter, end));
    __pipeline_wait_prior(1);
    take(min(3 * quarter, end));
    __pipeline_wait_prior(0);
    take(end);
  }
  __device__ __forceinline__ Slot operator[](int i) const { return slots[i]; }
};

// Or read from global memory in each pass.
template <class T>
struct ReadView {
  const Part<T>& part;
  __device__ ReadView(const Part<T>& of, void*) : part(of) {}
  template <class Take>
  __device__ __forceinline__ void in_parts(Take&& take) const {
    take(part.slots);
  }
  __device__ __forceinline__ Packed<T, kVec<T>> operator[](int i) const { return part.load(i); }
};

}  // namespace

}  // namespace te::cross_entropy::cuda
