// The functions of ops/gemm/sm90/ptx.cuh on the emulated cluster of emulated_gpu.h.
#pragma once

#include "emulated_gpu.h"

#include "core/fp8.h"
#include "ops/gemm/sm90/layout.h"

namespace te::gemm::sm90 {

using testing::gpu::Cluster;

inline uint32_t shared_address(const void* p) { return Cluster::current().address(p); }
inline unsigned char* shared_memory() { return Cluster::current().shared(); }
inline uint32_t cluster_rank() { return Cluster::current().rank(); }
inline int read_thread_idx() { return int(threadIdx.x); }
inline void hide_value(uint32_t&) {}
inline void load_global(const void* from, uint32_t (&words)[4], bool live) {
  if (live) std::memcpy(words, from, sizeof(words));
}
inline void reduce_add(float* to, const float (&v)[4]) {
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0)
    throw std::logic_error("reduce_add on an address that is not a multiple of 16");
  for (int i = 0; i < 4; ++i) to[i] += v[i];
}
inline void cluster_sync() { Cluster::current().meet_cluster(); }

inline testing::gpu::Barrier& barrier_of(uint64_t* barrier) {
  return Cluster::current().barrier(cluster_rank(), shared_address(barrier));
}
inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  Cluster::current().new_barrier(shared_address(barrier), int(arrivals));
}
inline void barrier_init_fence() {}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  barrier_of(barrier).bytes += bytes;
  barrier_of(barrier).arrive();
}
inline void barrier_arrive(uint64_t* barrier, uint32_t rank) {
  Cluster& cluster = Cluster::current();
  if (cluster.ended(rank)) throw std::logic_error("an arrival at a CTA that has ended");
  cluster.barrier(rank, shared_address(barrier)).arrive();
}
// Waits for the phase with this parity; before a barrier's first phase, parity 1 counts as completed.
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  const testing::gpu::Barrier& b = barrier_of(barrier);
  Cluster::current().wait([&b, parity] { return (b.phase & 1u) != parity; });
}
inline void named_barrier(int id, int threads) { Cluster::current().meet(id, threads); }

