// Kernels of the maps. Every order is fixed: counts of earlier tokens, then ranks among the tokens of a block. Atomics
// are on integers alone, whose sums have no order.
#pragma once

#include "core/reduce.cuh"
#include "ops/permute/pairs.h"

namespace te::permute {

constexpr int kMapThreads = 256;
constexpr int kMaskThreads = 1024;  // of the map of a mask: there are few chunks, and each keeps many loads in flight
constexpr int kWordsOfChunk = TE_PERMUTE_CHUNK / 32;
constexpr int kCounters = 8192;  // of the map of ids: copies of two histograms, so that lanes of one expert do not meet
constexpr int kIdsAhead = 8;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ unsigned lanes_below() { return (1u << (threadIdx.x % kWarp)) - 1u; }

// Replaces values[0, n) in shared memory by their exclusive sums, n <= 4 * kThreads; returns the sum of all. All
// threads of the block call it; it has barriers at its begin and its end.
template <int kThreads>
__device__ int exclusive_sums(int* values, int n) {
  __shared__ int sums[kThreads / kWarp];
  __syncthreads();
  const int first = int(threadIdx.x) * 4, lane = int(threadIdx.x) % kWarp;
  int own = 0;
  for (int i = first; i < first + 4 && i < n; ++i) own += values[i];
  int up_to = own;
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += below;
  }
  if (lane == kWarp - 1) sums[threadIdx.x / kWarp] = up_to;
  __syncthreads();
  int before = up_to - own, total = 0;
  for (int warp = 0; warp < kThreads / kWarp; ++warp) {
    if (warp < int(threadIdx.x) / kWarp) before += sums[warp];
    total += sums[warp];
  }
  for (int i = first; i < first + 4 && i < n; ++i) {
    const int value = values[i];
    values[i] = before;
    before += value;
  }
  __syncthreads();
  return total;
}

// ---- the map of a mask: a block has a chunk of tokens ----

template <class Routed>
struct Mask {
  const Routed* data;
  int64_t pitch;
  int32_t tokens, experts;

  // Bit i: token first + i is routed to the expert.
  __device__ __forceinline__ unsigned bits(int first, int expert) const {
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (first + i < tokens && data[int64_t(first + i) * pitch + expert] != 0) found |= 1u << i;
    }
    return found;
  }
};

template <class Routed>
__global__ void __launch_bounds__(kMaskThreads) count_kernel(Mask<Routed> mask, int32_t* counts) {
  __shared__ int sums[TE_PERMUTE_MAX_EXPERTS];
  for (int e = threadIdx.x; e < mask.experts; e += kMaskThreads) sums[e] = 0;
  __syncthreads();
  for (int item = threadIdx.x; item < mask.experts * kWordsOfChunk; item += kMaskThreads) {
    const int expert = item % mask.experts, first = int(blockIdx.x) * TE_PERMUTE_CHUNK + item / mask.experts * 32;
    atomicAdd(&sums[expert], __popc(mask.bits(first, expert)));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < mask.experts; e += kMaskThreads)
    counts[int64_t(blockIdx.x) * mask.experts + e] = sums[e];
}

