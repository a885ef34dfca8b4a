// router, contract and CPU path (the specification). The formulas are in router_math.h.
#include "transformer_engine/router.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"
#include "ops/router/router_math.h"

namespace te::router {

namespace cuda {
void forward(const te_router_plan& plan, te_tensor probs, te_tensor chosen, te_tensor map, te_stream stream);
void backward(const te_router_plan& plan, te_tensor dprobs, te_tensor chosen, te_tensor dlogits, te_stream stream);
void scores_forward(const te_router_plan& plan, te_tensor scores, te_tensor map, te_stream stream);
void scores_backward(const te_router_plan& plan, te_tensor dscores, te_tensor dlogits, te_stream stream);
void loss_forward(const te_router_loss_plan& plan, te_tensor probs, te_tensor partials, te_tensor loss,
                  te_stream stream);
void loss_backward(const te_router_loss_plan& plan, te_tensor dloss, te_tensor dprobs, te_stream stream);
}  // namespace cuda

namespace cpu {

using namespace te::cpu;

using Floats = std::array<float, TE_ROUTER_MAX_EXPERTS>;

// The row widened to float, in place or in `buffer`.
template <class T>
const float* widened(const te_tensor& t, int64_t row, Floats& buffer) {
  return load_chunk(row_ptr<const T>(t, row), buffer.data(), t.cols);
}

// Adds lanes by halves, as a butterfly over a warp does.
template <size_t kCount>
float sum_of_halves(std::array<float, kCount>& lanes) {
  for (size_t offset = kCount / 2; offset > 0; offset /= 2) {
    for (size_t i = 0; i < offset; ++i) lanes[i] += lanes[i + offset];
  }
  return lanes[0];
}

template <class F>
float sum_in_lanes(int n, F&& add) {
  std::array<float, kSumLanes> lanes{};
  for (int i = 0; i < n; ++i) lanes[size_t(i % kSumLanes)] = add(i, lanes[size_t(i % kSumLanes)]);
  return sum_of_halves(lanes);
}

Shares shares_of(int score, const float* x, int n) {
  Shares shares{score, -INFINITY, 1.f};
  for (int i = 0; i < n; ++i) shares.top = x[i] > shares.top ? x[i] : shares.top;
  const float sum = sum_in_lanes(n, [&](int i, float lane) { return lane + shares.numerator(x[i]); });
  shares.sum = score == TE_ROUTER_SOFTMAX ? sum : sum + kEpsilon;
  return shares;
}

// The first `count` ranks of n keys, in order.
void first_ranks(const uint32_t* keys, int n, int count, Rank* ranks) {
  std::array<Rank, TE_ROUTER_MAX_EXPERTS> all;
  for (int i = 0; i < n; ++i) all[size_t(i)] = rank_of(keys[i], i);
  std::partial_sort_copy(all.begin(), all.begin() + n, ranks, ranks + count, std::greater<Rank>());
}

// Clears the keys of experts outside of the best groups.
void limit_to_groups(const te_router_plan& plan, uint32_t* keys, int experts) {
  const int size = experts / plan.num_groups, counted = plan.topk / plan.group_topk;
  std::array<uint32_t, TE_ROUTER_MAX_EXPERTS> group_keys{};
  std::array<Rank, TE_ROUTER_MAX_EXPERTS> ranks;
  for (int g = 0; g < plan.num_groups; ++g) {
    first_ranks(keys + g * size, size, counted, ranks.data());
    float sum = 0.f;
    for (int i = 0; i < counted; ++i) sum += value_of_key(key_in(ranks[size_t(i)]));
    group_keys[size_t(g)] = key_of(sum);
  }
  first_ranks(group_keys.data(), plan.num_groups, plan.group_topk, ranks.data());
  const Rank last = ranks[size_t(plan.group_topk) - 1];
  for (int g = 0; g < plan.num_groups; ++g) {
    if (rank_of(group_keys[size_t(g)], g) < last) std::fill_n(keys + g * size, size, 0u);
  }
}

void choose(const te_router_plan& plan, const float* x, int experts, int32_t* chosen) {
  const auto* bias = static_cast<const float*>(plan.expert_bias.data);
  const Shares all = softmax_over_all(plan) ? shares_of(plan.score, x, experts) : Shares{plan.score, 0.f, 1.f};
  std::array<uint32_t, TE_ROUTER_MAX_EXPERTS> keys;
  for (int e = 0; e < experts; ++e) {
    keys[size_t(e)] = key_of(choice_value(plan, all, x[e], bias != nullptr ? bias[e] : 0.f));
  }
  if (plan.num_groups > 0) limit_to_groups(plan, keys.data(), experts);
  std::array<Rank, TE_ROUTER_MAX_TOPK> ranks;
  first_ranks(keys.data(), experts, plan.topk, ranks.data());
  for (int i = 0; i < plan.topk; ++i) chosen[i] = index_of(ranks[size_t(i)]);
}

// The logits of the chosen experts, and what their probabilities are shares of.
struct Chosen {
  std::array<float, TE_ROUTER_MAX_TOPK> x;
  Shares shares;

