// Kernels of attention. Blocks take tiles of kTileRows rows and up to kTileHeads heads: first the lse of each row and
// head, then the vectors of out. Memory-bound: with a sink out is read and written once, and its gradient reads dout
// and out once. Plain CUDA C++, which tests/cpp/test_attention_kernels.cpp runs on emulated blocks.
#pragma once

#include "core/reduce.cuh"
#include "core/vec.cuh"
#include "ops/attention/attention_math.h"

#if !defined(TE_EMULATED_GPU)
// Of <cassert>, which a release build leaves without it.
extern "C" __host__ __device__ void __assert_fail(const char* assertion, const char* file, unsigned int line,
                                                  const char* function) noexcept;
#endif

namespace te::attention::cuda {

constexpr int kThreads = 256;
constexpr int kTileHeads = 64;
constexpr int kAtOnce = 4;       // loads of a thread in flight
constexpr int kSumRows = 32;     // parts that a block adds side by side
constexpr int kPartsAtOnce = 8;  // loads of a thread that adds parts
constexpr int kPairsAtOnce = 4;  // of a row and head, whose vectors of dout and out a thread has in flight
constexpr int kZeroRows = 32;    // of a block that looks for padding
constexpr float kZeroed = -1.f;  // in place of a factor

#if !defined(TE_EMULATED_GPU)
// Ends the kernel and its context as assert() does, with the argument that does not fit.
__device__ __noinline__ void refuse(bool keys, Fault fault, int32_t) {
  constexpr const char* kMessages[2][3] = {
      {"attention: argument 'cu_seqlens_q': wanted 0 first and then each sequence's length added, within the tokens",
       "attention: argument 'cu_seqlens_q_padded': wanted the row where each sequence begins, with room for its tokens",
       "attention: argument 'max_seqlen_q': wanted at least the longest sequence of 'cu_seqlens_q'"},
      {"attention: argument 'cu_seqlens_kv': wanted 0 first and then each sequence's length added, within the tokens",
       "attention: argument 'cu_seqlens_kv_padded': wanted the row where each sequence begins, with room for its "
       "tokens",
       "attention: argument 'max_seqlen_kv': wanted at least the longest sequence of 'cu_seqlens_kv'"}};
  __assert_fail(kMessages[keys ? 1 : 0][int(fault) - 1], __FILE__, __LINE__, "te_attention_sequences");
}
#endif

struct Side {
  Places places;
  int64_t longest;
  int32_t* pieces;  // nullptr: none
};

// A block for each side.
__global__ void __launch_bounds__(kThreads) sequences_kernel(const Side queries, const Side keys) {
  const bool of_keys = blockIdx.x == 1;
  const Side& side = of_keys ? keys : queries;
  for (int32_t i = int32_t(threadIdx.x); i <= side.places.sequences; i += kThreads) {
    const Fault fault = side.places.fault(i, side.longest);
    if (fault != Fault::kNone) return refuse(of_keys, fault, i);
    if (side.pieces == nullptr) continue;
    if (i == 0) side.pieces[0] = int32_t(side.places.begin(0));
    if (i == side.places.sequences) continue;
    int32_t ends[3];
    side.places.pieces(i, of_keys, ends);
    for (int k = 0; k < 3; ++k) side.pieces[3 * int64_t(i) + 1 + k] = ends[k];
  }
}

// A matrix by its first element.
template <class T>
struct Matrix {
  T* data;
  int64_t pitch;
  static Matrix of(const te_tensor& t) { return {static_cast<T*>(t.data), t.row_pitch}; }
  __device__ __forceinline__ T* at(int64_t row, int64_t col) const { return data + row * pitch + col; }
};

// The arguments of the passes over lse and out.
template <class T>
struct Pass {
  Places places;
  LseOrder order;
  Matrix<float> lse;
  float* kernel_lse;
  const float* sink;  // nullptr: none
  Matrix<T> out, dout;
  float* partials;
  int32_t head_dim;

  __device__ __forceinline__ int chunks() const { return int((order.heads + kTileHeads - 1) / kTileHeads); }
};

struct Tile {
  int64_t first_row, first_head;
  int rows, heads;