// A warp writes a token's row of the map: lanes are experts, 32 at a time.
template <class Routed>
__global__ void __launch_bounds__(kMaskThreads) place_kernel(Mask<Routed> mask, const int32_t* counts, int32_t* map) {
  __shared__ int first_row[TE_PERMUTE_MAX_EXPERTS];  // of this chunk
  __shared__ unsigned bits[kWordsOfChunk * TE_PERMUTE_MAX_EXPERTS];
  const int experts = mask.experts, chunks = int(gridDim.x), lane = int(threadIdx.x) % kWarp;
  int before[TE_PERMUTE_MAX_EXPERTS / kMaskThreads];
#pragma unroll
  for (int i = 0; i < TE_PERMUTE_MAX_EXPERTS / kMaskThreads; ++i) {
    const int e = int(threadIdx.x) + i * kMaskThreads;
    int earlier = 0, all = 0;
#pragma unroll 16
    for (int chunk = 0; chunk < chunks && e < experts; ++chunk) {
      const int count = counts[int64_t(chunk) * experts + e];
      earlier += chunk < int(blockIdx.x) ? count : 0;
      all += count;
    }
    before[i] = earlier;
    if (e < experts) first_row[e] = all;
  }
  exclusive_sums<kMaskThreads>(first_row, experts);
#pragma unroll
  for (int i = 0; i < TE_PERMUTE_MAX_EXPERTS / kMaskThreads; ++i) {
    const int e = int(threadIdx.x) + i * kMaskThreads;
    if (e < experts) first_row[e] += before[i];
  }
  for (int item = threadIdx.x; item < experts * kWordsOfChunk; item += kMaskThreads) {
    bits[item] = mask.bits(int(blockIdx.x) * TE_PERMUTE_CHUNK + item / experts * 32, item % experts);
  }
  __syncthreads();
  for (int i = int(threadIdx.x) / kWarp; i < TE_PERMUTE_CHUNK; i += kMaskThreads / kWarp) {
    const int token = int(blockIdx.x) * TE_PERMUTE_CHUNK + i;
    if (token >= mask.tokens) break;
    int32_t* const out = map + int64_t(token) * (2 * experts + 1);
    int n = 0;
    for (int from = 0; from < experts; from += kWarp) {
      const int e = from + lane;
      const unsigned own = e < experts ? bits[i / 32 * experts + e] : 0u;
      const bool routed = (own >> (i % 32) & 1u) != 0;
      const unsigned all = __ballot_sync(kAllLanes, routed);
      if (routed) {
        int row = first_row[e] + __popc(own & ((1u << (i % 32)) - 1u));
        for (int word = 0; word < i / 32; ++word) row += __popc(bits[word * experts + e]);
        const int place = n + __popc(all & lanes_below());
        out[place] = row;
        out[experts + place] = e;
      }
      n += __popc(all);
    }
    for (int place = n + lane; place < experts; place += kWarp) out[place] = out[experts + place] = -1;
    if (lane == 0) out[2 * experts] = n;
  }
}

// ---- the map of ids, in one launch: each block counts all ids, those before its own pairs apart ----

struct RowMap {
  const int32_t* ids;
  int32_t* row_of_pair;
  int32_t* token_of_row;
  int32_t* offsets;  // null: not wanted, as panels
  int32_t* panels;
  int32_t pairs, of_token, rows;
  int32_t first_expert, experts;
  int32_t span;       // pairs of a block
  const char* probs;  // [tokens, experts of all]; null: none
  char* row_probs;
  int64_t probs_pitch;  // in elements
  int32_t prob_bytes;
  int32_t ascending;
  int64_t* tokens_per_expert;  // null: not wanted; else a block more, which counts
  int32_t all_experts;
  uint32_t* cut;     // null: not wanted, as factor
  uint32_t* factor;  // the bits of a float, which have the order of floats of at least 0
  float even;
  uint32_t* outside;  // null: not wanted, as zero
  float* zero;

  // Where the row of a pair is written.
  __device__ __forceinline__ int place_of(int pair) const {
    if (!ascending) return pair;
    const int first = pair - pair % of_token;
    return first + place_by_expert(ids + first, of_token, pair - first);
  }
  // Whether the row gets its token: not with a probability of 0.
  __device__ __forceinline__ bool take_prob(int pair, int row) const {
    if (row_probs == nullptr) return true;
    const RowProbs copies{probs, row_probs, probs_pitch, prob_bytes};
    copies.copy(int64_t(pair / of_token) * probs_pitch + ids[pair], row);
    return takes_part(row_probs, prob_bytes, row);
  }
  __device__ __forceinline__ int expert_of(int pair) const {
    const int64_t expert = int64_t(ids[pair]) - first_expert;
    return expert >= 0 && expert < experts ? int(expert) : -1;
  }
};