  Chosen(const te_router_plan& plan, const float* row, int experts, const int32_t* chosen)
      : shares{plan.score, 0.f, 1.f} {
    for (int i = 0; i < plan.topk; ++i) x[size_t(i)] = row[chosen[i]];
    if (softmax_over_all(plan)) {
      shares = shares_of(plan.score, row, experts);
    } else if (divides(plan)) {
      shares = shares_of(plan.score, x.data(), plan.topk);
    }
  }
};

void write_map(const te_router_plan& plan, const te_tensor& map, int64_t row, const int32_t* chosen) {
  if (map.data == nullptr) return;
  auto* bytes = row_ptr<uint8_t>(map, row);
  std::memset(bytes, 0, size_t(map.cols));
  for (int i = 0; i < plan.topk; ++i) {
    const int32_t e = chosen[i];
    if (plan.map_format == TE_ROUTER_BYTES) {
      bytes[e] = 1;
    } else {
      bytes[e / 8] = uint8_t(bytes[e / 8] | 1u << (e % 8));
    }
  }
}

// body(row) for each token, with about 16 operations for each logit.
template <class Body>
void for_tokens(const te_tensor& logits, Body&& body) {
  parallel_rows(logits.rows, 16 * logits.cols, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) body(row);
  });
}

void forward(const te_router_plan& plan, const te_tensor& probs, const te_tensor& chosen, const te_tensor& map) {
  const int experts = int(plan.logits.cols);
  dispatch_float(plan.logits.dtype, "te_router_forward", "plan.logits", [&](auto t) {
    using T = decltype(t);
    for_tokens(plan.logits, [&](int64_t row) {
      Floats buffer;
      const float* x = widened<T>(plan.logits, row, buffer);
      auto* picked = row_ptr<int32_t>(chosen, row);
      choose(plan, x, experts, picked);
      const Chosen of(plan, x, experts, picked);
      T* const out = row_ptr<T>(probs, row);
      std::fill_n(out, experts, from_float<T>(0.f));
      for (int i = 0; i < plan.topk; ++i) {
        out[picked[i]] = from_float<T>(plan.scaling_factor * of.shares.of(of.x[size_t(i)]));
      }
      write_map(plan, map, row, picked);
    });
  });
}

void backward(const te_router_plan& plan, const te_tensor& dprobs, const te_tensor& chosen, const te_tensor& dlogits) {
  const int experts = int(plan.logits.cols);
  dispatch_float(plan.logits.dtype, "te_router_backward", "plan.logits", [&](auto t) {
    using T = decltype(t);
    for_tokens(plan.logits, [&](int64_t row) {
      Floats buffer;
      const float* x = widened<T>(plan.logits, row, buffer);
      const auto* picked = row_ptr<const int32_t>(chosen, row);
      const Chosen of(plan, x, experts, picked);
      std::array<float, TE_ROUTER_MAX_TOPK> g;
      const T* dy = row_ptr<const T>(dprobs, row);
      for (int i = 0; i < plan.topk; ++i) g[size_t(i)] = product(plan.scaling_factor, to_float(dy[picked[i]]));
      const float dot =
          divides(plan)
              ? sum_in_lanes(plan.topk,
                             [&](int i, float lane) { return fmaf(g[size_t(i)], of.shares.of(of.x[size_t(i)]), lane); })
              : 0.f;
      T* const dx = row_ptr<T>(dlogits, row);
      const bool all = softmax_over_all(plan);
      for (int e = 0; e < experts; ++e) dx[e] = from_float<T>(all ? of.shares.gradient(x[e], 0.f, dot) : 0.f);
      for (int i = 0; i < plan.topk; ++i) {
        dx[picked[i]] = from_float<T>(of.shares.gradient(of.x[size_t(i)], g[size_t(i)], dot));
      }
    });
  });
}

