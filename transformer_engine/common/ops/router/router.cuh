// Kernels of the router: a warp for each token, in the lanes and the order of the CPU path, so that both give the same
// bits. The keys of a token's experts are in shared memory; a lane holds one chosen expert. Token kernels have no
// barrier of the block; nothing is atomic. The loss is summed by blocks of TE_ROUTER_LOSS_ROWS rows, then by one block
// over their sums. Plain CUDA C++, which tests/cpp/test_router_kernels.cpp runs on emulated blocks.
#pragma once

#include "core/reduce.cuh"
#include "ops/router/router_math.h"

namespace te::router::cuda {

constexpr int kWarps = 4;  // of a block, independent of each other
constexpr int kTokenThreads = kWarps * kWarp;
constexpr unsigned kAll = 0xffffffffu;

#if !defined(TE_EMULATED_GPU)
__device__ __forceinline__ uint32_t* dynamic_shared() {
  extern __shared__ uint32_t words[];
  return words;
}
#endif

template <class T>
__device__ __forceinline__ T* row_at(const te_tensor& t, int64_t row) {
  return static_cast<T*>(t.data) + row * t.row_pitch;
}

__device__ __forceinline__ Rank warp_max(Rank x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const Rank other =
        Rank(__shfl_xor_sync(kAll, key_in(x), offset)) << 32 | __shfl_xor_sync(kAll, uint32_t(x), offset);
    x = other > x ? other : x;
  }
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(kAll, x, offset);
    x = other > x ? other : x;
  }
  return x;
}

// x(i) for i of n: in lane i % 32. Every lane gets the result.
template <class X>
__device__ __forceinline__ Shares shares_of(int score, int lane, int n, X&& x) {
  Shares shares{score, -INFINITY, 1.f};
  if (score == TE_ROUTER_SOFTMAX) {
    for (int i = lane; i < n; i += kWarp) shares.top = x(i) > shares.top ? x(i) : shares.top;
    shares.top = warp_max(shares.top);
  }
  float sum = 0.f;
  for (int i = lane; i < n; i += kWarp) sum += shares.numerator(x(i));
  sum = warp_sum(sum);
  shares.sum = score == TE_ROUTER_SOFTMAX ? sum : sum + kEpsilon;
  return shares;
}

// The best of n keys that come after `last` (0xffff...: of all).
__device__ __forceinline__ Rank best_after(Rank last, const uint32_t* keys, int lane, int n) {
  Rank best = 0;
  for (int i = lane; i < n; i += kWarp) {
    const Rank rank = rank_of(keys[i], i);
    if (rank < last && rank > best) best = rank;
  }
  return warp_max(best);
}

// Clears the keys of experts outside of the best groups. A lane computes the scores of whole groups.
__device__ __forceinline__ void limit_to_groups(const te_router_plan& plan, uint32_t* keys, uint32_t* group_keys,
                                                int lane, int experts) {
  const int size = experts / plan.num_groups, counted = plan.topk / plan.group_topk;
  for (int g = lane; g < plan.num_groups; g += kWarp) {
    float sum = 0.f;
    Rank last = ~Rank(0);
    for (int k = 0; k < counted; ++k) {
      Rank best = 0;
      for (int i = 0; i < size; ++i) {
        const Rank rank = rank_of(keys[g * size + i], i);
        if (rank < last && rank > best) best = rank;
      }
      sum += value_of_key(key_in(best));
      last = best;
    }
    group_keys[g] = key_of(sum);
  }
  __syncwarp();
  Rank last = ~Rank(0);
  for (int k = 0; k < plan.group_topk; ++k) last = best_after(last, group_keys, lane, plan.num_groups);
  for (int e = lane; e < experts; e += kWarp) {
    const int g = e / size;
    if (rank_of(group_keys[g], g) < last) keys[e] = 0;
  }
  __syncwarp();
}

// Lane i < topk returns the i-th rank; *least: the last of them, so that an expert is chosen if its rank is not below.
__device__ __forceinline__ Rank choose(const uint32_t* keys, int topk, int lane, int experts, Rank* least) {
  Rank last = ~Rank(0), mine = 0;
  for (int k = 0; k < topk; ++k) {
    last = best_after(last, keys, lane, experts);
    if (lane == k) mine = last;
  }
  *least = last;
  return mine;
}

__device__ __forceinline__ bool is_chosen(const uint32_t* keys, int e, Rank least) {
  return rank_of(keys[e], e) >= least;
}