// counts: kCounters in shared memory, 0. Afterwards first[0, experts] are the experts' first rows, and next[e] that of
// the first own pair.
template <int kThreads>
__device__ void count_ids(const RowMap& map, int begin, int* counts, int* first, int* next) {
  int copies = 8;
  while (2 * copies * map.experts > kCounters) copies /= 2;
  const int own = int(threadIdx.x) & (copies - 1);
  __syncthreads();
  for (int64_t from = threadIdx.x; from < map.pairs; from += kThreads * kIdsAhead) {
    int expert[kIdsAhead];
#pragma unroll
    for (int i = 0; i < kIdsAhead; ++i) {
      const int64_t pair = from + i * kThreads;
      expert[i] = pair < map.pairs ? map.expert_of(int(pair)) : -1;
    }
#pragma unroll
    for (int i = 0; i < kIdsAhead; ++i) {
      const int half = from + i * kThreads < begin ? 0 : copies;
      if (expert[i] >= 0) atomicAdd(&counts[(half + own) * map.experts + expert[i]], 1);
    }
  }
  __syncthreads();
  for (int e = threadIdx.x; e < map.experts; e += kThreads) {
    int before = 0, all = 0;
    for (int copy = 0; copy < copies; ++copy) before += counts[copy * map.experts + e];
    for (int copy = copies; copy < 2 * copies; ++copy) all += counts[copy * map.experts + e];
    next[e] = before;
    first[e] = before + all;
  }
  const int total = exclusive_sums<kThreads>(first, map.experts);
  for (int e = threadIdx.x; e < map.experts; e += kThreads) next[e] += first[e];
  if (threadIdx.x == 0) first[map.experts] = total;
  __syncthreads();
}

// The rows of pairs [begin, end): warp after warp, so that earlier pairs have lower rows.
template <int kThreads>
__device__ void place_ids(const RowMap& map, int begin, int end, int* next) {
  for (int from = begin; from < end; from += kThreads) {
    const int pair = from + int(threadIdx.x);
    const int expert = pair < end ? map.expert_of(pair) : -1;
    const unsigned same = __match_any_sync(kAllLanes, expert);
    const int rank = __popc(same & lanes_below());
    int row = map.rows;
    for (int warp = 0; warp < kThreads / kWarp; ++warp) {
      if (warp == int(threadIdx.x) / kWarp && expert >= 0) row = next[expert] + rank;
      __syncwarp();
      if (warp == int(threadIdx.x) / kWarp && expert >= 0 && rank == 0) next[expert] += __popc(same);
      __syncthreads();
    }
    if (pair >= end) continue;
    const bool present = row < map.rows, alive = present && map.take_prob(pair, row);
    map.row_of_pair[map.place_of(pair)] = alive ? row : -1;
    if (present) map.token_of_row[row] = alive ? pair / map.of_token : -1;
  }
}

// counts: as above. Of the experts outside of the range too.
template <int kThreads>
__device__ void count_all(const RowMap& map, int* counts) {
  __syncthreads();
  for (int64_t pair = threadIdx.x; pair < map.pairs; pair += kThreads) {
    const int expert = map.ids[pair];
    if (expert >= 0 && expert < map.all_experts) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < map.all_experts; e += kThreads) map.tokens_per_expert[e] = counts[e];
}

