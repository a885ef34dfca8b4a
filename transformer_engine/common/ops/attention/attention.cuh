// Kernels of attention. With a sink a thread keeps one vector of one head and goes over the rows of a tile, and out is
// read and written once; its gradient reads dout and out once, and adds up in that thread until the block's end.
// Memory-bound. Plain CUDA C++, which tests/cpp/test_attention_kernels.cpp runs on emulated blocks.
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
constexpr int kTileHeads = 64;   // of a block that copies lse
constexpr int kAtOnce = 4;       // rows whose vectors a thread has in flight
constexpr int kBlocksPerSm = 4;  // more leave a thread fewer registers than its vectors take
constexpr int kMostSubtiles = 32;
constexpr int kSumHeads = 8;     // that a block adds up
constexpr int kSumRows = 128;    // parts that it adds side by side
constexpr int kPartsAtOnce = 4;  // loads of a thread that adds parts
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

// The threads of a block over heads and rows: `width` threads for the vectors of a head, `heads` heads, and where these
// are few, `subtiles` rows beside each other.
struct Split {
  int32_t width, heads, subtiles;

  static Split of(int64_t all_heads, int64_t vectors) {
    const int64_t width = vectors < kThreads ? vectors : kThreads;
    const int64_t heads = all_heads < kThreads / width ? all_heads : kThreads / width;
    const int64_t subtiles = kThreads / (heads * width);
    return {int32_t(width), int32_t(heads), int32_t(subtiles < kMostSubtiles ? subtiles : kMostSubtiles)};
  }
  TE_HOST_DEVICE int64_t chunks(int64_t all_heads) const { return (all_heads + heads - 1) / heads; }
  TE_HOST_DEVICE int rows() const { return kTileRows * subtiles; }
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
  Split split;
};

// The vectors of a thread: number `first` of a head, in every row of a tile from `row` on. Where a vector is one
// element, heads may have more than threads: `first` + width, .. too.
struct Share {
  int64_t first_head, head;
  int row, first;
  bool live;

  template <class T>
  __device__ __forceinline__ static Share of(const Pass<T>& pass, int chunk) {
    const Split& split = pass.split;
    const int at = int(threadIdx.x) % (split.heads * split.width);
    Share share{int64_t(chunk) * split.heads, 0, int(threadIdx.x) / (split.heads * split.width), at % split.width,
                false};
    share.head = share.first_head + at / split.width;
    share.live = share.row < split.subtiles && share.head < pass.order.heads;
    return share;
  }
};

// The rows of a tile: the place of each in kernel_lse for head 0, and whether it is padding.
struct TileRows {
  int64_t places[kTileRows * kMostSubtiles];
  bool padding[kTileRows * kMostSubtiles];

  // Between barriers. Returns the number of rows.
  template <class T>
  __device__ __forceinline__ int find(const Pass<T>& pass, int64_t first) {
    const int rows = int(min(int64_t(pass.split.rows()), pass.places.rows - first));
    for (int i = int(threadIdx.x); i < rows; i += kThreads) {
      padding[i] = pass.places.is_padding(first + i);
      places[i] = pass.order.place(first + i, 0);
    }
    return rows;
  }
};

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

// A block takes a tile of rows and a chunk of heads.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) forward_kernel(const Pass<T> pass) {
  __shared__ TileRows tile;
  const unsigned chunks = unsigned(pass.split.chunks(pass.order.heads));
  const int64_t first_row = int64_t(blockIdx.x / chunks) * pass.split.rows();
  const int rows = tile.find(pass, first_row), subtiles = pass.split.subtiles;
  const Share share = Share::of(pass, int(blockIdx.x % chunks));
  const bool has_sink = pass.sink != nullptr;
  const float sink = has_sink && share.live ? pass.sink[share.head] : 0.f;
  __syncthreads();
  if (!share.live) return;
  const int64_t step = subtiles * pass.out.pitch;
  int vector = share.first;
  do {
    T* const begin = pass.out.at(first_row + share.row, share.head * pass.head_dim + vector * N);
#pragma unroll
    for (int first = 0; first < kTileRows; first += kAtOnce) {
      Packed<T, N> x[kAtOnce]{};
      float given[kAtOnce]{};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = (first + k) * subtiles + share.row;
        if (row >= rows || tile.padding[row]) continue;
        given[k] = pass.kernel_lse[tile.places[row] + share.head * pass.order.seq];
        if (has_sink) x[k] = load_packed<T, N>(begin + (first + k) * step);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int row = (first + k) * subtiles + share.row;
        if (row >= rows) continue;
        Sunk sunk{0.f, kZeroed};
        if (!tile.padding[row]) {
          sunk = {lse_of_kernel(given[k]), 1.f};
          if (has_sink) sunk = Sunk::of(sunk.lse, sink);
        }
        if (vector == 0) *pass.lse.at(first_row + row, share.head) = sunk.lse;
        if (sunk.factor == 1.f) continue;
        scale<T, N>(x[k], sunk.factor);
        store_vector<T, N>(begin + (first + k) * step, x[k]);
      }
    }
    vector += pass.split.width;
  } while (N == 1 && vector < pass.head_dim);
}