void scores_forward(const te_router_plan& plan, const te_tensor& scores, const te_tensor& map) {
  const int experts = int(plan.logits.cols);
  dispatch_float(plan.logits.dtype, "te_router_scores_forward", "plan.logits", [&](auto t) {
    for_tokens(plan.logits, [&](int64_t row) {
      Floats buffer;
      const float* x = widened<decltype(t)>(plan.logits, row, buffer);
      const Shares shares = shares_of(plan.score, x, experts);
      auto* out = row_ptr<float>(scores, row);
      for (int e = 0; e < experts; ++e) out[e] = shares.of(x[e]);
      if (map.data == nullptr) return;
      std::array<uint32_t, TE_ROUTER_MAX_EXPERTS> keys;
      for (int e = 0; e < experts; ++e) keys[size_t(e)] = key_of(out[e]);
      std::array<Rank, TE_ROUTER_MAX_TOPK> ranks;
      first_ranks(keys.data(), experts, plan.topk, ranks.data());
      std::array<int32_t, TE_ROUTER_MAX_TOPK> picked;
      for (int i = 0; i < plan.topk; ++i) picked[size_t(i)] = index_of(ranks[size_t(i)]);
      write_map(plan, map, row, picked.data());
    });
  });
}

void scores_backward(const te_router_plan& plan, const te_tensor& dscores, const te_tensor& dlogits) {
  const int experts = int(plan.logits.cols);
  dispatch_float(plan.logits.dtype, "te_router_scores_backward", "plan.logits", [&](auto t) {
    using T = decltype(t);
    for_tokens(plan.logits, [&](int64_t row) {
      Floats buffer;
      const float* x = widened<T>(plan.logits, row, buffer);
      const auto* g = row_ptr<const float>(dscores, row);
      const Shares shares = shares_of(plan.score, x, experts);
      const float dot = sum_in_lanes(experts, [&](int e, float lane) { return fmaf(g[e], shares.of(x[e]), lane); });
      T* const dx = row_ptr<T>(dlogits, row);
      for (int e = 0; e < experts; ++e) dx[e] = from_float<T>(shares.gradient(x[e], g[e], dot));
    });
  });
}

float scale_of(const te_router_loss_plan& plan) {
  const auto* total = static_cast<const int64_t*>(plan.total_tensor.data);
  return loss_scale(plan, total != nullptr ? *total : plan.total);
}

void loss_forward(const te_router_loss_plan& plan, const te_tensor& probs, const te_tensor& partials,
                  const te_tensor& loss) {
  dispatch_float(probs.dtype, "te_router_loss_forward", "probs", [&](auto t) {
    using T = decltype(t);
    auto* sums = static_cast<float*>(partials.data);
    const int64_t parts = (probs.rows + TE_ROUTER_LOSS_ROWS - 1) / TE_ROUTER_LOSS_ROWS;
    parallel_for(parts, [&](int64_t part) {
      std::array<float, kLossLanes> lanes{};
      const int64_t first = part * TE_ROUTER_LOSS_ROWS, last = std::min(probs.rows, first + TE_ROUTER_LOSS_ROWS);
      for (int64_t row = first; row < last; ++row) {
        const T* p = row_ptr<const T>(probs, row);
        float* own = lanes.data() + (row - first) % kLossRows * kSumLanes;
        for (int64_t c = 0; c < probs.cols; ++c) {
          float& lane = own[c % kSumLanes];
          lane = fmaf(to_float(p[c]), tokens_at(plan.tokens_per_expert, c), lane);
        }
      }
      sums[part] = sum_of_halves(lanes);
    });
    std::array<float, kLossLanes> lanes{};
    for (int64_t part = 0; part < parts; ++part) lanes[size_t(part % kLossLanes)] += sums[part];
    *static_cast<T*>(loss.data) = from_float<T>(sum_of_halves(lanes) * scale_of(plan));
  });
}

void loss_backward(const te_router_loss_plan& plan, const te_tensor& dloss, const te_tensor& dprobs) {
  dispatch_float(dprobs.dtype, "te_router_loss_backward", "dprobs", [&](auto t) {
    using T = decltype(t);
    const float factor = product(to_float(*static_cast<const T*>(dloss.data)), scale_of(plan));
    parallel_rows(dprobs.rows, dprobs.cols, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        T* const out = row_ptr<T>(dprobs, row);
        for (int64_t c = 0; c < dprobs.cols; ++c) out[c] = from_float<T>(factor * tokens_at(plan.tokens_per_expert, c));
      }
    });
  });
}

}  // namespace cpu

