// Hopper's FP8 tensor core product, and what its loop needs beside ptx.cuh: half a barrier, a copy of plain bytes and
// loads of scales. One instruction each.
#pragma once

#include "core/fp8.h"
#include "ops/gemm/sm90/ptx.cuh"

namespace te::gemm::wgmma {

// Arrives at a barrier of `threads` threads that others wait at.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A multiple of 16 bytes into shared memory, both ends on 16 bytes; they arrive at `barrier`.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, uint64_t* barrier, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ float load_scale(const float* scale) { return __ldg(scale); }
// Rounded before anything is added to it.
__device__ __forceinline__ float product_of(float a, float b) { return __fmul_rn(a, b); }

// Keeps the compiler from moving loads across.
__device__ __forceinline__ void keep_order() { asm volatile("" ::: "memory"); }

template <int kFragment>
__device__ __forceinline__ void hold(float (&d)[kFragment]) {
#pragma unroll
  for (float& value : d) asm volatile("" : "+f"(value)::"memory");
}

#define TE_WGMMA_8(i)                                                                                   \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define TE_WGMMA_FP8(left)                                                                                            \
  asm volatile(                                                                                                       \
      "{\n"                                                                                                           \
      ".reg .pred add;\n"                                                                                             \
      "setp.ne.b32 add, %66, 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." left                                                             \
      ".e4m3 {"                                                                                                       \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                                \
      "}, %64, %65, add, 1, 1;\n"                                                                                     \
      "}\n"                                                                                                           \
      : TE_WGMMA_8(0), TE_WGMMA_8(8), TE_WGMMA_8(16), TE_WGMMA_8(24), TE_WGMMA_8(32), TE_WGMMA_8(40), TE_WGMMA_8(48), \
        TE_WGMMA_8(56)                                                                                                \
      : "l"(a), "l"(b), "r"(int(add)))

// d = a b, or d += a b where `add`: 64 x 128 results, 32 of the depth, along which both operands lie.
template <class Left>
__device__ __forceinline__ void mma_fp8(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  static_assert(std::is_same_v<Left, e4m3> || std::is_same_v<Left, e5m2>);
  if constexpr (std::is_same_v<Left, e4m3>) {
    TE_WGMMA_FP8("e4m3");
  } else {
    TE_WGMMA_FP8("e5m2");
  }
}

#undef TE_WGMMA_FP8
#undef TE_WGMMA_8

}  // namespace te::gemm::wgmma