// Atomic, since calls on other streams may add too.
__device__ __forceinline__ void add_saturating(uint32_t* counter, uint32_t more) {
  for (uint32_t seen = *counter, was;; seen = was) {
    was = atomicCAS(counter, seen, saturating_sum(seen, more));
    if (was == seen) return;
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) row_map_kernel(RowMap map) {
  static_assert(4 * kThreads >= TE_PERMUTE_MAX_EXPERTS);
  __shared__ int counts[kCounters];
  __shared__ int first[TE_PERMUTE_MAX_EXPERTS + 1];
  __shared__ int next[TE_PERMUTE_MAX_EXPERTS];
  __shared__ int panels;
  for (int i = threadIdx.x; i < kCounters; i += kThreads) counts[i] = 0;
  if (threadIdx.x == 0) panels = 0;
  const int blocks = int(gridDim.x) - (map.tokens_per_expert != nullptr ? 1 : 0);
  if (int(blockIdx.x) == blocks) return count_all<kThreads>(map, counts);
  const int64_t begin = int64_t(blockIdx.x) * map.span, end = begin + map.span;
  const int last = int(end < map.pairs ? end : map.pairs);
  count_ids<kThreads>(map, int(begin < map.pairs ? begin : map.pairs), counts, first, next);
  if (begin < map.pairs) place_ids<kThreads>(map, int(begin), last, next);
  for (int64_t row = first[map.experts] + int64_t(blockIdx.x) * kThreads + threadIdx.x; row < map.rows;
       row += int64_t(blocks) * kThreads) {
    map.token_of_row[row] = -1;
    if (map.row_probs != nullptr) RowProbs{nullptr, map.row_probs, 0, map.prob_bytes}.clear(row);
  }
  if (blockIdx.x != 0) return;
  const auto cut = [&](int e) { return first[e] < map.rows ? first[e] : map.rows; };
  for (int e = threadIdx.x; e < map.experts; e += kThreads) {
    atomicAdd(&panels, (cut(e + 1) - cut(e) + 127) / 128);
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= map.experts && map.offsets != nullptr; e += kThreads) map.offsets[e] = cut(e);
  if (threadIdx.x != 0) return;
  if (map.panels != nullptr) *map.panels = panels;
  if (map.zero != nullptr) *map.zero = 0;
  const int pairs = first[map.experts];
  if (map.outside != nullptr && pairs < map.pairs) add_saturating(map.outside, uint32_t(map.pairs - pairs));
  if (pairs <= map.rows) return;
  if (map.cut != nullptr) add_saturating(map.cut, uint32_t(pairs - map.rows));
  if (map.factor != nullptr) atomicMax(map.factor, __float_as_uint(float(pairs) / map.even));
}

// A warp has a token.
template <class Bits>
__global__ void __launch_bounds__(kMapThreads)
    row_probs_backward_kernel(const int32_t* ids, const int32_t* row_of_pair, const Bits* drow_probs, Bits* dprobs,
                              int64_t pitch, int64_t tokens, int64_t rows, int experts, int topk) {
  const int64_t token = int64_t(blockIdx.x) * (kMapThreads / kWarp) + threadIdx.x / kWarp;
  if (token >= tokens) return;
  const int lane = int(threadIdx.x) % kWarp;
  Bits* const out = dprobs + token * pitch;
  for (int e = lane; e < experts; e += kWarp) out[e] = 0;
  __syncwarp();
  const int32_t* const own = ids + token * topk;
  for (int i = lane; i < topk; i += kWarp) {
    const int64_t row = row_of_pair[token * topk + place_by_expert(own, topk, i)];
    if (row >= 0 && row < rows && own[i] >= 0 && own[i] < experts) out[own[i]] = drow_probs[row];
  }
}

// ---- chunks ----

struct Chunks {
  const int64_t* sizes;
  const int64_t* order;
  int64_t* in;     // [n + 1]: first rows in the input
  int64_t* out;    // [n + 1]: and in the output, by their place there
  int64_t* place;  // [n]: of a chunk in the output; -1: none
  int64_t n, rows;
  uint32_t* counters;  // null: not wanted
};

// sums[i + 1] = the sum of f(0) to f(i), at most `most`, with one block.
template <class F>
__device__ void running_sums(int64_t n, int64_t most, int64_t* sums, F f) {
  __shared__ int64_t tile[kMapThreads];
  int64_t carried = 0;
  if (threadIdx.x == 0) sums[0] = 0;
  for (int64_t from = 0; from < n; from += kMapThreads) {
    const int64_t i = from + threadIdx.x;
    tile[threadIdx.x] = i < n ? f(i) : 0;
    for (int step = 1; step < kMapThreads; step *= 2) {
      __syncthreads();
      const int64_t below = int(threadIdx.x) >= step ? tile[threadIdx.x - step] : 0;
      __syncthreads();
      tile[threadIdx.x] += below;
    }
    __syncthreads();
    const int64_t sum = carried + tile[threadIdx.x];
    if (i < n) sums[i + 1] = sum < most ? sum : most;
    carried += tile[kMapThreads - 1];
    __syncthreads();
  }
}

// Sizes below 0, and what is cut or left out, from the sums and the places.
__device__ void count_bad_chunks(const Chunks& chunks) {
  constexpr int64_t kMost = int64_t(1) << 40;  // so that no sum overflows
  __shared__ unsigned long long found[2];
  if (threadIdx.x < 2) found[threadIdx.x] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < chunks.n; i += kMapThreads) {
    const int64_t size = chunks.sizes[i], held = chunks.in[i + 1] - chunks.in[i], named = chunks.order[i];
    int64_t lost = size > held ? size - held : 0;
    if (chunks.place[i] < 0) lost += held;
    if (named < 0 || named >= chunks.n || chunks.place[named] != i) ++lost;
    if (size < 0) atomicAdd(&found[0], 1ull);
    if (lost > 0) atomicAdd(&found[1], static_cast<unsigned long long>(lost < kMost ? lost : kMost));
  }
  __syncthreads();
  if (threadIdx.x >= 2 || found[threadIdx.x] == 0) return;
  const unsigned long long more = found[threadIdx.x];
  add_saturating(chunks.counters + threadIdx.x, more < 0xffffffffull ? uint32_t(more) : 0xffffffffu);
}