  template <class T>
  __device__ __forceinline__ static Tile of(const Pass<T>& pass, int64_t number, int chunk) {
    const int64_t row = number * kTileRows, head = int64_t(chunk) * kTileHeads;
    return {row, head, int(min(int64_t(kTileRows), pass.places.rows - row)),
            int(min(int64_t(kTileHeads), pass.order.heads - head))};
  }
};

// Calls f(row, head) of a tile for its pairs, heads in runs of kTileRows threads.
template <class F>
__device__ __forceinline__ void for_pairs(const Tile& tile, F&& f) {
  for (int i = int(threadIdx.x); i < kTileRows * tile.heads; i += kThreads) {
    if (i % kTileRows < tile.rows) f(i % kTileRows, i / kTileRows);
  }
}

// N elements are 16 bytes, or N is 1. (store_packed is PTX, which emulated blocks do not run.)
template <class T, int N>
__device__ __forceinline__ void store_vector(T* at, const Packed<T, N>& x) {
  if constexpr (N == 1) {
    *at = x.v[0];
  } else {
    uint4 raw;
    memcpy(&raw, &x, sizeof(raw));
    *reinterpret_cast<uint4*>(at) = raw;
  }
}

template <class T, int N>
__device__ __forceinline__ void scale(Packed<T, N>& x, float factor) {
  float values[N];
  widen<T, N>(x, values);
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = factor == kZeroed ? 0.f : values[i] * factor;
  x = narrow<T, N>(values);
}

template <class T, int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(const Pass<T> pass) {
  __shared__ bool padding[kTileRows];
  __shared__ float factors[kTileRows * kTileHeads];
  const int thread = int(threadIdx.x);
  const Tile tile = Tile::of(pass, blockIdx.x / unsigned(pass.chunks()), int(blockIdx.x % unsigned(pass.chunks())));
  if (thread < tile.rows) padding[thread] = pass.places.is_padding(tile.first_row + thread);
  __syncthreads();
  for_pairs(tile, [&](int row, int head) {
    const int64_t at_row = tile.first_row + row, at_head = tile.first_head + head;
    Sunk sunk{0.f, kZeroed};
    if (!padding[row]) {
      sunk = {lse_of_kernel(pass.kernel_lse[pass.order.place(at_row, at_head)]), 1.f};
      if (pass.sink != nullptr) sunk = Sunk::of(sunk.lse, pass.sink[at_head]);
    }
    *pass.lse.at(at_row, at_head) = sunk.lse;
    factors[row * kTileHeads + head] = sunk.factor;
  });
  __syncthreads();
  bool writes = pass.sink != nullptr;
  for (int row = 0; row < tile.rows; ++row) writes = writes || padding[row];
  if (!writes) return;
  const int of_head = pass.head_dim / N, of_row = tile.heads * of_head, all = tile.rows * of_row;
  for (int first = thread; first < all; first += kAtOnce * kThreads) {
    Packed<T, N> x[kAtOnce]{};
    float factor[kAtOnce];
    T* at[kAtOnce]{};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int i = first + k * kThreads;
      factor[k] = 1.f;
      if (i >= all) continue;
      const int row = i / of_row, vector = i % of_row;
      factor[k] = factors[row * kTileHeads + vector / of_head];
      at[k] = pass.out.at(tile.first_row + row, tile.first_head * pass.head_dim + vector * N);
      if (factor[k] != 1.f) x[k] = load_packed<T, N>(at[k]);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (factor[k] == 1.f) continue;
      scale<T, N>(x[k], factor[k]);
      store_vector<T, N>(at[k], x[k]);
    }
  }
}

// The pairs of a row and a head that a group of lanes takes, in turn: pair `group`, `group` + groups, ...
struct PairWalk {
  int heads, rows, step_rows, step_heads, row, head;

  __device__ __forceinline__ static PairWalk of(const Tile& tile, int groups, int group) {
    return {tile.heads, tile.rows, groups / tile.heads, groups % tile.heads, group / tile.heads, group % tile.heads};
  }
  __device__ __forceinline__ bool live() const { return row < rows; }
  __device__ __forceinline__ int place() const { return row * kTileHeads + head; }
  __device__ __forceinline__ void advance() {
    row += step_rows;
    head += step_heads;
    if (head >= heads) head -= heads, ++row;
  }
};

