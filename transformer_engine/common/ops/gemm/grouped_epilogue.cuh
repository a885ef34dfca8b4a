// What becomes of a slab's sums: bias, what is added to, one rounding, 16-byte stores where the result's rows allow
// them. Rows and columns beyond the tile's extent are neither read nor written.
#pragma once

#include "ops/gemm/grouped_walk.h"
#include "ops/gemm/wgmma_layout.h"

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
  __device__ Line(const Target<R>& target, const Extent& e, int slab, int h) {
    const int64_t row = int64_t(e.row) + slab + wgmma::fragment_row(int(threadIdx.x), h);
    live = row < e.row_end;
    data = target.data + row * target.pitch;
  }
};

template <class R, int kFragment>
__device__ __forceinline__ void add_bias(const R* bias, const Extent& e, float (&sums)[kFragment]) {
#pragma unroll
  for (int j = 0; j < kFragment / 4; ++j) {
    const int64_t col = int64_t(e.col) + wgmma::fragment_col(int(threadIdx.x), j);
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

// Two-byte results; = or +=. What is added to comes as it is stored, 16 bytes a lane, and is traded the other way,
// which is the same way.
template <class R, int kFragment>
__device__ __forceinline__ void store_16_bit(const Target<R>& target, const Extent& e, int slab, bool add,
                                             const float (&sums)[kFragment]) {
  const int lane = int(threadIdx.x) % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Line<R> line(target, e, slab, h);
#pragma unroll
    for (int four = 0; four < kFragment / 16; ++four) {
      const int64_t col = int64_t(e.col) + wgmma::pairs_col(lane, four);
      const int64_t count = line.live ? e.col_end - col : 0;
      uint32_t old[4] = {0, 0, 0, 0}, v[4];
      if (add) {
        wgmma::load_piece(line.data + col, old, count, target.wide);
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
      wgmma::store_piece(line.data + col, v, count, target.wide);
    }
  }
}

// Float results; = or +=. What is added to is read some pieces ahead.
template <int kAhead = 8, int kFragment>
__device__ __forceinline__ void store_32_bit(const Target<float>& target, const Extent& e, int slab, bool add,
                                             const float (&sums)[kFragment]) {
  const int lane = int(threadIdx.x) % 32;
  const Line<float> line(target, e, slab, lane % 2);
#pragma unroll
  for (int first = 0; first < kFragment / 4; first += kAhead) {
    uint32_t old[kAhead][4];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t col = int64_t(e.col) + wgmma::floats_col(lane, first + i);
      if (add) wgmma::load_piece(line.data + col, old[i], line.live ? e.col_end - col : 0, target.wide);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int j = first + i;
      float v[4] = {sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]}, moved[2];
      wgmma::give_floats(lane, v, moved);
#pragma unroll
      for (float& value : moved) value = __shfl_xor_sync(kWholeWarp, value, 1);
      wgmma::take_floats(lane, v, moved);
      uint32_t words[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) words[c] = te::detail::bits_of(add ? te::detail::float_of(old[i][c]) + v[c] : v[c]);
      const int64_t col = int64_t(e.col) + wgmma::floats_col(lane, j);
      wgmma::store_piece(line.data + col, words, line.live ? e.col_end - col : 0, target.wide);
    }
  }
}

}  // namespace te::gemm::grouped