__global__ void __launch_bounds__(kMapThreads) chunk_starts_kernel(Chunks chunks) {
  for (int64_t c = threadIdx.x; c < chunks.n; c += kMapThreads) chunks.place[c] = -1;
  running_sums(chunks.n, chunks.rows, chunks.in, [&](int64_t c) {
    const int64_t size = chunks.sizes[c];
    return size < 0 ? 0 : size < chunks.rows ? size : chunks.rows;
  });
  __syncthreads();  // the sums, and the places
  running_sums(chunks.n, chunks.rows, chunks.out, [&](int64_t i) -> int64_t {
    const int64_t c = chunks.order[i];
    if (c < 0 || c >= chunks.n) return 0;
    chunks.place[c] = i;
    return chunks.in[c + 1] - chunks.in[c];
  });
  if (chunks.counters == nullptr) return;
  __syncthreads();  // the places
  count_bad_chunks(chunks);
}

// The last i with starts[i] <= row, which is a chunk with rows.
__device__ __forceinline__ int64_t chunk_of(const int64_t* starts, int64_t n, int64_t row) {
  int64_t low = 0, high = n - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    starts[middle] <= row ? low = middle : high = middle - 1;
  }
  return low;
}

__global__ void __launch_bounds__(kMapThreads) chunk_rows_kernel(Chunks chunks, int32_t* source, int32_t* destination) {
  const int64_t row = int64_t(blockIdx.x) * kMapThreads + threadIdx.x;
  if (row >= chunks.rows) return;
  const int64_t total = chunks.in[chunks.n];
  int64_t from = row < total ? -1 : row, to = from;
  if (row < total && row < chunks.out[chunks.n]) {
    const int64_t i = chunk_of(chunks.out, chunks.n, row), c = chunks.order[i];
    if (c >= 0 && c < chunks.n) from = chunks.in[c] + row - chunks.out[i];
  }
  if (row < total) {
    const int64_t c = chunk_of(chunks.in, chunks.n, row), i = chunks.place[c];
    const int64_t at = i < 0 ? -1 : chunks.out[i] + row - chunks.in[c];
    if (at >= 0 && at < chunks.out[i + 1]) to = at;
  }
  source[row] = int32_t(from);
  destination[row] = int32_t(to);
}

}  // namespace te::permute
