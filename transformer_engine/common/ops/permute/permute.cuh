// Kernels that move rows: 16 bytes a lane where all rows start on 16 bytes. Memory-bound; a token is read once, and
// written to all of its rows.
#pragma once

#include "core/reduce.cuh"
#include "ops/permute/pairs.h"

namespace te::permute {

constexpr int kMoveThreads = 128;
constexpr int kListed = 32;     // rows of a token that are written from one read of it
constexpr int kAhead = 4;       // loads of a thread in flight
constexpr int kClearRows = 64;  // rows that a block checks for having no pair
constexpr int kPairLanes = 8;   // threads that mark the rows of a token
constexpr int kWarps = 8;       // of a block whose warps are independent

// Rows of words: uint4, or the largest word that divides them.
template <class Word>
struct Rows {
  Word* data;
  int64_t pitch, words, rows;

  __device__ __forceinline__ Word* of(int64_t row) const { return data + row * pitch; }
};

// [blocks, columns]: a column moves with its row; data is null if there are none.
struct Scales {
  const float* in;
  float* out;
  int64_t in_pitch, out_pitch, blocks, columns;
};

template <class Word>
__device__ __forceinline__ Word zero_word() {
  if constexpr (sizeof(Word) == 16) {
    return make_uint4(0, 0, 0, 0);
  } else {
    return Word(0);
  }
}

// covered: 0 at first; afterwards 1 for each row with a pair.
__global__ void __launch_bounds__(kMoveThreads) cover_kernel(Pairs pairs, int64_t tokens, uint8_t* covered) {
  const int64_t token = (int64_t(blockIdx.x) * kMoveThreads + threadIdx.x) / kPairLanes;
  if (token >= tokens) return;
  const int count = pairs.count(token);
  for (int i = int(threadIdx.x) % kPairLanes; i < count; i += kPairLanes) {
    const int64_t row = pairs.row(token, i);
    if (row >= 0) covered[row] = 1;
  }
}

// Rows [first, first + kClearRows) that no pair has.
template <class Word>
__device__ void clear_uncovered(const Rows<Word>& out, const uint8_t* covered, int64_t first, const RowProbs& probs,
                                const Scales& scales) {
  for (int64_t row = first; row < first + kClearRows && row < out.rows; ++row) {
    if (covered[row] != 0) continue;
    for (int64_t w = threadIdx.x; w < out.words; w += kMoveThreads) out.of(row)[w] = zero_word<Word>();
    if (threadIdx.x == 0 && probs.out != nullptr) probs.clear(row);
    for (int64_t b = threadIdx.x; b < scales.blocks; b += kMoveThreads) scales.out[b * scales.out_pitch + row] = 1.f;
  }
}

template <class Word>
__global__ void __launch_bounds__(kMoveThreads) clear_kernel(Rows<Word> out, const uint8_t* covered) {
  clear_uncovered(out, covered, int64_t(blockIdx.x) * kClearRows, RowProbs{}, Scales{});
}

template <class Word>
struct Forward {
  Pairs pairs;
  Rows<const Word> inp;
  Rows<Word> out;
  RowProbs probs;
  Scales scales;
  const uint8_t* covered;
};

// A token to its listed rows. A row whose probability is 0 gets zeros.
template <class Word>
__device__ void write_rows(const Forward<Word>& move, int64_t token, const int64_t* rows, const bool* alive, int n) {
  const Word* const from = move.inp.of(token);
  for (int64_t first = threadIdx.x; first < move.inp.words; first += kMoveThreads * kAhead) {
    Word x[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t w = first + i * kMoveThreads;
      x[i] = w < move.inp.words ? from[w] : zero_word<Word>();
    }
    for (int pair = 0; pair < n; ++pair) {
      if (rows[pair] < 0) continue;
      Word* const to = move.out.of(rows[pair]);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int64_t w = first + i * kMoveThreads;
        if (w < move.inp.words) to[w] = alive[pair] ? x[i] : zero_word<Word>();
      }
    }
  }
  for (int64_t b = threadIdx.x; b < move.scales.blocks; b += kMoveThreads) {
    const float scale = move.scales.in[b * move.scales.in_pitch + token];
    for (int pair = 0; pair < n; ++pair) {
      if (rows[pair] >= 0) move.scales.out[b * move.scales.out_pitch + rows[pair]] = alive[pair] ? scale : 1.f;
    }
  }
}