// Every lane of the warp calls it: a ballot gives 32 bits of the map.
__device__ __forceinline__ void write_map(const te_router_plan& plan, const te_tensor& map, int64_t row,
                                          const uint32_t* keys, int lane, int experts, Rank least) {
  if (map.data == nullptr) return;
  uint8_t* const bytes = row_at<uint8_t>(map, row);
  for (int first = 0; first < experts; first += kWarp) {
    const int e = first + lane;
    const bool chosen = e < experts && is_chosen(keys, e, least);
    if (plan.map_format == TE_ROUTER_BYTES) {
      if (e < experts) bytes[e] = chosen ? 1 : 0;
      continue;
    }
    const unsigned bits = __ballot_sync(kAll, chosen);
    if (lane < 4 && first / 8 + lane < int(map.cols)) bytes[first / 8 + lane] = uint8_t(bits >> (8 * lane));
  }
}

// A warp's token, or a row beyond the last.
__device__ __forceinline__ int64_t row_of_warp() { return int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; }
__device__ __forceinline__ int lane_of_warp() { return int(threadIdx.x % kWarp); }

// The logits of the chosen experts are in lanes; what their probabilities are shares of.
template <class X>
__device__ __forceinline__ Shares shares_of_choice(const te_router_plan& plan, const Shares& all, int lane,
                                                   X&& chosen_x) {
  if (softmax_over_all(plan)) return all;
  if (!divides(plan)) return Shares{plan.score, 0.f, 1.f};
  return shares_of(plan.score, lane, plan.topk, chosen_x);
}

template <class T>
__global__ void forward_kernel(const te_router_plan plan, const te_tensor probs, const te_tensor chosen,
                               const te_tensor map) {
  const int lane = lane_of_warp(), experts = int(plan.logits.cols);
  const int64_t row = row_of_warp();
  if (row >= plan.logits.rows) return;
  uint32_t* const keys = dynamic_shared() + threadIdx.x / kWarp * (experts + plan.num_groups);
  const T* const x = row_at<const T>(plan.logits, row);
  const float* const bias = static_cast<const float*>(plan.expert_bias.data);
  const auto logit = [&](int e) { return to_float(x[e]); };

  Shares all{plan.score, 0.f, 1.f};
  if (softmax_over_all(plan)) all = shares_of(plan.score, lane, experts, logit);
  for (int e = lane; e < experts; e += kWarp) {
    keys[e] = key_of(choice_value(plan, all, logit(e), bias != nullptr ? bias[e] : 0.f));
  }
  __syncwarp();
  if (plan.num_groups > 0) limit_to_groups(plan, keys, keys + experts, lane, experts);

  Rank least;
  const Rank mine = choose(keys, plan.topk, lane, experts, &least);
  const int own = lane < plan.topk ? index_of(mine) : 0;
  const float own_x = logit(own);
  const Shares shares = shares_of_choice(plan, all, lane, [&](int) { return own_x; });
  T* const out = row_at<T>(probs, row);
  for (int e = lane; e < experts; e += kWarp) {
    if (!is_chosen(keys, e, least)) out[e] = from_float<T>(0.f);
  }
  if (lane < plan.topk) {
    out[own] = from_float<T>(plan.scaling_factor * shares.of(own_x));
    row_at<int32_t>(chosen, row)[lane] = own;
  }
  write_map(plan, map, row, keys, lane, experts, least);
}

template <class T>
__global__ void backward_kernel(const te_router_plan plan, const te_tensor dprobs, const te_tensor chosen,
                                const te_tensor dlogits) {
  const int lane = lane_of_warp(), experts = int(plan.logits.cols);
  const int64_t row = row_of_warp();
  if (row >= plan.logits.rows) return;
  const T* const x = row_at<const T>(plan.logits, row);
  const auto logit = [&](int e) { return to_float(x[e]); };
  const int own = lane < plan.topk ? row_at<const int32_t>(chosen, row)[lane] : 0;
  const bool valid = lane < plan.topk && own >= 0 && own < experts;
  const float own_x = logit(valid ? own : 0);
  const float g = valid ? product(plan.scaling_factor, to_float(row_at<const T>(dprobs, row)[own])) : 0.f;

  Shares all{plan.score, 0.f, 1.f};
  const bool over_all = softmax_over_all(plan);
  if (over_all) all = shares_of(plan.score, lane, experts, logit);
  const Shares shares = shares_of_choice(plan, all, lane, [&](int) { return own_x; });
  const float dot = divides(plan) ? warp_sum(valid ? fmaf(g, shares.of(own_x), 0.f) : 0.f) : 0.f;
  T* const dx = row_at<T>(dlogits, row);
  for (int e = lane; e < experts; e += kWarp) {
    dx[e] = from_float<T>(over_all ? shares.gradient(logit(e), 0.f, dot) : 0.f);
  }
  __syncwarp();  // the chosen ones are written again, by other lanes
  if (valid) dx[own] = from_float<T>(shares.gradient(own_x, g, dot));
}

