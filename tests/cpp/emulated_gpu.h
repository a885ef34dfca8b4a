// An emulated cluster of Hopper CTAs on the host. It defines CUDA's names, and emulated_sm90.h those of
// ops/gemm/sm90/ptx.cuh, so that a test can include the kernels' sources and run them.
// - Threads are fibers of one thread, switched in a random order. Copies land at random later times, and tensor cores
//   read their operands as late as possible, so that a missing wait or an early release gives a wrong result. Shared
//   memory is NaN at first.
// - The layouts (TMA copies, wgmma operands and fragments, mbarrier) come from the tables of the PTX ISA, not from the
//   kernels' index functions. A missing proxy fence or wgmma fence is not detected.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/dtype.h"

#undef TE_WITH_CUDA  // CUDA's names would conflict; include this header first
#define TE_EMULATED_GPU
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct EmulatedIndex {
  unsigned x;
};
inline EmulatedIndex threadIdx, blockIdx, gridDim;
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

// A matrix of elements of one or two bytes, read in boxes of 128 bytes by `lines`.
struct alignas(64) CUtensorMap {
  const unsigned char* data;
  int64_t rows, cols, pitch;
  int box_rows, element;
  char rest[128 - 40];
};
static_assert(sizeof(CUtensorMap) == 128);

namespace te::testing::gpu {

constexpr size_t kStackBytes = 256 << 10;  // a kernel's parameters alone are 32 KiB
constexpr uint32_t kSharedBase = 0x410;    // the first address of shared memory: on 16 bytes, not on 1,024
constexpr size_t kSharedBytes = 227 << 10;
constexpr int kNamedBarriers = 16;

struct Barrier {
  int arrivals = 0, pending = 0;
  int64_t bytes = 0;
  uint32_t phase = 0;
  void settle() {
    if (pending != 0 || bytes != 0) return;
    ++phase;
    pending = arrivals;
  }
  void arrive() {
    if (--pending < 0) throw std::logic_error("a barrier has more arrivals than it counts");
    settle();
  }
};

// A barrier of fibers, each of which arrives once in a round.
struct Meeting {
  int arrived = 0, round = 0;
  std::set<unsigned> threads;
};

// Bulk copies from shared memory.
struct BulkGroup {
  int unread = 0, unwritten = 0;
};

struct Fiber {
  ucontext_t context;
  void* stack = nullptr;
  std::function<bool()> ready;  // the condition of its wait; empty: it can run
  bool done = false;
  uint32_t word = 0;                                   // its value in a warp shuffle
  std::deque<std::vector<std::function<void()>>> mma;  // committed groups, and the open one at the end
  std::vector<BulkGroup> bulk = {{}};                  // the open one at the end
};

class Cluster {
 public:
  Cluster(unsigned blocks, unsigned threads, unsigned seed)
      : threads_(threads), fibers_(blocks * threads), blocks_(blocks), random_(seed) {
    current_ = this;
  }
  ~Cluster() {
    for (Fiber& f : fibers_) {
      if (f.stack != nullptr) stacks_.push_back(f.stack);
    }
  }

  // Runs kernel() in every thread of all blocks until all are done; the first is block `first` of `all`.
  void run(unsigned first, unsigned all, const std::function<void()>& kernel) {
    kernel_ = &kernel;
    first_ = first;
    gridDim.x = all;
    for (BlockState& b : blocks_) b.shared.assign(kSharedBytes, 0xff);
    for (Fiber& f : fibers_) {
      f.stack = any_stack();
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack;
      f.context.uc_stack.ss_size = kStackBytes;
      f.context.uc_link = &scheduler_;
      f.mma.emplace_back();
      makecontext(&f.context, &Cluster::enter, 0);
    }
    schedule();
  }

  static Cluster& current() { return *current_; }
  unsigned rank() const { return blockIdx.x - first_; }
  unsigned size() const { return unsigned(blocks_.size()); }
  Fiber& self() { return fibers_[rank() * threads_ + threadIdx.x]; }