// Vectors of dout and out of kPairsAtOnce pairs.
template <class T, int N>
struct PairVectors {
  Packed<T, N> dout[kPairsAtOnce], out[kPairsAtOnce];

  // Zeros where there is no pair or vector, or where the row is padding.
  __device__ __forceinline__ void load(const Pass<T>& pass, const Tile& tile, const bool* padding, PairWalk walk,
                                       int vector) {
    const bool in_head = vector * N < pass.head_dim;
#pragma unroll
    for (int k = 0; k < kPairsAtOnce; ++k, walk.advance()) {
      dout[k] = out[k] = {};
      if (!in_head || !walk.live() || padding[walk.row]) continue;
      const int64_t col = (tile.first_head + walk.head) * pass.head_dim + int64_t(vector) * N;
      dout[k] = load_packed<T, N>(pass.dout.at(tile.first_row + walk.row, col));
      out[k] = load_packed<T, N>(pass.out.at(tile.first_row + walk.row, col));
    }
  }
  __device__ __forceinline__ void add_products(float (&dots)[kPairsAtOnce]) const {
#pragma unroll
    for (int k = 0; k < kPairsAtOnce; ++k) {
      float a[N], b[N];
      widen<T, N>(dout[k], a);
      widen<T, N>(out[k], b);
#pragma unroll
      for (int i = 0; i < N; ++i) dots[k] += a[i] * b[i];
    }
  }
};

// The threads that share a pair's products.
__device__ __forceinline__ int lanes_of(int vectors) {
  int lanes = 1;
  while (lanes < vectors && lanes < kWarp) lanes *= 2;
  return lanes;
}

// The products of a tile's rows of dout and out, times `weights`, into `products`. `loaded`: the first vectors of the
// walk's first pairs; those of the next pairs are loaded before the lanes add up.
template <class T, int N>
__device__ __forceinline__ void weighted_products(const Pass<T>& pass, const Tile& tile, const bool* padding,
                                                  PairWalk walk, PairVectors<T, N>& loaded, int lane, int lanes,
                                                  const float* weights, float* products) {
  const int of_head = pass.head_dim / N;
  for (int pairs = tile.rows * tile.heads; pairs > 0; pairs -= kPairsAtOnce * (kThreads / lanes)) {
    float dots[kPairsAtOnce] = {};
    loaded.add_products(dots);
    for (int vector = lane + lanes; vector < of_head; vector += lanes) {
      loaded.load(pass, tile, padding, walk, vector);
      loaded.add_products(dots);
    }
    PairWalk at = walk;
#pragma unroll
    for (int k = 0; k < kPairsAtOnce; ++k) walk.advance();
    loaded.load(pass, tile, padding, walk, lane);
#pragma unroll
    for (int k = 0; k < kPairsAtOnce; ++k, at.advance()) {
      for (int offset = lanes / 2; offset > 0; offset /= 2) dots[k] += __shfl_xor_sync(0xffffffffu, dots[k], offset);
      if (lane != 0 || !at.live()) continue;
      const float weight = weights[at.place()];
      products[at.place()] = weight == 0.f ? 0.f : weight * dots[k];
    }
  }
}

