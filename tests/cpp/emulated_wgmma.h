// The functions of ops/gemm/wgmma.cuh on the emulated cluster of emulated_gpu.h.
#pragma once

#include "emulated_gpu.h"
#include "ops/gemm/wgmma_layout.h"

namespace te::gemm::wgmma {

using testing::gpu::Cluster;

inline uint32_t shared_address(const void* p) { return Cluster::current().address(p); }
inline unsigned char* shared_memory() { return Cluster::current().shared(); }
inline uint32_t cluster_rank() { return Cluster::current().rank(); }
inline void cluster_meeting() { Cluster::current().meet_cluster(); }

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
  if (cluster.ended(rank)) throw std::logic_error("an arrival at a block that has ended");
  cluster.barrier(rank, shared_address(barrier)).arrive();
}
// True of the phase before the current one, which of a fresh barrier is a finished one.
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  const testing::gpu::Barrier& b = barrier_of(barrier);
  Cluster::current().wait([&b, parity] { return (b.phase & 1u) != parity; });
}
inline void named_barrier(int id, int threads) { Cluster::current().meet(id, threads); }

inline void copy_box_to(unsigned first, unsigned last, void* to, const CUtensorMap* map, uint64_t* barrier, BoxAt at) {
  Cluster& cluster = Cluster::current();
  const uint32_t base = shared_address(to), full = shared_address(barrier);
  if (base % 1024 != 0) throw std::logic_error("a box that does not begin on 1,024 bytes");
  const CUtensorMap matrix = *map;
  for (unsigned rank = first; rank <= last; ++rank) {
    cluster.later([&cluster, rank, base, full, matrix, at] {
      if (cluster.ended(rank)) throw std::logic_error("a copy to a block that has ended");
      for (int line = 0; line < matrix.lines; ++line) {
        for (int col = 0; col < 64; ++col) {
          const int64_t r = int64_t(at.row) + line, c = int64_t(at.col) + col;
          const bool inside = r >= 0 && r < matrix.rows && c >= 0 && c < matrix.cols;
          const uint16_t value = inside ? matrix.data[r * matrix.pitch + c] : uint16_t(0);
          const int piece = (col / 8) ^ (line % 8);
          std::memcpy(cluster.at(rank, base + uint32_t(line * 128 + piece * 16 + col % 8 * 2)), &value, 2);
        }
      }
      testing::gpu::Barrier& b = cluster.barrier(rank, full);
      b.bytes -= matrix.lines * 128;
      b.settle();
    });
  }
}
inline void copy_box(void* to, const CUtensorMap* map, uint64_t* barrier, BoxAt at) {
  copy_box_to(cluster_rank(), cluster_rank(), to, map, barrier, at);
}
inline void copy_box_to_both(void* to, const CUtensorMap* map, uint64_t* barrier, BoxAt at) {
  copy_box_to(0, 1, to, map, barrier, at);
}
inline void async_fence() {}

inline void mma_fence() {}
inline void mma_commit() { Cluster::current().self().mma.emplace_back(); }
// .sync.aligned: no lane goes on before its warp's sums are there. Other warps' may still be under way.
template <int kPending>
void mma_wait() {
  auto& groups = Cluster::current().self().mma;
  while (int(groups.size()) - 1 > kPending) {
    for (const std::function<void()>& product : groups.front()) product();
    groups.pop_front();
  }
  Cluster::current().meet_warp();
}
template <int kSlabs, int kFragment>
void hold(float (&)[kSlabs][kFragment]) {}

// This thread's share of 64 rows of results: register 4 j + 2 h + c is row 16 warp + lane / 4 + 8 h, column
// 8 j + 2 (lane % 4) + c.
template <class T, Major kLeft, Major kRight, int kFragment>
void mma(float (&d)[kFragment], uint64_t a, uint64_t b, bool add) {
  Cluster& cluster = Cluster::current();
  const unsigned rank = cluster.rank();
  const int warp = int(threadIdx.x % 128) / 32, lane = int(threadIdx.x % 32);
  float* sums = d;
  cluster.self().mma.back().push_back([&cluster, rank, sums, a, b, add, warp, lane] {
    const auto read = [&](uint64_t descriptor, Major major, int across, int depth) {
      T value;
      const bool transposed = major == Major::kAcross;
      std::memcpy(&value, cluster.at(rank, testing::gpu::element_address(descriptor, transposed, across, depth)), 2);
      return to_float(value);
    };
    float left[2][16], right[16];
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 16; ++i) left[h][i] = read(a, kLeft, 16 * warp + lane / 4 + 8 * h, i);
    }
    for (int j = 0; j < kFragment / 4; ++j) {
      for (int c = 0; c < 2; ++c) {
        for (int i = 0; i < 16; ++i) right[i] = read(b, kRight, 8 * j + 2 * (lane % 4) + c, i);
        for (int h = 0; h < 2; ++h) {
          float& sum = sums[4 * j + 2 * h + c];
          if (!add) sum = 0.f;
          for (int i = 0; i < 16; ++i) sum = std::fma(left[h][i], right[i], sum);
        }
      }
    }
  });
}

template <int kRegisters>
void shrink_to() {}
template <int kRegisters>
void grow_to() {}

}  // namespace te::gemm::wgmma