  // Waits until condition() holds; at times other fibers run even if it holds already.
  void wait(std::function<bool()> condition) {
    if (condition() && random_() % 4 != 0) return;
    self().ready = std::move(condition);
    swapcontext(&self().context, &scheduler_);
  }
  void come_to(Meeting& m, unsigned count) {
    if (++m.arrived < int(count)) return;
    m.arrived = 0;
    m.threads.clear();
    ++m.round;
  }
  void meet_at(Meeting& m, unsigned count) {
    const int round = m.round;
    come_to(m, count);
    wait([&m, round] { return m.round != round; });
  }
  // Arrives at a numbered barrier of the CTA without waiting.
  void arrive(int id, int count) {
    Meeting& m = blocks_[rank()].meetings[id];
    if (!m.threads.insert(threadIdx.x).second) throw std::logic_error("a thread arrives twice in a round of a barrier");
    come_to(m, unsigned(count));
  }
  void meet(int id, int count) {
    Meeting& m = blocks_[rank()].meetings[id];
    const int round = m.round;
    arrive(id, count);
    wait([&m, round] { return m.round != round; });
  }
  void meet_block() { meet(0, int(threads_)); }
  void meet_warp() { meet_at(blocks_[rank()].meetings[kNamedBarriers + int(threadIdx.x / 32)], 32); }
  void meet_cluster() { meet_at(meeting_, unsigned(fibers_.size())); }
  // By the 32 lanes of a warp: returns the word of lane `from`.
  uint32_t exchange(uint32_t word, unsigned from) {
    self().word = word;
    meet_warp();
    const uint32_t got = fibers_[rank() * threads_ + threadIdx.x / 32 * 32 + from].word;
    meet_warp();
    return got;
  }

  unsigned char* shared() { return blocks_[rank()].shared.data(); }
  uint32_t address(const void* p) { return kSharedBase + uint32_t(static_cast<const unsigned char*>(p) - shared()); }
  unsigned char* at(unsigned rank, uint32_t address) {
    if (address < kSharedBase || address - kSharedBase >= kSharedBytes) throw std::out_of_range("shared memory");
    return blocks_[rank].shared.data() + (address - kSharedBase);
  }
  Barrier& barrier(unsigned rank, uint32_t address) {
    const auto found = blocks_[rank].barriers.find(address);
    if (found == blocks_[rank].barriers.end()) throw std::logic_error("a barrier was not initialised");
    return found->second;
  }
  void new_barrier(uint32_t address, int arrivals) {
    const bool fresh = blocks_[rank()].barriers.emplace(address, Barrier{arrivals, arrivals, 0, 0}).second;
    if (!fresh) throw std::logic_error("a barrier was initialised twice");
  }
  void later(std::function<void()> copy) { copies_.push_back(std::move(copy)); }
  bool ended(unsigned rank) const {
    return std::any_of(fibers_.begin() + rank * threads_, fibers_.begin() + (rank + 1) * threads_,
                       [](const Fiber& f) { return f.done; });
  }

 private:
  struct BlockState {
    std::vector<unsigned char> shared;
    std::map<uint32_t, Barrier> barriers;
    std::map<int, Meeting> meetings;
  };

  static void* any_stack() {
    if (!stacks_.empty()) {
      void* kept = stacks_.back();
      stacks_.pop_back();
      return kept;
    }
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* made = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, kFlags, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    return made;
  }

  static void enter() {
    (*current_->kernel_)();
    current_->self().done = true;
  }

  void resume(unsigned which) {
    threadIdx.x = which % threads_;
    blockIdx.x = first_ + which / threads_;
    swapcontext(&scheduler_, &fibers_[which].context);
  }

