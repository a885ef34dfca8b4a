// The epilogue of an MMA atom: bias, accumulation into the result, one rounding, and 16-byte stores where the result's
// rows allow them. Rows and columns beyond the work tile are neither read nor written.
#pragma once

#if !defined(TE_EMULATED_GPU)  // the emulation of tests/cpp defines functions of the same names
#include "ops/gemm/sm90/ptx.cuh"
#endif
#include "ops/gemm/sm90/layout.h"
#include "ops/gemm/sm90/scheduler.h"

namespace te::gemm::sm90 {

constexpr unsigned kFullWarp = 0xffffffffu;

template <class R>
struct Output {
  R* data;
  int64_t pitch;
  bool wide;  // every row begins on 16 bytes
};

// A row of this thread in an MMA atom that begins at row `atom_m` of the tile.
template <class R>
struct OutputRow {
  R* data;
  bool live;
  __device__ OutputRow(const Output<R>& output, const WorkTile& tile, int atom_m, int thread, int h) {
    const int64_t row = int64_t(tile.m) + atom_m + fragment_row(thread, h);
    live = row < tile.m_end;
    data = output.data + row * output.pitch;
  }
};

template <class R, int kFragment>
__device__ __forceinline__ void add_bias(const R* bias, const WorkTile& tile, float (&accum)[kFragment]) {
  const int thread = read_thread_idx();
#pragma unroll
  for (int j = 0; j < kFragment / 4; ++j) {
    const int64_t col = int64_t(tile.n) + fragment_col(thread, j);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float b = col + c < tile.n_end ? to_float(bias[col + c]) : 0.f;
      accum[4 * j + c] += b;
      accum[4 * j + 2 + c] += b;
    }
  }
}

template <class R>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  return uint32_t(from_float<R>(low).bits) | uint32_t(from_float<R>(high).bits) << 16;
}

template <int kBit>
__device__ __forceinline__ void exchange_pairs(int lane, uint32_t (&v)[4]) {
  uint32_t moved[2];
  give_pairs<kBit>(lane, v, moved);
#pragma unroll
  for (uint32_t& word : moved) word = __shfl_xor_sync(kFullWarp, word, kBit);
  take_pairs<kBit>(lane, v, moved);
}

// Moves this lane's 16 bytes of a row. kFullTile: all columns of the tile exist and rows begin on 16 bytes.
template <bool kFullTile, class R>
__device__ __forceinline__ void load(const Output<R>& output, const OutputRow<R>& out_row, int64_t col, int64_t end,
                                     uint32_t (&words)[4]) {
  if constexpr (kFullTile) {
    load_global(out_row.data + col, words, out_row.live);
  } else {
    load_piece(out_row.data + col, words, out_row.live ? end - col : 0, output.wide);
  }
}
template <bool kFullTile, class R>
__device__ __forceinline__ void store(const Output<R>& output, const OutputRow<R>& out_row, int64_t col, int64_t end,
                                      const uint32_t (&words)[4]) {
  if constexpr (kFullTile) {
    if (out_row.live) store_full_piece(out_row.data + col, words);
  } else {
    store_piece(out_row.data + col, words, out_row.live ? end - col : 0, output.wide);
  }
}

// Two-byte results; = or +=. Old values are read as 16 bytes a lane and exchanged by the same, self-inverse,
// transposition.
template <bool kFullTile, class R, int kFragment>
__device__ __forceinline__ void store_pairs(const Output<R>& output, const WorkTile& tile, int atom_m, bool add,
                                            const float (&accum)[kFragment]) {
  const int thread = read_thread_idx(), lane = thread % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const OutputRow<R> out_row(output, tile, atom_m, thread, h);
#pragma unroll
    for (int four = 0; four < kFragment / 16; ++four) {
      const int64_t col = int64_t(tile.n) + pairs_col(lane, four);
      uint32_t old[4] = {0, 0, 0, 0}, v[4];
      if (add) {
        load<kFullTile>(output, out_row, col, tile.n_end, old);
        exchange_pairs<1>(lane, old);
        exchange_pairs<2>(lane, old);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (4 * four + i) + 2 * h;
        const float low = add ? to_float(element_of_piece<R>(old, 2 * i)) + accum[at] : accum[at];
        const float high = add ? to_float(element_of_piece<R>(old, 2 * i + 1)) + accum[at + 1] : accum[at + 1];
        v[i] = rounded_pair<R>(low, high);
      }
      exchange_pairs<1>(lane, v);
      exchange_pairs<2>(lane, v);
      store<kFullTile>(output, out_row, col, tile.n_end, v);
    }
  }
}

