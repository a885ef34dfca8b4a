// Hopper's tensor cores, bulk tensor copies and barriers as functions, one instruction each. They say nothing of what
// is multiplied; mainloop_bf16.cuh does.
#pragma once

#include <cuda.h>

#include "ops/gemm/sm90/layout.h"

namespace te::gemm::wgmma {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers in shared memory ----

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
// Makes fresh barriers known to the copies too.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// One arrival, which the phase's bytes go with.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// At the same barrier of block `rank` of the cluster. Not `.release.cluster`: that is a GPU-wide MEMBAR in every block
// of the depth.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// A barrier of `threads` threads, apart from __syncthreads().
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- threads and global memory ----

// threadIdx.x, which the compiler asks for anew here: what follows from it alone would otherwise be kept in registers
// all through a kernel, or in local memory.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
// 16 bytes, where they are `live`. In the order that they are written in: a compiler would put each load before its
// use, and the warp would wait for each.
__device__ __forceinline__ void load_now(const void* from, uint32_t (&words)[4], bool live) {
  asm volatile(
      "{\n"
      ".reg .pred live;\n"
      "setp.ne.b32 live, %5, 0;\n"
      "@live ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(from), "r"(int(live)));
}

// Adds to 16 bytes of floats in memory, and waits for nothing; rounded to nearest, but what is subnormal becomes 0.
__device__ __forceinline__ void add_to(float* to, const float (&v)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
}

// ---- the cluster ----

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// All threads of a cluster meet, and what each did before it is done: arrivals at the other block's barriers, too.
__device__ __forceinline__ void cluster_meeting() {
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

// The box at (col, row) of a matrix into shared memory, zeros where the matrix ends; its bytes arrive at `barrier`.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, BoxAt at) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.col), "r"(at.row)
      : "memory");
}
// The same, to the same place in both blocks of the cluster, each of whose barriers gets the bytes.
__device__ __forceinline__ void copy_box_to_both(void* to, const CUtensorMap* map, uint64_t* barrier, BoxAt at) {
  static_assert(kCluster == 2);
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(at.col), "r"(at.row), "h"(uint16_t(3))
      : "memory");
}
// What this thread wrote to shared memory comes before what copies and tensor cores do there next.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tensor cores ----

__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving accumulators across: they change while wgmma runs, unseen by it.
template <int kSlabs, int kFragment>
__device__ __forceinline__ void hold(float (&d)[kSlabs][kFragment]) {
#pragma unroll
  for (auto& slab : d) {
#pragma unroll
    for (float& value : slab) asm volatile("" : "+f"(value)::"memory");
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
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(kLeft == Major::kAcross)), "n"(int(kRight == Major::kAcross)))
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
      : "l"(a), "l"(b), "r"(int(add)), "n"(int(kLeft == Major::kAcross)), "n"(int(kRight == Major::kAcross)))

// d = a b, or d += a b where `add`: 64 x 128 or 64 x 256 results, 16 of the depth.
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

#undef TE_WGMMA_128
#undef TE_WGMMA_256
#undef TE_WGMMA_32
#undef TE_WGMMA_8

// ---- registers ----

// By all threads of a warpgroup: what they give back, others of the block may take.
template <int kRegisters>
__device__ __forceinline__ void shrink_to() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_to() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace te::gemm::wgmma
