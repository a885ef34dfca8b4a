// Hopper's tensor cores, bulk copies and barriers as functions, one PTX instruction each. tests/cpp/emulated_sm90.h
// defines the same functions for the host.
#pragma once

#include <cuda.h>

#include "core/fp8.h"
#include "ops/gemm/sm90/layout.h"

namespace te::gemm::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory ----

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One arrival, and the bytes that the phase waits for.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Arrives at the same barrier of CTA `rank` of the cluster. Not `.release.cluster`: that compiles to a GPU-wide MEMBAR
// in each k_block.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// A barrier of `threads` threads, apart from __syncthreads().
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at a named barrier without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- threads, registers and global memory ----

// threadIdx.x, read at each call: values that depend on it alone would otherwise stay in registers, or in local memory,
// for the whole kernel.
__device__ __forceinline__ int read_thread_idx() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// The compiler computes values that depend on this one again after it, rather than keep them in registers.
__device__ __forceinline__ void hide_value(uint32_t& value) { asm volatile("" : "+r"(value)); }
// 16 bytes, if `live`. Volatile, so that loads are issued in program order: the compiler would place each load directly
// before its use, and the warp would wait for each.
__device__ __forceinline__ void load_global(const void* from, uint32_t (&words)[4], bool live) {
  asm volatile(
      "{\n"
      ".reg .pred live;\n"
      "setp.ne.b32 live, %5, 0;\n"
      "@live ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(from), "r"(int(live)));
}

// Adds 4 floats to memory without waiting; rounded to nearest, subnormal results become 0.
__device__ __forceinline__ void reduce_add(float* to, const float (&v)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

__device__ __forceinline__ float load_scale(const float* scale) { return __ldg(scale); }
// Rounded; never contracted into a fused multiply-add.
__device__ __forceinline__ float multiply_rn(float a, float b) { return __fmul_rn(a, b); }
// Keeps the compiler from moving loads across.
__device__ __forceinline__ void compiler_fence() { asm volatile("" ::: "memory"); }

// ---- the cluster ----

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// A barrier of all threads of the cluster; earlier arrivals at the other CTA's barriers have completed after it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive;\n"
      "barrier.cluster.wait;\n" ::
          : "memory");
}

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(kSharedAlignment) unsigned char memory[];
  return memory;
}

// ---- copies ----

// Loads the box at (col, row) of a matrix into shared memory, with zeros beyond the matrix; its bytes arrive at
// `barrier`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, BoxCoord at) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.col), "r"(at.row)
      : "memory");
}
// The same into both CTAs of the cluster, at the same shared address; each CTA's barrier counts its bytes.
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, BoxCoord at) {
  static_assert(kCluster == 2);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.col), "r"(at.row), "h"(uint16_t(3))
      : "memory");
}
// Loads a multiple of 16 bytes into shared memory, both ends aligned to 16 bytes; they arrive at `barrier`.
__device__ __forceinline__ void bulk_load(void* to, const void* from, uint64_t* barrier, uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Boxes of results; `map` is a result_map(). Its second coordinate counts kMmaAtomM rows that end at the row before the
// third one, so that the rows after the box's own ones are beyond the map: not written, and read as zeros.
__device__ __forceinline__ void tma_store_results(const CUtensorMap* map, const void* from, ResultBox at) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(at.col), "r"(kMmaAtomM - at.rows), "r"(at.row + at.rows)
               : "memory");
}
__device__ __forceinline__ void tma_load_results(void* to, const CUtensorMap* map, uint64_t* barrier, ResultBox at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.col), "r"(kMmaAtomM - at.rows), "r"(at.row + at.rows)
      : "memory");
}
// The copies since the last commit become this thread's next group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending of this thread's groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Until all copies of this thread have completed.
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Orders this thread's writes to shared memory before later TMA copies and MMAs.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tensor cores ----

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accumulators across: wgmma changes them asynchronously.
template <int kFragment>
__device__ __forceinline__ void fence_accumulators(float (&d)[kFragment]) {
#pragma unroll
  for (float& value : d) asm volatile("" : "+f"(value)::"memory");
}
template <int kMmaAtoms, int kFragment>
__device__ __forceinline__ void fence_accumulators(float (&d)[kMmaAtoms][kFragment]) {
#pragma unroll
  for (auto& atom : d) {
#pragma unroll
    for (float& value : atom) asm volatile("" : "+f"(value)::"memory");
  }
}

#define TE_WGMMA_8(i)                                                                                   \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define TE_WGMMA_32(i) TE_WGMMA_8(i), TE_WGMMA_8((i) + 8), TE_WGMMA_8((i) + 16), TE_WGMMA_8((i) + 24)
#define TE_WGMMA_128(type)                                                               \
  asm volatile(                                                                          \
      "{\n"                                                                              \
      ".reg .pred add;\n"                                                                \
      "setp.ne.b32 add, %66, 0;\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                       \
      " {"                                                                               \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, %64, %65, add, 1, 1, %67, %68;\n"                                              \
      "}\n"                                                                              \
      : TE_WGMMA_32(0), TE_WGMMA_32(32)                                                  \
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(kLeft == Major::kMN)), "n"(int(kRight == Major::kMN)))
#define TE_WGMMA_256(type)                                                                             \
  asm volatile(                                                                                        \
      "{\n"                                                                                            \
      ".reg .pred add;\n"                                                                              \
      "setp.ne.b32 add, %130, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type                                     \
      " {"                                                                                             \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                         \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "               \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "               \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "               \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "               \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "               \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "   \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
      "}, %128, %129, add, 1, 1, %131, %132;\n"                                                        \
      "}\n"                                                                                            \
      : TE_WGMMA_32(0), TE_WGMMA_32(32), TE_WGMMA_32(64), TE_WGMMA_32(96)                              \
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(kLeft == Major::kMN)), "n"(int(kRight == Major::kMN)))

// d = a b, or d += a b if `add`: 64 x 128 or 64 x 256 results, 16 of K.
template <class T, Major kLeft, Major kRight, int kFragment>
__device__ __forceinline__ void mma(float (&d)[kFragment], uint64_t a, uint64_t b, bool add) {
  static_assert(std::is_same_v<T, bf16> || std::is_same_v<T, fp16>);
  static_assert(kFragment == 64 || kFragment == 128);
  if constexpr (std::is_same_v<T, bf16> && kFragment == 64) {
    TE_WGMMA_128("bf16");
  } else if constexpr (std::is_same_v<T, bf16>) {
    TE_WGMMA_256("bf16");
  } else if constexpr (kFragment == 64) {
    TE_WGMMA_128("f16");
  } else {
    TE_WGMMA_256("f16");
  }
}

#define TE_WGMMA_FP8(left)                                                               \
  asm volatile(                                                                          \
      "{\n"                                                                              \
      ".reg .pred add;\n"                                                                \
      "setp.ne.b32 add, %66, 0;\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." left                                \
      ".e4m3 {"                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"   \
      "}, %64, %65, add, 1, 1;\n"                                                        \
      "}\n"                                                                              \
      : TE_WGMMA_32(0), TE_WGMMA_32(32)                                                  \
      : "l"(a), "l"(b), "r"(int(add)))

// d = a b, or d += a b if `add`: 64 x 128 results, 32 of K; both operands are K-major.
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
#undef TE_WGMMA_128
#undef TE_WGMMA_256
#undef TE_WGMMA_32
#undef TE_WGMMA_8

// ---- register allocation ----

// By all threads of a warpgroup; registers that one warpgroup frees can be allocated by another of the CTA.
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_dealloc() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void warpgroup_reg_alloc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace te::gemm::sm90
