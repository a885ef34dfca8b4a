// Copies of a block: bulk copies through shared memory, driven by its first warps. The other warps do what bulk copies
// cannot: ragged ends, members on odd addresses, tails. Knows no pages.
#pragma once

#include "core/device.h"
#include "core/reduce.cuh"
#include "ops/stash/stash_layout.h"

namespace te::stash {

constexpr int kThreads = 256;
// Warps that drive copies, each for a part of the tiles. With one warp, starting a tile takes longer than moving it at
// the memory's speed with 48 blocks (0.82 of a copy in place of 0.86 at 256 MiB; tiles of half the size halve it).
// Loading more tiles ahead is slower: 0.78 with 4 of 6, or with 3 x 2 of 4.
constexpr int kPipes = 2;
constexpr int kBulkThreads = kPipes * kWarp;
constexpr int kHandThreads = kThreads - kBulkThreads;  // the others
constexpr int kStages = 6, kAhead = 3;                 // tiles of a warp in shared memory; loaded ahead
constexpr int kStageBytes = kPipes * kStages * int(kTile);
constexpr int kJobs = 2 * kWarp;  // a power of 2: for the next 32 tiles and some of the last ones

// One bulk copy. Addresses and bytes are multiples of 16; bytes may be 0.
struct Job {
  const unsigned char* from;
  unsigned char* to;
  uint32_t bytes;
};

struct Pipe {
  uint64_t full[kStages];
  Job jobs[kJobs];
};

namespace ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// Makes initialized barriers visible to the copy engine.
__device__ __forceinline__ void fence_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
}

__device__ __forceinline__ void bulk_in(void* stage, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(stage)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_out(void* to, const void* stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(shared_address(stage)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all groups but the newest kPending have read shared memory.
template <int kPending>
__device__ __forceinline__ void wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace ptx

// Copies `tiles` tiles. The first warps take tiles in turn; the lanes of a warp prepare the jobs of 32 tiles at once,
// and its first lane starts the copies. A job is made in two steps, 32 tiles apart, to hide the latency of memory:
// find(i) reads the id of a page, job_of(found) uses it. Returns after all writes are done.
template <class Find, class JobOf>
__device__ __forceinline__ void copy_bulk(Pipe (&pipes)[kPipes], unsigned char* stages, int tiles, Find&& find,
                                          JobOf&& job_of) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int count = (tiles + kPipes - 1 - warp) / kPipes;
  Pipe& pipe = pipes[warp];
  stages += warp * kStages * kTile;
  decltype(find(0)) found{};
  if (lane < count) found = find(lane * kPipes + warp);
  if (lane == 0) {
    for (int stage = 0; stage < kStages; ++stage) ptx::init_barrier(&pipe.full[stage]);
    ptx::fence_barriers();
  }
  int in = 0, out = 0;
  uint32_t parity = 0;
  for (int i = 0; i < count + kAhead; ++i) {
    if (i % kWarp == 0 && i < count) {
      __syncwarp();  // the first lane has arrived: it needs no job older than kAhead tiles
      if (i + lane < count) pipe.jobs[(i + lane) % kJobs] = job_of(found);
      if (i + kWarp + lane < count) found = find((i + kWarp + lane) * kPipes + warp);
      __syncwarp();
    }
    if (lane != 0) continue;
    if (i < count) {
      // The stage was last used kStages tiles ago, and copies up to tile i - kAhead - 1 are committed.
      ptx::wait_read<kStages - kAhead - 1>();
      const Job& job = pipe.jobs[i % kJobs];
      ptx::expect(&pipe.full[in], job.bytes);
      if (job.bytes != 0) ptx::bulk_in(stages + in * kTile, job.from, job.bytes, &pipe.full[in]);
      in = in + 1 == kStages ? 0 : in + 1;
    }
    if (i >= kAhead) {
      const Job& job = pipe.jobs[(i - kAhead) % kJobs];
      ptx::wait(&pipe.full[out], parity);
      if (job.bytes != 0) ptx::bulk_out(job.to, stages + out * kTile, job.bytes);
      ptx::commit();
      out = out + 1 == kStages ? 0 : out + 1;
      if (out == 0) parity ^= 1;
    }
  }
  if (lane == 0) ptx::wait_written();
  __syncwarp();
}

// ---- for the other warps: `thread` of kHandThreads ----

template <class Word>
__device__ __forceinline__ int64_t copy_words(unsigned char* to, const unsigned char* from, int64_t bytes, int thread) {
  const int64_t words = bytes / int64_t(sizeof(Word));
  for (int64_t i = thread; i < words; i += kHandThreads) {
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
  }
  return words * int64_t(sizeof(Word));
}

// For any addresses and sizes.
__device__ __forceinline__ void copy_by_hand(unsigned char* to, const unsigned char* from, int64_t bytes, int thread) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  int64_t done = 0;
  if (bits % 16 == 0) {
    done = copy_words<uint4>(to, from, bytes, thread);
  } else if (bits % 8 == 0) {
    done = copy_words<uint2>(to, from, bytes, thread);
  } else if (bits % 4 == 0) {
    done = copy_words<uint32_t>(to, from, bytes, thread);
  } else if (bits % 2 == 0) {
    done = copy_words<uint16_t>(to, from, bytes, thread);
  }
  for (int64_t i = done + thread; i < bytes; i += kHandThreads) to[i] = from[i];
}

// Writes `byte` to all bytes, with `threads` threads.
__device__ __forceinline__ void fill(unsigned char* to, int64_t bytes, uint32_t byte, int thread, int threads) {
  const int64_t head = least(bytes, int64_t(-reinterpret_cast<intptr_t>(to) & 15));
  const int64_t vectors = (bytes - head) / 16, end = head + vectors * 16;
  const uint32_t word = byte * 0x01010101u;
  for (int64_t i = thread; i < vectors; i += threads) {
    reinterpret_cast<uint4*>(to + head)[i] = make_uint4(word, word, word, word);
  }
  for (int64_t i = thread; i < head; i += threads) to[i] = static_cast<unsigned char>(byte);
  for (int64_t i = end + thread; i < bytes; i += threads) to[i] = static_cast<unsigned char>(byte);
}

}  // namespace te::stash
