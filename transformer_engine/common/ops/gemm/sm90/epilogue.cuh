// What becomes of a slab's sums: bias, what is added to, one rounding, 16-byte stores where the result's rows allow
// them. Rows and columns beyond the tile's extent are neither read nor written.
#pragma once

#include "ops/gemm/sm90/scheduler.h"
#if !defined(TE_EMULATED_GPU)  // else a test's functions of the same names are in scope
#include "ops/gemm/sm90/ptx.cuh"
#endif
#include "ops/gemm/sm90/layout.h"

namespace te::gemm::grouped {

constexpr unsigned kWholeWarp = 0xffffffffu;

template <class R>
struct Target {
  R* data;
  int64_t pitch;
  bool wide;  // every row begins on 16 bytes
};

// A row of a slab, whose first row is `slab` of the tile's, that this thread has.
template <class R>
struct Line {
  R* data;
  bool live;
  __device__ Line(const Target<R>& target, const Extent& e, int slab, int thread, int h) {
    const int64_t row = int64_t(e.row) + slab + wgmma::fragment_row(thread, h);
    live = row < e.row_end;
    data = target.data + row * target.pitch;
  }
};

template <class R, int kFragment>
__device__ __forceinline__ void add_bias(const R* bias, const Extent& e, float (&sums)[kFragment]) {
  const int thread = wgmma::thread_here();
#pragma unroll
  for (int j = 0; j < kFragment / 4; ++j) {
    const int64_t col = int64_t(e.col) + wgmma::fragment_col(thread, j);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float b = col + c < e.col_end ? to_float(bias[col + c]) : 0.f;
      sums[4 * j + c] += b;
      sums[4 * j + 2 + c] += b;
    }
  }
}

template <class R>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  return uint32_t(from_float<R>(low).bits) | uint32_t(from_float<R>(high).bits) << 16;
}

template <int kBit>
__device__ __forceinline__ void trade_pairs(int lane, uint32_t (&v)[4]) {
  uint32_t moved[2];
  wgmma::give_pairs<kBit>(lane, v, moved);
#pragma unroll
  for (uint32_t& word : moved) word = __shfl_xor_sync(kWholeWarp, word, kBit);
  wgmma::take_pairs<kBit>(lane, v, moved);
}

// Moves this lane's 16 bytes of a row. In a tile whose columns are all there (kWhole) nothing else need be asked.
template <bool kWhole, class R>
__device__ __forceinline__ void load(const Target<R>& target, const Line<R>& line, int64_t col, int64_t end,
                                     uint32_t (&words)[4]) {
  if constexpr (kWhole) {
    wgmma::load_now(line.data + col, words, line.live);
  } else {
    wgmma::load_piece(line.data + col, words, line.live ? end - col : 0, target.wide);
  }
}
template <bool kWhole, class R>
__device__ __forceinline__ void store(const Target<R>& target, const Line<R>& line, int64_t col, int64_t end,
                                      const uint32_t (&words)[4]) {
  if constexpr (kWhole) {
    if (line.live) wgmma::store_whole_piece(line.data + col, words);
  } else {
    wgmma::store_piece(line.data + col, words, line.live ? end - col : 0, target.wide);
  }
}

// Two-byte results; = or +=. What is added to comes as it is stored, 16 bytes a lane, and is traded the other way,
// which is the same way.
template <bool kWhole, class R, int kFragment>
__device__ __forceinline__ void store_pairs(const Target<R>& target, const Extent& e, int slab, bool add,
                                            const float (&sums)[kFragment]) {
  const int thread = wgmma::thread_here(), lane = thread % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Line<R> line(target, e, slab, thread, h);
#pragma unroll
    for (int four = 0; four < kFragment / 16; ++four) {
      const int64_t col = int64_t(e.col) + wgmma::pairs_col(lane, four);
      uint32_t old[4] = {0, 0, 0, 0}, v[4];
      if (add) {
        load<kWhole>(target, line, col, e.col_end, old);
        trade_pairs<1>(lane, old);
        trade_pairs<2>(lane, old);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * four + i) + 2 * h;
        const float low = add ? to_float(wgmma::of_piece<R>(old, 2 * i)) + sums[at] : sums[at];
        const float high = add ? to_float(wgmma::of_piece<R>(old, 2 * i + 1)) + sums[at + 1] : sums[at + 1];
        v[i] = rounded_pair<R>(low, high);
      }
      trade_pairs<1>(lane, v);
      trade_pairs<2>(lane, v);
      store<kWhole>(target, line, col, e.col_end, v);
    }
  }
}