namespace {

te_tensor as(te_dtype dtype, int32_t device) { return te_tensor{nullptr, 0, 0, 0, dtype, device}; }

void check_choice(const char* op, const te_router_plan& plan) {
  const int64_t experts = plan.logits.cols, most = std::min<int64_t>(experts, TE_ROUTER_MAX_TOPK);
  if (plan.topk < 1 || plan.topk > most) {
    bad_argument(op, "plan.topk", plan.topk, concat("1 to ", most, ", the experts of a token of ", experts));
  }
}

void check_plan(const char* op, const te_router_plan* plan) {
  if (plan == nullptr) bad_argument(op, "plan", "NULL", "a plan");
  const te_tensor& x = plan->logits;
  check_tensor(op, "plan.logits", x);
  if (x.cols < 1 || x.cols > TE_ROUTER_MAX_EXPERTS) {
    bad_argument(op, "plan.logits", shape_of(x),
                 concat("1 to ", TE_ROUTER_MAX_EXPERTS, " columns, one for each expert"));
  }
  dispatch_float(x.dtype, op, "plan.logits", [](auto) {});
  if (plan->score < TE_ROUTER_SOFTMAX || plan->score > TE_ROUTER_SQRTSOFTPLUS) {
    bad_argument(op, "plan.score", plan->score, "a te_router_score");
  }
}

void check_groups(const char* op, const te_router_plan& plan) {
  if (plan.num_groups == 0 && plan.group_topk == 0) return;
  const int64_t experts = plan.logits.cols;
  if (plan.num_groups < 1 || experts % plan.num_groups != 0) {
    bad_argument(op, "plan.num_groups", plan.num_groups, concat("a divisor of the ", experts, " experts"));
  }
  if (plan.group_topk < 1 || plan.group_topk > plan.num_groups || plan.topk % plan.group_topk != 0) {
    bad_argument(op, "plan.group_topk", plan.group_topk,
                 concat("a divisor of topk = ", plan.topk, " from 1 to num_groups = ", plan.num_groups));
  }
  const int64_t size = experts / plan.num_groups;
  if (plan.topk / plan.group_topk > size) {
    bad_argument(op, "plan.group_topk", plan.group_topk,
                 concat("topk / group_topk at most ", size, ", the experts of a group; topk is ", plan.topk));
  }
}

void check_map(const char* op, const te_router_plan& plan, const te_tensor& map) {
  if (is_absent(map)) return;
  if (plan.map_format != TE_ROUTER_BYTES && plan.map_format != TE_ROUTER_BITS) {
    bad_argument(op, "plan.map_format", plan.map_format, "a te_router_map");
  }
  const int64_t experts = plan.logits.cols;
  check_as(op, "map", map, plan.logits.rows, plan.map_format == TE_ROUTER_BYTES ? experts : (experts + 7) / 8,
           as(TE_UINT8, plan.logits.device));
}

void check_chosen(const char* op, const te_router_plan& plan, const te_tensor& chosen) {
  check_as(op, "chosen", chosen, plan.logits.rows, plan.topk, as(TE_INT32, plan.logits.device));
}

// Where the host can read them: on the CPU.
void check_chosen_values(const char* op, const te_router_plan& plan, const te_tensor& chosen) {
  if (chosen.device != TE_DEVICE_CPU) return;
  for (int64_t row = 0; row < chosen.rows; ++row) {
    for (int64_t i = 0; i < chosen.cols; ++i) {
      const int32_t e = row_ptr<const int32_t>(chosen, row)[i];
      if (e < 0 || e >= plan.logits.cols) {
        bad_argument(op, "chosen", concat(e, " in row ", row), concat("0 to ", plan.logits.cols - 1));
      }
    }
  }
}

void check_loss(const char* op, const te_router_loss_plan* plan, const te_tensor& probs) {
  if (plan == nullptr) bad_argument(op, "plan", "NULL", "a plan");
  if (plan->num_experts < 1 || probs.cols % plan->num_experts != 0) {
    bad_argument(op, "plan.num_experts", plan->num_experts, concat("a divisor of the ", probs.cols, " columns"));
  }
  if (plan->topk < 1) bad_argument(op, "plan.topk", plan->topk, "at least 1");
  const te_tensor& tokens = plan->tokens_per_expert;
  if (tokens.dtype != TE_INT32 && tokens.dtype != TE_INT64 && tokens.dtype != TE_FLOAT32) {
    const char* name = te_dtype_name(tokens.dtype);
    bad_argument(op, "plan.tokens_per_expert", concat("of dtype ", name ? name : "unknown"), "int32, int64 or float32");
  }
  check_as(op, "plan.tokens_per_expert", tokens, 1, probs.cols, as(tokens.dtype, probs.device));
  if (plan->total_tensor.data != nullptr) {
    check_as(op, "plan.total_tensor", plan->total_tensor, 1, 1, as(TE_INT64, probs.device));
  } else if (plan->total < 0) {
    bad_argument(op, "plan.total", plan->total, "at least 0");
  }
}

}  // namespace

}  // namespace te::router

