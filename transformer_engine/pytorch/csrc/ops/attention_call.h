// The arguments of te::attention as its kernels read them, and what a kernel gives. A kernel is a forward that returns
// out and lse, and a backward that takes them, so that attention_laws.h serves each one.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "core/common.h"

namespace te_torch {

// The queries and keys of a block of scores.
inline constexpr int64_t kAttentionQueryBlock = 256, kAttentionKeyBlock = 512;

using TensorsOrNone = c10::List<std::optional<Tensor>>;

// The tensors that determine which rows are tokens and which scores are masked out; none has a gradient.
enum AttentionRow : uint8_t {
  kMask,
  kPresentQ,
  kPresentKv,
  kLengthsQ,
  kLengthsKv,
  kStartsQ,
  kStartsKv,
  kAttentionRows
};

// Dense: q [s, b, h, d], k [s_kv, b, g, d], v [s_kv, b, g, d_v] (batch_first: b before s). Packed: the same without b,
// the sequences one after another.
struct AttentionCall {
  Tensor q, k, v;
  std::optional<Tensor> bias, slopes, sink;
  std::array<Tensor, kAttentionRows> rows;
  bool packed = false, batch_first = false;
  int64_t left = -1, right = -1;  // keys before and after the diagonal, -1: all
  bool bottom_right = false;      // the diagonal ends there
  std::array<std::optional<int64_t>, 2> max_lengths;
  double scale = 1.0, bias_scale = 1.0, softcap = 0.0;

  int64_t heads() const { return q.size(-2); }
  int64_t groups() const { return k.size(-2); }
  at::ScalarType compute_dtype() const { return q.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }
};

struct AttentionResult {
  Tensor out, lse;   // out as q with the width of v; lse as q without its last dimension, in the dtype of computation
  Tensor max_logit;  // [h], the largest seen score, in the dtype of computation
};

enum AttentionInput : uint8_t { kQuery, kKey, kValue, kScoreBias, kSlopes, kSink, kAttentionInputs };
using AttentionWanted = std::array<bool, kAttentionInputs>;
using AttentionGradients = std::array<Tensor, kAttentionInputs>;

}  // namespace te_torch