inline void tma_load_to(unsigned first, unsigned last, void* to, const CUtensorMap* map, uint64_t* barrier,
                        BoxCoord at) {
  Cluster& cluster = Cluster::current();
  const uint32_t base = shared_address(to), full = shared_address(barrier);
  if (base % 1024 != 0) throw std::logic_error("a box at an address that is not a multiple of 1,024");
  const CUtensorMap matrix = *map;
  for (unsigned rank = first; rank <= last; ++rank) {
    cluster.later([&cluster, rank, base, full, matrix, at] {
      if (cluster.ended(rank)) throw std::logic_error("a copy to a block that has ended");
      const int element = matrix.element;
      for (int box_row = 0; box_row < matrix.box_rows; ++box_row) {
        for (int byte = 0; byte < 128; byte += element) {
          const int64_t r = int64_t(at.row) + box_row, c = int64_t(at.col) + byte / element;
          const bool inside = r >= 0 && r < matrix.rows && c >= 0 && c < matrix.cols;
          const int piece = (byte / 16) ^ (box_row % 8);
          unsigned char* to = cluster.at(rank, base + uint32_t(box_row * 128 + piece * 16 + byte % 16));
          if (inside) {
            std::memcpy(to, matrix.data + (r * matrix.pitch + c) * element, size_t(element));
          } else {
            std::memset(to, 0, size_t(element));
          }
        }
      }
      testing::gpu::Barrier& b = cluster.barrier(rank, full);
      b.bytes -= matrix.box_rows * 128;
      b.settle();
    });
  }
}
inline void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, BoxCoord at) {
  tma_load_to(cluster_rank(), cluster_rank(), to, map, barrier, at);
}
inline void tma_load_multicast(void* to, const CUtensorMap* map, uint64_t* barrier, BoxCoord at) {
  tma_load_to(0, 1, to, map, barrier, at);
}
// Read and written when it lands.
inline void bulk_load(void* to, const void* from, uint64_t* barrier, uint32_t bytes) {
  Cluster& cluster = Cluster::current();
  const unsigned rank = cluster_rank();
  const uint32_t base = shared_address(to), full = shared_address(barrier);
  if (base % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    throw std::logic_error("bulk_load of addresses or sizes that are not multiples of 16");
  }
  cluster.later([&cluster, rank, base, full, from, bytes] {
    if (cluster.ended(rank)) throw std::logic_error("a copy to a block that has ended");
    std::memcpy(cluster.at(rank, base), from, bytes);
    testing::gpu::Barrier& b = cluster.barrier(rank, full);
    b.bytes -= bytes;
    b.settle();
  });
}
// Rows of a box of results, swizzled in shared memory. Calls f(place of an element, its address or NULL if it is none).
template <class F>
void for_box_of_results(const CUtensorMap& map, unsigned rank, uint32_t base, ResultBox at, const F& f) {
  if (base % 1024 != 0) throw std::logic_error("a box at an address that is not a multiple of 1,024");
  if (map.cols * map.element % 16 != 0) throw std::logic_error("TMA would write beyond the last column");
  if (at.rows < 1 || at.rows > 64 || at.row < 0 || at.col < 0) throw std::logic_error("a box without rows");
  for (int row = 0; row < 64; ++row) {
    for (int byte = 0; byte < 128; byte += map.element) {
      const int64_t r = int64_t(at.row) + row, c = int64_t(at.col) + byte / map.element;
      const bool inside = row < at.rows && r < map.rows && c < map.cols;
      const uint32_t place = base + uint32_t(row * 128 + (byte / 16 ^ row % 8) * 16 + byte % 16);
      f(Cluster::current().at(rank, place), inside ? map.data + (r * map.pitch + c) * map.element : nullptr);
    }
  }
}
// Read at some time, and written at a later one.
inline void tma_store_results(const CUtensorMap* map, const void* from, ResultBox at) {
  Cluster& cluster = Cluster::current();
  const unsigned rank = cluster_rank();
  const uint32_t base = shared_address(from);
  const CUtensorMap matrix = *map;
  testing::gpu::Fiber& fiber = cluster.self();
  const size_t group = fiber.bulk.size() - 1;
  ++fiber.bulk[group].unread;
  ++fiber.bulk[group].unwritten;
  cluster.later([&cluster, &fiber, rank, base, matrix, at, group] {
    if (cluster.ended(rank)) throw std::logic_error("a copy from a block that has ended");
    --fiber.bulk[group].unread;
    std::vector<std::pair<unsigned char*, std::vector<unsigned char>>> read;
    for_box_of_results(matrix, rank, base, at, [&](const unsigned char* place, const unsigned char* element) {
      if (element != nullptr) read.push_back({const_cast<unsigned char*>(element), {place, place + matrix.element}});
    });
    cluster.later([&cluster, &fiber, rank, read, group] {
      if (cluster.ended(rank)) throw std::logic_error("a copy from a block that has ended");
      --fiber.bulk[group].unwritten;
      for (const auto& [to, bytes] : read) std::memcpy(to, bytes.data(), bytes.size());
    });
  });
}
inline void tma_load_results(void* to, const CUtensorMap* map, uint64_t* barrier, ResultBox at) {
  Cluster& cluster = Cluster::current();
  const unsigned rank = cluster_rank();
  const uint32_t base = shared_address(to), full = shared_address(barrier);
  const CUtensorMap matrix = *map;
  cluster.later([&cluster, rank, base, full, matrix, at] {
    if (cluster.ended(rank)) throw std::logic_error("a copy to a block that has ended");
    for_box_of_results(matrix, rank, base, at, [&](unsigned char* place, const unsigned char* element) {
      element != nullptr ? (void)std::memcpy(place, element, size_t(matrix.element))
                         : (void)std::memset(place, 0, size_t(matrix.element));
    });
    testing::gpu::Barrier& b = cluster.barrier(rank, full);
    b.bytes -= 64 * 128;
    b.settle();
  });
}
inline void bulk_commit() { Cluster::current().self().bulk.emplace_back(); }
template <int kPending>
void bulk_wait_for(int testing::gpu::BulkGroup::*left) {
  const testing::gpu::Fiber& fiber = Cluster::current().self();
  Cluster::current().wait([&fiber, left] {
    return std::all_of(fiber.bulk.begin(), fiber.bulk.end() - std::min<long>(1 + kPending, long(fiber.bulk.size())),
                       [left](const testing::gpu::BulkGroup& group) { return group.*left == 0; });
  });
}
template <int kPending>
void bulk_wait_read() {
  bulk_wait_for<kPending>(&testing::gpu::BulkGroup::unread);
}
inline void bulk_wait() { bulk_wait_for<0>(&testing::gpu::BulkGroup::unwritten); }
inline void fence_async_proxy() {}
inline void named_barrier_arrive(int id, int threads) { Cluster::current().arrive(id, threads); }
inline void compiler_fence() {}
inline float load_scale(const float* scale) { return *scale; }
inline float multiply_rn(float a, float b) { return std::fma(a, b, -0.f); }  // not contracted with a later sum

