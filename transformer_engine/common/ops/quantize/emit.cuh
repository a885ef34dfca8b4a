// Converts one tile of values, held by the threads of a block in the layout of tile.cuh, to FP8: amaxes, scales, bytes
// in both directions, partial column sums. All functions are called by every thread of the block.
#pragma once

#include "ops/quantize/fp8.h"
#include "ops/quantize/maxima.cuh"
#include "transformer_engine/quantize.h"

namespace te::quantize {

// The destination of one output of a producer: a te_quantized, its plan, and the column at which the output starts.
struct Dest {
  int64_t rows, cols;  // of the full matrix
  int64_t first_col;   // a multiple of kTile
  int64_t limit;       // the column at which the next output begins; none for the last
  te_scaling scaling;
  bool e5m2, pow_2_scales;
  float amax_epsilon, max;
  uint8_t *rowwise, *columnwise;
  int64_t row_pitch, column_pitch;
  te_tensor rowwise_scale_inv, columnwise_scale_inv;
  const float *scale, *amax_parts;
  int n_parts;
  float* amax;
  te_tensor column_sums;
  const float* noop;

  Dest() = default;
  Dest(const te_quantize_plan& plan, const te_quantized& out, int64_t rows, int64_t cols, int64_t first_col = 0,
       int64_t limit = INT64_MAX)
      : rows(rows),
        cols(cols),
        first_col(first_col),
        limit(limit),
        scaling(out.scaling),
        e5m2((out.rowwise.data != nullptr ? out.rowwise : out.columnwise).dtype == TE_FLOAT8_E5M2),
        pow_2_scales(plan.pow_2_scales != 0),
        amax_epsilon(plan.amax_epsilon),
        max(fp8_max(e5m2)),
        rowwise(static_cast<uint8_t*>(out.rowwise.data)),
        columnwise(static_cast<uint8_t*>(out.columnwise.data)),
        row_pitch(out.rowwise.row_pitch),
        column_pitch(out.columnwise.row_pitch),
        rowwise_scale_inv(out.rowwise_scale_inv),
        columnwise_scale_inv(out.columnwise_scale_inv),
        scale(static_cast<const float*>(plan.scale.data)),
        amax_parts(static_cast<const float*>(plan.amax_parts.data)),
        n_parts(int(plan.amax_parts.cols)),
        amax(static_cast<float*>(plan.amax.data)),
        column_sums(plan.column_sums),
        noop(static_cast<const float*>(plan.noop.data)) {}

  __device__ __forceinline__ float scale_for(float amax) const {
    return scale_of(amax, amax_epsilon, max, pow_2_scales);
  }
};

// A thread's position: its tile, and its 8 x 8 elements in the tile.
struct Place {
  int64_t tile_row, tile_col;
  int group_row, group_col;  // of 16 x 16 groups of 8 x 8 elements

  __device__ __forceinline__ Place(int64_t tile_row, int64_t tile_col)
      : tile_row(tile_row), tile_col(tile_col), group_row(threadIdx.x / 16), group_col(threadIdx.x % 16) {}
  __device__ __forceinline__ int64_t row() const { return tile_row * kTile + group_row * kRows; }
  __device__ __forceinline__ int64_t col() const { return tile_col * kTile + group_col * kColumns; }
};

struct Shared {
  union {
    uint2 bytes[kTile][kTile / 8];  // the tile's bytes, transposed: a word has 8 rows of a column, see put_transposed
    float columns[kWarps][kTile];   // results of each warp for each column
  };
  float scales[kTile];
  uint32_t largest[kWarps];
};

// ---- over the block ----

// The largest of all threads' x >= 0, for all of them. One barrier; two calls need another one between them.
__device__ __forceinline__ float block_max(float x, Shared& shared) {
  const uint32_t warp = __reduce_max_sync(0xffffffffu, __float_as_uint(x));  // as integers: the same order
  if (threadIdx.x % kWarp == 0) shared.largest[threadIdx.x / kWarp] = warp;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) largest = max(largest, shared.largest[w]);
  return __uint_as_float(largest);
}

// The results of each warp for its 128 columns, as 8 floats of each of its first 16 threads.
__device__ __forceinline__ void put_columns(const float (&x)[kColumns], Shared& shared) {
  if (threadIdx.x % kWarp >= 16) return;
  float4* target = reinterpret_cast<float4*>(&shared.columns[threadIdx.x / kWarp][threadIdx.x % 16 * kColumns]);
  target[0] = make_float4(x[0], x[1], x[2], x[3]);
  target[1] = make_float4(x[4], x[5], x[6], x[7]);
}