// A block takes the tiles part, part + parts, .. of a chunk of heads; kSink: and writes its part of the sink's
// gradient.
template <class T, int N, bool kSink>
__global__ void __launch_bounds__(kThreads) backward_kernel(const Pass<T> pass, int parts) {
  __shared__ bool padding[kTileRows];
  __shared__ float weights[kTileRows * kTileHeads], products[kTileRows * kTileHeads];
  const int thread = int(threadIdx.x), chunk = int(blockIdx.x) / parts, part = int(blockIdx.x) % parts;
  const int lanes = kSink ? lanes_of(pass.head_dim / N) : 1, lane = thread % lanes;
  float sum = 0.f;
  Tile tile{};
  for (int64_t number = part; number < tiles_of(pass.places.rows); number += parts) {
    tile = Tile::of(pass, number, chunk);
    if (thread < tile.rows) padding[thread] = pass.places.is_padding(tile.first_row + thread);
    __syncthreads();
    const PairWalk walk = PairWalk::of(tile, kThreads / lanes, thread / lanes);
    PairVectors<T, N> vectors;
    if (kSink) vectors.load(pass, tile, padding, walk, lane);  // on their way beside the lse
    for_pairs(tile, [&](int row, int head) {
      const int64_t at_row = tile.first_row + row, at_head = tile.first_head + head;
      const float lse = padding[row] ? 0.f : *pass.lse.at(at_row, at_head);
      pass.kernel_lse[pass.order.place(at_row, at_head)] = lse_for_kernel(lse);
      if (kSink) weights[row * kTileHeads + head] = padding[row] ? 0.f : -sink_share(pass.sink[at_head], lse);
    });
    __syncthreads();
    if (!kSink) continue;
    weighted_products<T, N>(pass, tile, padding, walk, vectors, lane, lanes, weights, products);
    __syncthreads();
    for (int row = 0; row < tile.rows && thread < tile.heads; ++row) sum += products[row * kTileHeads + thread];
  }
  if (kSink && thread < tile.heads) pass.partials[part * pass.order.heads + tile.first_head + thread] = sum;
}

// dsink of the parts: a warp's lanes are heads, its number the first of every kSumRows-th part.
__global__ void __launch_bounds__(kWarp* kSumRows)
    sum_parts_kernel(const float* partials, int parts, int64_t heads, float* dsink) {
  __shared__ float sums[kSumRows][kWarp + 1];
  const int lane = int(threadIdx.x) % kWarp, first = int(threadIdx.x) / kWarp;
  const int64_t head = int64_t(blockIdx.x) * kWarp + lane;
  float sum = 0.f;
  for (int begin = first; begin < parts && head < heads; begin += kSumRows * kPartsAtOnce) {
    float x[kPartsAtOnce];
#pragma unroll
    for (int k = 0; k < kPartsAtOnce; ++k) {
      const int part = begin + k * kSumRows;
      x[k] = part < parts ? partials[part * heads + head] : 0.f;
    }
#pragma unroll
    for (const float value : x) sum += value;
  }
  sums[first][lane] = sum;
  __syncthreads();
  if (first != 0 || head >= heads) return;
  for (int i = 1; i < kSumRows; ++i) sum += sums[i][lane];
  dsink[head] = sum;
}

// A tensor whose padding becomes zeros; `units` of `Unit` a row.
struct Zeroed {
  Places places;
  char* data;
  int64_t pitch_bytes, row_bytes;
  bool wide;
  unsigned blocks;
};

struct ZeroedTensors {
  Zeroed tensors[3];
};

template <class Unit>
__device__ __forceinline__ void zero_row(char* row, int64_t bytes) {
  for (int64_t i = int64_t(threadIdx.x); i < bytes / int64_t(sizeof(Unit)); i += kThreads) {
    reinterpret_cast<Unit*>(row)[i] = Unit{};
  }
}

__global__ void __launch_bounds__(kThreads) zero_padding_kernel(const __grid_constant__ ZeroedTensors list) {
  __shared__ bool padding[kZeroRows];
  unsigned block = blockIdx.x;
  int which = 0;
  while (block >= list.tensors[which].blocks) block -= list.tensors[which++].blocks;
  const Zeroed& t = list.tensors[which];
  const int64_t first = int64_t(block) * kZeroRows;
  const int rows = int(min(int64_t(kZeroRows), t.places.rows - first)), thread = int(threadIdx.x);
  if (thread < rows) padding[thread] = t.places.is_padding(first + thread);
  __syncthreads();
  for (int row = 0; row < rows; ++row) {
    if (!padding[row]) continue;
    char* const data = t.data + (first + row) * t.pitch_bytes;
    if (t.wide) {
      zero_row<uint4>(data, t.row_bytes);
    } else {
      zero_row<uint16_t>(data, t.row_bytes);
    }
  }
}

}  // namespace te::attention::cuda