inline void wgmma_fence() {}
inline void wgmma_commit() { Cluster::current().self().mma.emplace_back(); }
// .sync.aligned: all lanes of a warp wait for the warp's products; those of other warps may still be in flight.
template <int kPending>
void wgmma_wait() {
  auto& groups = Cluster::current().self().mma;
  while (int(groups.size()) - 1 > kPending) {
    for (const std::function<void()>& product : groups.front()) product();
    groups.pop_front();
  }
  Cluster::current().meet_warp();
}
template <int kMmaAtoms, int kFragment>
void fence_accumulators(float (&)[kMmaAtoms][kFragment]) {}
template <int kFragment>
void fence_accumulators(float (&)[kFragment]) {}

// This thread's share of 64 rows of results: register 4 j + 2 h + c is row 16 warp + lane / 4 + 8 h, column
// 8 j + 2 (lane % 4) + c. Sums are float32, with ascending K; a GPU keeps fewer bits of FP8 products.
template <class Left, class Right, int kK, int kFragment>
void multiply(float (&d)[kFragment], uint64_t a, uint64_t b, bool left_mn, bool right_mn, bool add) {
  static_assert(sizeof(Left) == sizeof(Right));
  Cluster& cluster = Cluster::current();
  const unsigned rank = cluster.rank();
  const int warp = int(threadIdx.x % 128) / 32, lane = int(threadIdx.x % 32);
  float* accum = d;
  cluster.self().mma.back().push_back([&cluster, rank, accum, a, b, left_mn, right_mn, add, warp, lane] {
    const auto read = [&](auto value, uint64_t descriptor, bool is_mn_major, int mn, int k) {
      constexpr int kBytes = int(sizeof(value));
      const uint32_t at = testing::gpu::element_address(descriptor, is_mn_major, mn, k, kBytes);
      std::memcpy(&value, cluster.at(rank, at), kBytes);
      return to_float(value);
    };
    float left[2][kK], right[kK];
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < kK; ++i) left[h][i] = read(Left{}, a, left_mn, 16 * warp + lane / 4 + 8 * h, i);
    }
    for (int j = 0; j < kFragment / 4; ++j) {
      for (int c = 0; c < 2; ++c) {
        for (int i = 0; i < kK; ++i) right[i] = read(Right{}, b, right_mn, 8 * j + 2 * (lane % 4) + c, i);
        for (int h = 0; h < 2; ++h) {
          float& sum = accum[4 * j + 2 * h + c];
          if (!add) sum = 0.f;
          for (int i = 0; i < kK; ++i) sum = std::fma(left[h][i], right[i], sum);
        }
      }
    }
  });
}
template <class T, Major kLeft, Major kRight, int kFragment>
void mma(float (&d)[kFragment], uint64_t a, uint64_t b, bool add) {
  multiply<T, T, 16>(d, a, b, kLeft == Major::kMN, kRight == Major::kMN, add);
}
template <class Left>
void mma_fp8(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  multiply<Left, e4m3, 32>(d, a, b, false, false, add);
}

template <int kRegisters>
void warpgroup_reg_dealloc() {}
template <int kRegisters>
void warpgroup_reg_alloc() {}

}  // namespace te::gemm::sm90