  void schedule() {
    std::vector<unsigned> order(fibers_.size());
    for (unsigned i = 0; i < order.size(); ++i) order[i] = i;
    unsigned held = random_() % size(), passes = random_() % 400;  // one CTA is delayed, from the start too
    for (bool alive = true; alive;) {
      std::shuffle(order.begin(), order.end(), random_);
      alive = false;
      bool moved = false;
      if (passes > 0 && --passes == 0 && random_() % 2 == 0) held = random_() % size(), passes = random_() % 100;
      for (const unsigned which : order) {
        Fiber& f = fibers_[which];
        if (f.done) continue;
        alive = true;
        if ((passes > 0 && which / threads_ == held) || (f.ready && !f.ready())) continue;
        f.ready = nullptr;
        moved = true;
        resume(which);
      }
      // Copies land in any order, late rather than early.
      while (!copies_.empty() && (!moved || random_() % 3 == 0)) {
        const size_t which = random_() % copies_.size();
        const std::function<void()> copy = std::move(copies_[which]);
        copies_.erase(copies_.begin() + long(which));
        copy();
        moved = true;
      }
      if (!moved && std::exchange(passes, 0) > 0) continue;
      if (alive && !moved) throw std::runtime_error("every thread waits and no copy is in flight");
    }
    if (!copies_.empty()) throw std::logic_error("a CTA ended with copies in flight");
    for (const BlockState& b : blocks_) {
      for (const auto& [id, meeting] : b.meetings) {
        if (meeting.arrived != 0) throw std::logic_error("a CTA ended with an incomplete barrier");
      }
    }
    for (Fiber& f : fibers_) {
      if (f.mma.size() != 1 || !f.mma.front().empty()) throw std::logic_error("a thread ended with products in flight");
    }
  }

  static inline Cluster* current_ = nullptr;
  static inline std::vector<void*> stacks_;  // of earlier clusters: new pages would cost more than most kernels
  unsigned threads_, first_ = 0;
  std::vector<Fiber> fibers_;
  std::vector<BlockState> blocks_;
  std::mt19937 random_;
  ucontext_t scheduler_;
  const std::function<void()>* kernel_ = nullptr;
  Meeting meeting_;
  std::vector<std::function<void()>> copies_;
};

// The address of an operand's element by its descriptor; `mn` and `k` count from the descriptor's start. The swizzle
// permutes the 16-byte pieces of each 128-byte row by the row's number modulo 8, which is address bits 7 to 9.
inline uint32_t element_address(uint64_t descriptor, bool transposed, int mn, int k, int bytes = 2) {
  const auto field = [&](int bit) { return uint32_t(descriptor >> bit & 0x3fff) << 4; };
  const uint32_t start = field(0), leading = field(16), stride = field(32);
  if (descriptor >> 62 != 1) throw std::logic_error("a descriptor without 128-byte swizzle");
  const uint32_t plain = transposed ? start + uint32_t(mn / 64) * leading + uint32_t(k / 8) * stride +
                                          uint32_t(k % 8) * 128 + uint32_t(mn % 64) * 2
                                    : start + uint32_t(mn / 8) * stride + uint32_t(mn % 8) * 128 + uint32_t(k * bytes);
  return plain ^ (plain >> 7 & 7) << 4;
}

}  // namespace te::testing::gpu

inline void __syncthreads() { te::testing::gpu::Cluster::current().meet_block(); }
inline void __syncwarp() { te::testing::gpu::Cluster::current().meet_warp(); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  static_assert(sizeof(T) == 4);
  uint32_t word;
  std::memcpy(&word, &value, 4);
  word = te::testing::gpu::Cluster::current().exchange(word, unsigned(from));
  std::memcpy(&value, &word, 4);
  return value;
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
  return __shfl_sync(mask, value, int(threadIdx.x % 32) ^ bits);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
  const int lane = int(threadIdx.x % 32);
  return __shfl_sync(mask, value, lane < step ? lane : lane - step);
}