// How float results come to memory: as they are, added to what is read some pieces ahead, or added by the memory.
enum class Put { kStore, kAdd, kReduce };
template <bool kWhole, Put kPut, int kAhead, int kFragment>
__device__ __forceinline__ void store_floats(const Target<float>& target, const Extent& e, int slab,
                                             const float (&sums)[kFragment]) {
  const int thread = wgmma::thread_here(), lane = thread % 32;
  const Line<float> lines[2] = {{target, e, slab, thread, 0}, {target, e, slab, thread, 1}};
#pragma unroll
  for (int first = 0; first < kFragment / 4; first += kAhead) {
    uint32_t old[kAhead][4] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t col = int64_t(e.col) + wgmma::floats_col(lane, (first + i) / 2);
      if (kPut == Put::kAdd) load<kWhole>(target, lines[i % 2], col, e.col_end, old[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int two = (first + i) / 2, h = i % 2, at = 8 * two + 2 * h;
      float v[4] = {sums[at], sums[at + 1], sums[at + 4], sums[at + 5]}, moved[2];
      wgmma::give_floats(lane, v, moved);
#pragma unroll
      for (float& value : moved) value = __shfl_xor_sync(kWholeWarp, value, 1);
      wgmma::take_floats(lane, v, moved);
      const int64_t col = int64_t(e.col) + wgmma::floats_col(lane, two);
      if constexpr (kPut == Put::kReduce) {
        static_assert(kWhole);
        if (lines[h].live) wgmma::add_to(lines[h].data + col, v);
      } else {
        uint32_t words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          words[c] = te::detail::bits_of(kPut == Put::kAdd ? te::detail::float_of(old[i][c]) + v[c] : v[c]);
        }
        store<kWhole>(target, lines[h], col, e.col_end, words);
      }
    }
  }
}

// Blocks of a tile's depth from which on the memory had better add: the multiplications hide it then. With fewer it is
// the slower way. (E8 2048x28672x4096, 32 blocks: 597 against 529 TFLOP/s; E128 512x1536x2048, 8 blocks: 260, 286.)
constexpr int kReduceBlocks = 16;

// kReduce: float results may be added by the memory.
template <int kAhead = 8, bool kReduce = false, class R, int kFragment>
__device__ __forceinline__ void store_slab(const Target<R>& target, const Extent& e, int slab, bool add,
                                           const float (&sums)[kFragment]) {
  const bool whole = target.wide && int64_t(e.col) + 2 * kFragment <= e.col_end;
  if constexpr (std::is_same_v<R, float>) {
    if (!add) {
      whole ? store_floats<true, Put::kStore, kAhead>(target, e, slab, sums)
            : store_floats<false, Put::kStore, kAhead>(target, e, slab, sums);
    } else if (!whole) {
      store_floats<false, Put::kAdd, kAhead>(target, e, slab, sums);
    } else if (kReduce && e.blocks >= kReduceBlocks) {
      store_floats<true, Put::kReduce, kAhead>(target, e, slab, sums);
    } else {
      store_floats<true, Put::kAdd, kAhead>(target, e, slab, sums);
    }
  } else {
    whole ? store_pairs<true>(target, e, slab, add, sums) : store_pairs<false>(target, e, slab, add, sums);
  }
}

}  // namespace te::gemm::grouped