// A block has a token; blocks after them have rows that may have no pair.
template <class Word>
__global__ void __launch_bounds__(kMoveThreads) forward_kernel(Forward<Word> move) {
  __shared__ int64_t rows[kListed];
  __shared__ bool alive[kListed];
  const int64_t token = blockIdx.x;
  if (token >= move.inp.rows) {
    const int64_t block = token - move.inp.rows;
    clear_uncovered(move.out, move.covered, block * kClearRows, move.probs, move.scales);
    if (block != 0) return;
    for (int64_t b = threadIdx.x; b < move.scales.blocks; b += kMoveThreads) {
      for (int64_t c = move.out.rows; c < move.scales.columns; ++c)
        move.scales.out[b * move.scales.out_pitch + c] = 0.f;
    }
    return;
  }
  const int count = move.pairs.count(token);
  for (int first = 0; first < count; first += kListed) {
    const int n = count - first < kListed ? count - first : kListed;
    if (int(threadIdx.x) < n) {
      const int pair = first + int(threadIdx.x);
      const int64_t row = move.pairs.row(token, pair);
      rows[threadIdx.x] = row;
      alive[threadIdx.x] = row >= 0;
      if (row >= 0 && move.probs.out != nullptr) {
        move.probs.copy(token * move.probs.pitch + move.pairs.column(token, pair), row);
        alive[threadIdx.x] = takes_part(move.probs.out, move.probs.bytes, row);
      }
    }
    __syncthreads();
    write_rows(move, token, rows, alive, n);
    __syncthreads();
  }
}

// A warp writes a row.
template <class Word>
__global__ void __launch_bounds__(kWarp* kWarps)
    gather_kernel(Rows<const Word> inp, const int32_t* source, Rows<Word> out) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= out.rows) return;
  const int64_t from = source[row];
  const bool present = from >= 0 && from < inp.rows;
  const Word* const x = inp.of(present ? from : 0);
  Word* const y = out.of(row);
  for (int64_t first = threadIdx.x % kWarp; first < out.words; first += kWarp * kAhead) {
    Word values[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t w = first + i * kWarp;
      values[i] = present && w < out.words ? x[w] : zero_word<Word>();
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kWarp < out.words) y[first + i * kWarp] = values[i];
    }
  }
}

// ---- sums, in float32 ----

// 16 bytes of elements, `valid` of them in the row; the others are 0. kWide: the row starts on 16 bytes.
template <class T, bool kWide>
struct Group {
  T v[kVector<T>];

  __device__ __forceinline__ void load(const T* p, int64_t valid) {
    if (kWide && valid >= kVector<T>) {
      const uint4 raw = *reinterpret_cast<const uint4*>(p);
      memcpy(v, &raw, sizeof(v));
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) v[i] = i < valid ? p[i] : from_float<T>(0.f);
  }
  __device__ __forceinline__ void store(T* p, int64_t valid) const {
    if (kWide && valid >= kVector<T>) {
      uint4 raw;
      memcpy(&raw, v, sizeof(v));
      *reinterpret_cast<uint4*>(p) = raw;
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) {
      if (i < valid) p[i] = v[i];
    }
  }
};

template <class T, class P>
struct Unpermute {
  Pairs pairs;
  Rows<const T> inp;  // words: columns
  Rows<T> out;
  const P* probs;  // null: 1
  int64_t probs_pitch;
  const void* row_probs;  // null: every row takes part
  int32_t row_prob_bytes;
};

// A token's listed rows and probabilities; -1 for rows that take no part.
template <class T, class P>
__device__ void list_rows(const Unpermute<T, P>& sum, int64_t token, int count, int64_t* rows, float* probs) {
  for (int i = threadIdx.x; i < count; i += kMoveThreads) {
    const int64_t row = sum.pairs.row(token, i);
    const bool takes = row >= 0 && takes_part(sum.row_probs, sum.row_prob_bytes, row);
    rows[i] = takes ? row : -1;
    const bool weighted = takes && sum.probs != nullptr;
    probs[i] = weighted ? to_float(sum.probs[token * sum.probs_pitch + sum.pairs.column(token, i)]) : 1.f;
  }
}