template <class T>
__global__ void scores_forward_kernel(const te_router_plan plan, const te_tensor scores, const te_tensor map) {
  const int lane = lane_of_warp(), experts = int(plan.logits.cols);
  const int64_t row = row_of_warp();
  if (row >= plan.logits.rows) return;
  uint32_t* const keys = dynamic_shared() + threadIdx.x / kWarp * experts;
  const T* const x = row_at<const T>(plan.logits, row);
  const auto logit = [&](int e) { return to_float(x[e]); };
  const Shares shares = shares_of(plan.score, lane, experts, logit);
  float* const out = row_at<float>(scores, row);
  for (int e = lane; e < experts; e += kWarp) {
    const float value = shares.of(logit(e));
    out[e] = value;
    keys[e] = key_of(value);
  }
  __syncwarp();
  if (map.data == nullptr) return;
  Rank least;
  choose(keys, plan.topk, lane, experts, &least);
  write_map(plan, map, row, keys, lane, experts, least);
}

template <class T>
__global__ void scores_backward_kernel(const te_router_plan plan, const te_tensor dscores, const te_tensor dlogits) {
  const int lane = lane_of_warp(), experts = int(plan.logits.cols);
  const int64_t row = row_of_warp();
  if (row >= plan.logits.rows) return;
  const T* const x = row_at<const T>(plan.logits, row);
  const float* const g = row_at<const float>(dscores, row);
  const auto logit = [&](int e) { return to_float(x[e]); };
  const Shares shares = shares_of(plan.score, lane, experts, logit);
  float dot = 0.f;
  for (int e = lane; e < experts; e += kWarp) dot = fmaf(g[e], shares.of(logit(e)), dot);
  dot = warp_sum(dot);
  T* const dx = row_at<T>(dlogits, row);
  for (int e = lane; e < experts; e += kWarp) dx[e] = from_float<T>(shares.gradient(logit(e), g[e], dot));
}

// Adds the lanes of a block by halves; thread 0 returns the sum.
__device__ __forceinline__ float sum_of_halves(float lane, float* lanes) {
  const int thread = int(threadIdx.x);
  lanes[thread] = lane;
  __syncthreads();
  for (int offset = kLossLanes / 2; offset > 0; offset /= 2) {
    if (thread < offset) lanes[thread] += lanes[thread + offset];
    __syncthreads();
  }
  return lanes[0];
}

template <class T>
__global__ void loss_parts_kernel(const te_router_loss_plan plan, const te_tensor probs, float* partials) {
  __shared__ float lanes[kLossLanes];
  const int64_t first = int64_t(blockIdx.x) * TE_ROUTER_LOSS_ROWS;
  const int64_t last = min(probs.rows, first + TE_ROUTER_LOSS_ROWS);
  float lane = 0.f;
  for (int64_t row = first + threadIdx.x / kWarp; row < last; row += kLossRows) {
    const T* const p = row_at<const T>(probs, row);
    for (int64_t c = lane_of_warp(); c < probs.cols; c += kWarp) {
      lane = fmaf(to_float(p[c]), tokens_at(plan.tokens_per_expert, c), lane);
    }
  }
  const float sum = sum_of_halves(lane, lanes);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__device__ __forceinline__ float scale_of(const te_router_loss_plan& plan) {
  const auto* total = static_cast<const int64_t*>(plan.total_tensor.data);
  return loss_scale(plan, total != nullptr ? *total : plan.total);
}

template <class T>
__global__ void loss_kernel(const te_router_loss_plan plan, const float* partials, int64_t parts, T* loss) {
  __shared__ float lanes[kLossLanes];
  const int thread = int(threadIdx.x);
  float lane = 0.f;
  for (int64_t part = thread; part < parts; part += kLossLanes) lane += partials[part];
  const float sum = sum_of_halves(lane, lanes);
  if (thread == 0) *loss = from_float<T>(sum * scale_of(plan));
}

template <class T>
__global__ void loss_backward_kernel(const te_router_loss_plan plan, const T* dloss, const te_tensor dprobs) {
  const float factor = product(to_float(*dloss), scale_of(plan));
  const int64_t first = int64_t(blockIdx.x) * TE_ROUTER_LOSS_ROWS;
  const int64_t last = min(dprobs.rows, first + TE_ROUTER_LOSS_ROWS);
  for (int64_t row = first + threadIdx.x / kWarp; row < last; row += kLossRows) {
    T* const out = row_at<T>(dprobs, row);
    for (int64_t c = lane_of_warp(); c < dprobs.cols; c += kWarp) {
      out[c] = from_float<T>(factor * tokens_at(plan.tokens_per_expert, c));
    }
  }
}

}  // namespace te::router::cuda