// ---- bytes ----

__device__ __forceinline__ int within_tile(int64_t n) { return n < 0 ? 0 : n > kTile ? kTile : int(n); }

// The rows of a thread: their address in the rowwise data, and their number.
struct RowTarget {
  uint8_t* data;
  int64_t pitch;
  int rows;

  __device__ __forceinline__ RowTarget(const Dest& dest, const Place& at)
      : data(dest.rowwise + at.row() * dest.row_pitch + dest.first_col + at.col()),
        pitch(dest.row_pitch),
        rows(dest.first_col + at.col() < dest.row_pitch ? within_tile(dest.rows - at.row()) : 0) {}

  __device__ __forceinline__ void put(int i, uint2 bytes) const { store_if(i < rows, data + i * pitch, bytes); }
};

// A thread's 8 bytes of its column j. Their place within the column is permuted by the thread's columns, or the 16
// threads of a row would all access one bank; the 16-byte halves of put_columnwise stay together.
__device__ __forceinline__ void put_transposed(const Place& at, int j, uint2 bytes, Shared& shared) {
  shared.bytes[at.group_col * kColumns + j][at.group_row ^ at.group_col] = bytes;
}

// 32 columns at a time, 8 threads each. The two halves of a piece are swapped in every second group of 8 columns, which
// is every second pair of warps.
template <bool kSwapped>
__device__ __forceinline__ void put_pieces(uint8_t* target, int64_t pitch, int columns, const Shared& shared) {
  const unsigned tid = threadIdx.x;
  const auto* source = reinterpret_cast<const uint4*>(shared.bytes[tid / 8]);
#pragma unroll
  for (int turn = 0; turn < kTile * 8 / kThreads; ++turn) {
    uint4 x = source[turn * 32 * 8 + ((tid % 8) ^ (turn * 2 + tid / 128))];
    if (kSwapped) x = make_uint4(x.z, x.w, x.x, x.y);
    store_if(turn * 32 < columns, target + turn * 32 * pitch, x);
  }
}

__device__ __forceinline__ void put_columnwise(const Dest& dest, const Place& at, const Shared& shared) {
  __syncthreads();
  const unsigned tid = threadIdx.x;
  const int64_t column = dest.first_col + at.tile_col * kTile + tid / 8, row = at.tile_row * kTile + tid % 8 * 16;
  uint8_t* target = dest.columnwise + column * dest.column_pitch + row;
  const int columns = row < dest.column_pitch ? within_tile(dest.cols - column) : 0;
  if (tid / 64 % 2 == 0) {
    put_pieces<false>(target, dest.column_pitch, columns, shared);
  } else {
    put_pieces<true>(target, dest.column_pitch, columns, shared);
  }
}

__device__ __forceinline__ void put_scale(const te_tensor& scale_inv, int64_t row, int64_t col, float value) {
  if (row < scale_inv.rows && col < scale_inv.cols) {
    static_cast<float*>(scale_inv.data)[row * scale_inv.row_pitch + col] = value;
  }
}

// Bytes a, b, c, d of four rows -> rows' bytes of four columns.
__device__ __forceinline__ void transpose_4x4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
  const uint32_t low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
  const uint32_t high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
  out[0] = __byte_perm(low_ab, low_cd, 0x5410);
  out[1] = __byte_perm(low_ab, low_cd, 0x7632);
  out[2] = __byte_perm(high_ab, high_cd, 0x5410);
  out[3] = __byte_perm(high_ab, high_cd, 0x7632);
}

__device__ __forceinline__ void put_block_transposed(const Place& at, const uint2 (&bytes)[kRows], Shared& shared) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t upper[4], lower[4];
    const auto word = [&](int i) { return half == 0 ? bytes[i].x : bytes[i].y; };
    transpose_4x4(word(0), word(1), word(2), word(3), upper);
    transpose_4x4(word(4), word(5), word(6), word(7), lower);
#pragma unroll
    for (int j = 0; j < 4; ++j) put_transposed(at, 4 * half + j, make_uint2(upper[j], lower[j]), shared);
  }
}

template <bool kE5m2, class T>
__device__ __forceinline__ uint2 row_bytes(const Vector<T>& values, float s) {
  float2 x[kColumns / 2];
#pragma unroll
  for (int w = 0; w < kColumns / 2; ++w) x[w] = pair_of<T>(values, w);
  return make_uint2(to_fp8_word<kE5m2>(x[0].x * s, x[0].y * s, x[1].x * s, x[1].y * s),
                    to_fp8_word<kE5m2>(x[2].x * s, x[2].y * s, x[3].x * s, x[3].y * s));
}