template <class T, class P, bool kWide>
__global__ void __launch_bounds__(kMoveThreads) unpermute_kernel(Unpermute<T, P> sum) {
  constexpr int kN = kVector<T>;
  __shared__ int64_t rows[TE_PERMUTE_MAX_EXPERTS];
  __shared__ float probs[TE_PERMUTE_MAX_EXPERTS];
  const int64_t token = blockIdx.x;
  const int count = sum.pairs.count(token);
  list_rows(sum, token, count, rows, probs);
  __syncthreads();
  for (int64_t first = int64_t(threadIdx.x) * kN; first < sum.out.words; first += kMoveThreads * kN) {
    const int64_t valid = sum.out.words - first;
    float total[kN];
#pragma unroll
    for (int i = 0; i < kN; ++i) total[i] = -0.f;  // the sum of one term has its bits
    bool any = false;
    for (int pair = 0; pair < count; pair += kAhead) {
      Group<T, kWide> x[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (pair + i < count && rows[pair + i] >= 0) x[i].load(sum.inp.of(rows[pair + i]) + first, valid);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (pair + i >= count || rows[pair + i] < 0) continue;
        any = true;
#pragma unroll
        for (int j = 0; j < kN; ++j) total[j] = fmaf(probs[pair + i], to_float(x[i].v[j]), total[j]);
      }
    }
    Group<T, kWide> y;
#pragma unroll
    for (int i = 0; i < kN; ++i) y.v[i] = from_float<T>(any ? total[i] : 0.f);
    y.store(sum.out.of(token) + first, valid);
  }
}

template <class T, class P>
struct UnpermuteBackward {
  Pairs pairs;
  Rows<const T> grad;
  Rows<const T> inp;  // for dprobs
  Rows<T> dinp;       // data is null: not wanted
  const P* probs;     // null: 1
  P* dprobs;          // null: not wanted
  int64_t probs_pitch, dprobs_pitch, columns;
};

// A block has a token, a warp a pair. Lanes add the products of their columns, the warp adds its lanes.
template <class T, class P, bool kWide>
__global__ void __launch_bounds__(kWarp* kWarps) unpermute_backward_kernel(UnpermuteBackward<T, P> op) {
  constexpr int kN = kVector<T>;
  const int64_t token = blockIdx.x;
  const int lane = int(threadIdx.x) % kWarp, count = op.pairs.count(token);
  const bool products = op.dprobs != nullptr;
  if (products) {
    P* const dprobs = op.dprobs + token * op.dprobs_pitch;
    for (int64_t c = threadIdx.x; c < op.columns; c += kWarp * kWarps) dprobs[c] = from_float<P>(0.f);
    __syncthreads();
  }
  for (int pair = int(threadIdx.x) / kWarp; pair < count; pair += kWarps) {
    const int64_t row = op.pairs.row(token, pair);
    if (row < 0) continue;
    const int column = op.pairs.column(token, pair);
    const float prob = op.probs == nullptr ? 1.f : to_float(op.probs[token * op.probs_pitch + column]);
    float part[kN] = {};
    for (int64_t first = lane * kN; first < op.grad.words; first += kWarp * kN) {
      const int64_t valid = op.grad.words - first;
      Group<T, kWide> g, x, dx;
      g.load(op.grad.of(token) + first, valid);
      if (products) {
        x.load(op.inp.of(row) + first, valid);
#pragma unroll
        for (int i = 0; i < kN; ++i) {
          part[i] = fmaf(to_float(g.v[i]), to_float(x.v[i]), part[i]);
        }
      }
      if (op.dinp.data == nullptr) continue;
#pragma unroll
      for (int i = 0; i < kN; ++i) dx.v[i] = from_float<T>(prob * to_float(g.v[i]));
      dx.store(op.dinp.of(row) + first, valid);
    }
    if (!products) continue;
    float total = part[0];
#pragma unroll
    for (int i = 1; i < kN; ++i) total += part[i];
    total = warp_sum(total);
    if (lane == 0) op.dprobs[token * op.dprobs_pitch + column] = from_float<P>(total);
  }
}

// A warp has a token.
template <class Bits>
__global__ void __launch_bounds__(kWarp* kWarps)
    probs_backward_kernel(Pairs pairs, const Bits* drow_probs, Bits* dprobs, int64_t pitch, int64_t tokens,
                          int columns) {
  const int64_t token = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (token >= tokens) return;
  const int lane = int(threadIdx.x) % kWarp, count = pairs.count(token);
  for (int c = lane; c < columns; c += kWarp) dprobs[token * pitch + c] = 0;
  __syncwarp();
  for (int i = lane; i < count; i += kWarp) {
    const int64_t row = pairs.row(token, i);
    if (row >= 0) dprobs[token * pitch + pairs.column(token, i)] = drow_probs[row];
  }
}

}  // namespace te::permute