extern "C" {

te_status te_router_forward(const te_router_plan* plan, te_tensor probs, te_tensor chosen, te_tensor map,
                            te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_router_forward";
    router::check_plan(kOp, plan);
    const te_tensor& x = plan->logits;
    router::check_choice(kOp, *plan);
    router::check_groups(kOp, *plan);
    if (!is_absent(plan->expert_bias)) {
      if (plan->score == TE_ROUTER_SOFTMAX) bad_argument(kOp, "plan.expert_bias", "given", "none for SOFTMAX");
      check_floats(kOp, "plan.expert_bias", plan->expert_bias, 1, x.cols, x.device);
    }
    check_as(kOp, "probs", probs, x.rows, x.cols, x);
    router::check_chosen(kOp, *plan, chosen);
    router::check_map(kOp, *plan, map);
    if (x.rows == 0) return;
    TE_ON_DEVICE_OF(kOp, x, router::cpu::forward(*plan, probs, chosen, map),
                    router::cuda::forward(*plan, probs, chosen, map, stream));
  });
}

te_status te_router_backward(const te_router_plan* plan, te_tensor dprobs, te_tensor chosen, te_tensor dlogits,
                             te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_router_backward";
    router::check_plan(kOp, plan);
    const te_tensor& x = plan->logits;
    router::check_choice(kOp, *plan);
    check_as(kOp, "dprobs", dprobs, x.rows, x.cols, x);
    check_as(kOp, "dlogits", dlogits, x.rows, x.cols, x);
    router::check_chosen(kOp, *plan, chosen);
    router::check_chosen_values(kOp, *plan, chosen);
    if (x.rows == 0) return;
    TE_ON_DEVICE_OF(kOp, x, router::cpu::backward(*plan, dprobs, chosen, dlogits),
                    router::cuda::backward(*plan, dprobs, chosen, dlogits, stream));
  });
}

te_status te_router_scores_forward(const te_router_plan* plan, te_tensor scores, te_tensor map, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_router_scores_forward";
    router::check_plan(kOp, plan);
    const te_tensor& x = plan->logits;
    check_floats(kOp, "scores", scores, x.rows, x.cols, x.device);
    if (!is_absent(map)) router::check_choice(kOp, *plan);
    router::check_map(kOp, *plan, map);
    if (x.rows == 0) return;
    TE_ON_DEVICE_OF(kOp, x, router::cpu::scores_forward(*plan, scores, map),
                    router::cuda::scores_forward(*plan, scores, map, stream));
  });
}

te_status te_router_scores_backward(const te_router_plan* plan, te_tensor dscores, te_tensor dlogits,
                                    te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_router_scores_backward";
    router::check_plan(kOp, plan);
    const te_tensor& x = plan->logits;
    check_floats(kOp, "dscores", dscores, x.rows, x.cols, x.device);
    check_as(kOp, "dlogits", dlogits, x.rows, x.cols, x);
    if (x.rows == 0) return;
    TE_ON_DEVICE_OF(kOp, x, router::cpu::scores_backward(*plan, dscores, dlogits),
                    router::cuda::scores_backward(*plan, dscores, dlogits, stream));
  });
}

te_status te_router_loss_forward(const te_router_loss_plan* plan, te_tensor probs, te_tensor partials, te_tensor loss,
                                 te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_router_loss_forward";
    check_tensor(kOp, "probs", probs);
    router::check_loss(kOp, plan, probs);
    const int64_t parts = (probs.rows + TE_ROUTER_LOSS_ROWS - 1) / TE_ROUTER_LOSS_ROWS;
    check_floats(kOp, "partials", partials, 1, std::max<int64_t>(1, parts), probs.device);
    check_as(kOp, "loss", loss, 1, 1, probs);
    TE_ON_DEVICE_OF(kOp, probs, router::cpu::loss_forward(*plan, probs, partials, loss),
                    router::cuda::loss_forward(*plan, probs, partials, loss, stream));
  });
}

te_status te_router_loss_backward(const te_router_loss_plan* plan, te_tensor dloss, te_tensor dprobs,
                                  te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_router_loss_backward";
    check_tensor(kOp, "dprobs", dprobs);
    router::check_loss(kOp, plan, dprobs);
    check_as(kOp, "dloss", dloss, 1, 1, dprobs);
    if (dprobs.rows * dprobs.cols == 0) return;
    TE_ON_DEVICE_OF(kOp, dprobs, router::cpu::loss_backward(*plan, dloss, dprobs),
                    router::cuda::loss_backward(*plan, dloss, dprobs, stream));
  });
}

}  // extern "C"