// ---- tiles ----

// In the order of the CPU path: 4 rows, neighbours, neighbours of these, then the results of the warps.
template <class T>
__device__ __forceinline__ void emit_column_sums(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at,
                                                 Shared& shared) {
  float sums[kColumns];
#pragma unroll
  for (int w = 0; w < kColumns / 2; ++w) {
    float2 quads[2] = {};
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float2 x = pair_of<T>(values[i], w);
      quads[i / 4].x += x.x;
      quads[i / 4].y += x.y;
    }
    sums[2 * w] = quads[0].x + quads[1].x;
    sums[2 * w + 1] = quads[0].y + quads[1].y;
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], 16);
  put_columns(sums, shared);
  __syncthreads();
  if (threadIdx.x < kTile) {
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += shared.columns[w][threadIdx.x];
    put_scale(dest.column_sums, at.tile_row, dest.first_col + at.tile_col * kTile + threadIdx.x, total);
  }
  __syncthreads();
}

template <bool kE5m2, class T>
__device__ __forceinline__ void emit_rowwise_1d(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at) {
  const float row_scale = dest.scale_for(row_maxima<T>(values));
  const int64_t own = at.row() + row_of_lane(threadIdx.x);
  if (threadIdx.x % 2 == 0) {
    put_scale(dest.rowwise_scale_inv, dest.first_col / kTile + at.tile_col, own,
              own < dest.rows ? 1.f / row_scale : 0.f);
  }
  const RowTarget target(dest, at);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float s = __shfl_sync(0xffffffffu, row_scale, (threadIdx.x & 16) | lane_of_row(i));
    target.put(i, row_bytes<kE5m2, T>(values[i], s));
  }
}

// The block's column maxima, into shared memory.
template <class T>
__device__ __forceinline__ void put_column_maxima(const Vector<T> (&values)[kRows], Shared& shared) {
  Vector<T> largest = values[0];
#pragma unroll
  for (int i = 1; i < kRows; ++i) take_magnitudes<T>(largest, values[i]);
  Vector<T> other;
#pragma unroll
  for (int w = 0; w < int(sizeof(other.v) / sizeof(other.v[0])); ++w) {
    other.v[w] = __shfl_xor_sync(0xffffffffu, largest.v[w], 16);
  }
  take_magnitudes<T>(largest, other);
  float maxima[kColumns];
  widen<T, kColumns>(largest, maxima);
  put_columns(maxima, shared);
}

// After put_column_maxima. A barrier precedes every read.
template <bool kE5m2, class T>
__device__ __forceinline__ void emit_columnwise_1d(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at,
                                                   Shared& shared) {
  __syncthreads();
  if (threadIdx.x < kTile) {
    float amax = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) amax = fmaxf(amax, fabsf(shared.columns[w][threadIdx.x]));
    const float scale = dest.scale_for(amax);
    const int64_t column = dest.first_col + at.tile_col * kTile + threadIdx.x;
    put_scale(dest.columnwise_scale_inv, at.tile_row, column, column < dest.cols ? 1.f / scale : 0.f);
    shared.scales[threadIdx.x] = scale;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kColumns / 2; ++w) {
    const float2 s = reinterpret_cast<const float2*>(shared.scales)[at.group_col * (kColumns / 2) + w];
    float2 x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      x[i] = pair_of<T>(values[i], w);
      x[i] = make_float2(x[i].x * s.x, x[i].y * s.y);
    }
    put_transposed(at, 2 * w,
                   make_uint2(to_fp8_word<kE5m2>(x[0].x, x[1].x, x[2].x, x[3].x),
                              to_fp8_word<kE5m2>(x[4].x, x[5].x, x[6].x, x[7].x)),
                   shared);
    put_transposed(at, 2 * w + 1,
                   make_uint2(to_fp8_word<kE5m2>(x[0].y, x[1].y, x[2].y, x[3].y),
                              to_fp8_word<kE5m2>(x[4].y, x[5].y, x[6].y, x[7].y)),
                   shared);
  }
  put_columnwise(dest, at, shared);
}

template <class T>
__device__ __forceinline__ float tile_amax(const Vector<T> (&values)[kRows], Shared& shared) {
  Vector<T> largest = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) take_magnitudes<T>(largest, values[i]);
  return block_max(largest_of<T>(largest), shared);
}