// How float results are written: stored, added to values that are read some pieces ahead, or added by red.global.
enum class StoreMode { kStore, kAdd, kReduce };
template <bool kFullTile, StoreMode kMode, int kAhead, int kFragment>
__device__ __forceinline__ void store_floats(const Output<float>& output, const WorkTile& tile, int atom_m,
                                             const float (&accum)[kFragment]) {
  const int thread = read_thread_idx(), lane = thread % 32;
  const OutputRow<float> out_rows[2] = {{output, tile, atom_m, thread, 0}, {output, tile, atom_m, thread, 1}};
#pragma unroll
  for (int first = 0; first < kFragment / 4; first += kAhead) {
    uint32_t old[kAhead][4] = {};
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t col = int64_t(tile.n) + floats_col(lane, (first + i) / 2);
      if (kMode == StoreMode::kAdd) load<kFullTile>(output, out_rows[i % 2], col, tile.n_end, old[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int two = (first + i) / 2, h = i % 2, at = 8 * two + 2 * h;
      float v[4] = {accum[at], accum[at + 1], accum[at + 4], accum[at + 5]}, moved[2];
      give_floats(lane, v, moved);
#pragma unroll
      for (float& value : moved) value = __shfl_xor_sync(kFullWarp, value, 1);
      take_floats(lane, v, moved);
      const int64_t col = int64_t(tile.n) + floats_col(lane, two);
      if constexpr (kMode == StoreMode::kReduce) {
        static_assert(kFullTile);
        if (out_rows[h].live) reduce_add(out_rows[h].data + col, v);
      } else {
        uint32_t words[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          words[c] = te::detail::bits_of(kMode == StoreMode::kAdd ? te::detail::float_of(old[i][c]) + v[c] : v[c]);
        }
        store<kFullTile>(output, out_rows[h], col, tile.n_end, words);
      }
    }
  }
}

// From this many k_blocks on red.global is faster, since the MMAs hide it; with fewer it is slower.
// (E8 2048x28672x4096, 32 k_blocks: 597 against 529 TFLOP/s; E128 512x1536x2048, 8 k_blocks: 260 against 286.)
constexpr int kReduceKBlocks = 16;

// kReduce: float results may be added by red.global.
template <int kAhead = 8, bool kReduce = false, class R, int kFragment>
__device__ __forceinline__ void store_accum(const Output<R>& output, const WorkTile& tile, int atom_m, bool add,
                                            const float (&accum)[kFragment]) {
  const bool full_tile = output.wide && int64_t(tile.n) + 2 * kFragment <= tile.n_end;
  if constexpr (std::is_same_v<R, float>) {
    if (!add) {
      full_tile ? store_floats<true, StoreMode::kStore, kAhead>(output, tile, atom_m, accum)
                : store_floats<false, StoreMode::kStore, kAhead>(output, tile, atom_m, accum);
    } else if (!full_tile) {
      store_floats<false, StoreMode::kAdd, kAhead>(output, tile, atom_m, accum);
    } else if (kReduce && tile.k_blocks >= kReduceKBlocks) {
      store_floats<true, StoreMode::kReduce, kAhead>(output, tile, atom_m, accum);
    } else {
      store_floats<true, StoreMode::kAdd, kAhead>(output, tile, atom_m, accum);
    }
  } else {
    full_tile ? store_pairs<true>(output, tile, atom_m, add, accum)
              : store_pairs<false>(output, tile, atom_m, add, accum);
  }
}

}  // namespace te::gemm::sm90