// Writes lse in the kernel's order. A block takes a tile of rows and kTileHeads heads, heads in runs of kTileRows
// threads.
__global__ void __launch_bounds__(kThreads) kernel_lse_kernel(const Pass<float> pass) {
  const unsigned chunks = unsigned((pass.order.heads + kTileHeads - 1) / kTileHeads);
  const int64_t first_row = int64_t(blockIdx.x / chunks) * kTileRows;
  const int64_t first_head = int64_t(blockIdx.x % chunks) * kTileHeads;
  const int heads = int(min(int64_t(kTileHeads), pass.order.heads - first_head));
  for (int i = int(threadIdx.x); i < kTileRows * heads; i += kThreads) {
    const int64_t row = first_row + i % kTileRows, head = first_head + i / kTileRows;
    if (row >= pass.places.rows) continue;
    const float lse = pass.places.is_padding(row) ? 0.f : lse_for_kernel(*pass.lse.at(row, head));
    pass.kernel_lse[pass.order.place(row, head)] = lse;
  }
}

// The sum over a tile's rows of a thread's vector for the sink's gradient. Writes their lse in the kernel's order.
template <class T, int N>
__device__ __forceinline__ float of_tile(const Pass<T>& pass, const TileRows& tile, int64_t first_row, int rows,
                                         const Share& share, int vector, float sink) {
  const int64_t col = share.head * pass.head_dim + vector * N, begin = first_row + share.row;
  const int subtiles = pass.split.subtiles;
  const T *const dout = pass.dout.at(begin, col), *const out = pass.out.at(begin, col);
  const float* const lses = pass.lse.at(begin, share.head);
  // A row's place by one step from the tile's first: addresses of their own leave no registers for the vectors.
  const int64_t dout_step = subtiles * pass.dout.pitch, out_step = subtiles * pass.out.pitch;
  const int64_t lse_step = subtiles * pass.lse.pitch;
  float sum = 0.f;
#pragma unroll
  for (int first = 0; first < kTileRows; first += kAtOnce) {
    Packed<T, N> x[kAtOnce]{}, y[kAtOnce]{};  // zeros of padding
    float lse[kAtOnce]{};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = (first + k) * subtiles + share.row;
      if (row >= rows || tile.padding[row]) continue;
      lse[k] = lses[(first + k) * lse_step];
      x[k] = load_packed<T, N>(dout + (first + k) * dout_step);
      y[k] = load_packed<T, N>(out + (first + k) * out_step);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int row = (first + k) * subtiles + share.row;
      if (row >= rows) continue;
      if (vector == 0) pass.kernel_lse[tile.places[row] + share.head * pass.order.seq] = lse_for_kernel(lse[k]);
      const float weight = sink_share(sink, lse[k]);
      float a[N], b[N], dot = 0.f;
      widen<T, N>(x[k], a);
      widen<T, N>(y[k], b);
#pragma unroll
      for (int i = 0; i < N; ++i) dot += a[i] * b[i];
      sum += weight == 0.f ? 0.f : weight * dot;
    }
  }
  return sum;
}

// With a sink: a block takes the tiles part, part + parts, .. of a chunk of heads and writes its part of the gradient.
template <class T, int N>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm) backward_kernel(const Pass<T> pass, int parts) {
  __shared__ TileRows tile;
  __shared__ float sums[kThreads];
  const Split& split = pass.split;
  const unsigned chunks = unsigned(split.chunks(pass.order.heads));
  const int64_t part = blockIdx.x / chunks;
  const Share share = Share::of(pass, int(blockIdx.x % chunks));
  const float sink = share.live ? pass.sink[share.head] : 0.f;
  float sum = 0.f;
  for (int64_t row = part * split.rows(); row < pass.places.rows; row += int64_t(parts) * split.rows()) {
    __syncthreads();
    const int rows = tile.find(pass, row);
    __syncthreads();
    if (!share.live) continue;
    int vector = share.first;
    do {
      sum += of_tile<T, N>(pass, tile, row, rows, share, vector, sink);
      vector += split.width;
    } while (N == 1 && vector < pass.head_dim);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  const int head = int(threadIdx.x), all = split.heads * split.width;
  if (head >= split.heads || share.first_head + head >= pass.order.heads) return;
  sum = 0.f;
  for (int subtile = 0; subtile < split.subtiles; ++subtile) {
    for (int i = 0; i < split.width; ++i) sum += sums[subtile * all + head * split.width + i];
  }
  pass.partials[part * pass.order.heads + share.first_head + head] = -sum;
}

// dsink of the parts. A thread adds every kSumRows-th part of a head, a warp those of kSumHeads heads.
__global__ void __launch_bounds__(kSumHeads* kSumRows)
    sum_parts_kernel(const float* partials, int parts, int64_t heads, float* dsink) {
  constexpr int kWarps = kSumHeads * kSumRows / kWarp;
  __shared__ float sums[kWarps][kSumHeads];
  const int thread = int(threadIdx.x), first = thread / kSumHeads;
  const int64_t head = int64_t(blockIdx.x) * kSumHeads + thread % kSumHeads;
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
#pragma unroll
  for (int offset = kSumHeads; offset < kWarp; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (thread % kWarp < kSumHeads) sums[thread / kWarp][thread % kWarp] = sum;
  __syncthreads();
  if (thread >= kSumHeads || head >= heads) return;
  sum = 0.f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += sums[i][thread];
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