// Per-tensor: the scale, from the source that the plan has; the first thread of the first tile writes the outputs of
// the tensor.
template <class T>
__device__ __forceinline__ float tensor_scale(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at,
                                              Shared& shared) {
  const bool first = threadIdx.x == 0 && at.tile_row == 0 && at.tile_col == 0 && dest.first_col == 0;
  float scale, amax = 0.f;
  if (dest.scale != nullptr) {
    scale = *dest.scale;
    if (dest.amax != nullptr) {
      amax = tile_amax<T>(values, shared);
      // Skipped if the value is already as large: most tiles need no atomic. Non-negative floats compare like integers.
      auto* target = reinterpret_cast<unsigned*>(dest.amax);
      if (threadIdx.x == 0 && __float_as_uint(amax) > *static_cast<volatile unsigned*>(target)) {
        atomicMax(target, __float_as_uint(amax));
      }
    }
  } else {
    for (int part = int(threadIdx.x); part < dest.n_parts; part += kThreads) amax = fmaxf(amax, dest.amax_parts[part]);
    amax = block_max(amax, shared);
    scale = dest.scale_for(amax);
    if (first && dest.amax != nullptr) *dest.amax = amax;
  }
  if (first) {
    put_scale(dest.rowwise_scale_inv, 0, 0, 1.f / scale);
    put_scale(dest.rowwise_scale_inv, 0, 1, scale);
    put_scale(dest.columnwise_scale_inv, 0, 0, 1.f / scale);
    put_scale(dest.columnwise_scale_inv, 0, 1, scale);
  }
  return scale;
}

template <class T>
__device__ __forceinline__ float block_2d_scale(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at,
                                                Shared& shared) {
  const float scale = dest.scale_for(tile_amax<T>(values, shared));
  const int64_t row = at.tile_row, col = dest.first_col / kTile + at.tile_col;
  const int64_t rows = blocks_of(dest.rows), cols = blocks_of(dest.cols);
  if (threadIdx.x < 4) {  // the block's scale, and up to three of padding after the last
    const float value = threadIdx.x == 0 ? 1.f / scale : 0.f;
    const int64_t shift = threadIdx.x;
    if (col < cols && (shift == 0 || col == cols - 1)) put_scale(dest.rowwise_scale_inv, row, col + shift, value);
    if (row < rows && (shift == 0 || row == rows - 1)) put_scale(dest.columnwise_scale_inv, col, row + shift, value);
  }
  return scale;
}

template <bool kE5m2, class T>
__device__ __forceinline__ void emit_one_scale(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at,
                                               float scale, Shared& shared) {
  uint2 bytes[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) bytes[i] = row_bytes<kE5m2, T>(values[i], scale);
  if (dest.rowwise != nullptr) {
    const RowTarget target(dest, at);
#pragma unroll
    for (int i = 0; i < kRows; ++i) target.put(i, bytes[i]);
  }
  if (dest.columnwise == nullptr) return;
  put_block_transposed(at, bytes, shared);
  put_columnwise(dest, at, shared);
}

template <bool kE5m2, class T>
__device__ __forceinline__ void emit_as(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at,
                                        Shared& shared) {
  if (dest.scaling == TE_SCALING_BLOCK_1D) {
    if (dest.columnwise != nullptr) put_column_maxima<T>(values, shared);  // the barrier for it follows the rows
    if (dest.rowwise != nullptr) emit_rowwise_1d<kE5m2, T>(dest, values, at);
    if (dest.columnwise != nullptr) emit_columnwise_1d<kE5m2, T>(dest, values, at, shared);
  } else {
    const float scale = dest.scaling == TE_SCALING_TENSOR ? tensor_scale<T>(dest, values, at, shared)
                                                          : block_2d_scale<T>(dest, values, at, shared);
    emit_one_scale<kE5m2, T>(dest, values, at, scale, shared);
  }
}

template <class T>
__device__ __forceinline__ void emit(const Dest& dest, const Vector<T> (&values)[kRows], const Place& at,
                                     Shared& shared) {
  if (dest.first_col + at.tile_col * kTile >= dest.limit) return;  // uniform in the block
  if (dest.column_sums.data != nullptr) emit_column_sums<T>(dest, values, at, shared);
  if (dest.e5m2) {
    emit_as<true, T>(dest, values, at, shared);
  } else {
    emit_as<false, T>(dest, values, at, shared);
  }
}

}  // namespace te::quantize
