// Inline PTX of the quantize kernels, one function each. tests/cpp/emulated_quantize.h defines the same functions for
// the host.
#pragma once

#include <type_traits>

#include "core/dtype.h"

namespace te::quantize {

// The larger magnitude of each of two pairs. Its sign is arbitrary: a mask (kMagnitudes) removes it. Of a NaN and a
// number it is the number.
template <class T>
__device__ __forceinline__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t larger;
  if constexpr (std::is_same_v<T, bf16>) {
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

// Predicated, since a branch around each of many stores costs more than the store.
__device__ __forceinline__ void store_if(bool wanted, uint8_t* target, uint2 x) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {%1, %2};}" ::"l"(
                   __cvta_generic_to_global(target)),
               "r"(x.x), "r"(x.y), "r"(unsigned(wanted))
               : "memory");
}
__device__ __forceinline__ void store_if(bool wanted, uint8_t* target, uint4 x) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.u32 [%0], {%1, %2, %3, %4};}" ::"l"(
                   __cvta_generic_to_global(target)),
               "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(unsigned(wanted))
               : "memory");
}

// Copies 16 bytes from global to shared memory without registers, and waits for all copies of this thread.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(unsigned(__cvta_generic_to_shared(shared))),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Shared memory whose size is set at launch.
__device__ __forceinline__ void* dynamic_shared() {
  extern __shared__ uint4 dynamic[];
  return dynamic;
}

}  // namespace te::quantize
