// Attention by aten::_flash_attention_forward and _backward. Packed, it reads rows cum[i] .. cum[i + 1] as sequence i.
// - Padding after the last sequence is beyond cum. Padding between sequences becomes sequences of its own (pieces):
//   queries without keys and keys without queries, so that the kernel reads no padding. It leaves results and gradients
//   of padding open; the engine writes their zeros, and applies the law of a sink in the same pass.
// - Its diagonal ends bottom right. It clamps a window's right side by the bound of the keys' lengths, which a window
//   without a right side has for one, too. Of a batch that bound is the keys' length.
#include "ops/attention_flash.h"

#include <ATen/Context.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>
#include <mutex>

#include "ops/attention_passes.h"

namespace te_torch {

namespace {

constexpr int64_t kMostHeadDim = 256, kHeadDimUnit = 8;
// Bounds are multiples of it: the kernel takes at least as many rows at once, and has another form for a bound of 1.
constexpr int64_t kFlashRows = 128;
constexpr int64_t kMostFlashSequences = 65535;  // the second dimension of its grid

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The sequences of one side of a call.
struct FlashSide {
  FlashSide(const AttentionCall& call, bool keys) : lengths(call.rows[keys ? kLengthsKv : kLengthsQ]) {
    const Tensor& t = keys ? call.k : call.q;
    if (!call.packed) {
      sequences = t.size(call.batch_first ? 0 : 1), longest = bound = t.size(call.batch_first ? 1 : 0);
      rows = sequences * longest;
      return;
    }
    rows = t.size(0), sequences = lengths.size(0) - 1;
    if (rows == 0 || sequences == 0) return;
    const auto most = call.max_lengths[keys ? 1 : 0];
    longest = std::min(rows, most.has_value() ? *most : lengths.diff().max().item<int64_t>());
    bound = rounded_up(std::max<int64_t>(longest, 1), kFlashRows);
  }

  const Tensor& lengths;  // undefined: a batch
  int64_t rows = 0, sequences = 0, longest = 0, bound = kFlashRows;
};

// The arguments of the kernel that both directions take.
struct FlashRows {
  explicit FlashRows(const AttentionCall& call)
      : queries(call, false), keys(call, true), cumulative_q(queries.lengths), cumulative_k(keys.lengths) {
    empty = queries.rows == 0 || keys.rows == 0 || queries.sequences == 0;
    if (empty) return;
    left = call.left >= keys.longest ? -1 : call.left;
    right = call.right >= queries.longest ? -1 : call.right;
    bound_k = keys.bound;
    if (!call.packed) return;
    const int64_t least = left >= 0 && right < 0 ? queries.bound : rounded_up(right + 1, kFlashRows);
    bound_k = std::max(keys.bound, least);
    has_pieces = call.rows[kStartsQ].defined() || call.rows[kStartsKv].defined();
    if (has_pieces) {
      cumulative_q = at::empty({3 * queries.sequences + 1}, queries.lengths.options());
      cumulative_k = at::empty_like(cumulative_q);
      check_sequences(call, cumulative_q, cumulative_k);
    }
    TORCH_CHECK_VALUE(cumulative_q.size(0) - 1 <= kMostFlashSequences, "attention: kernel 'flash' takes at most ",
                      kMostFlashSequences, " sequences, those of padding with them, got ", cumulative_q.size(0) - 1,
                      "; use kernel='chunked' (NVTE_FLASH_ATTN=0).");
  }

  bool causal() const { return left < 0 && right == 0; }

  FlashSide queries, keys;
  bool empty, has_pieces = false;
  Tensor cumulative_q, cumulative_k;
  // An implementation in place of torch's own takes -1 for a window.
  std::optional<int64_t> window_left() const { return left < 0 ? std::nullopt : std::optional(left); }
  std::optional<int64_t> window_right() const { return right < 0 || causal() ? std::nullopt : std::optional(right); }

  int64_t left = -1, right = -1, bound_k = 0;
};

// t [.., heads, any width] with `width` columns, zeros after its own, as the kernel reads memory.
Tensor for_flash(const Tensor& t, int64_t width) {
  if (t.size(-1) != width) return at::constant_pad_nd(t, {0, width - t.size(-1)});
  return aligned_for_kernel(t);
}

// Packed as it is; [b, s, h, d] of a batch, and back.
Tensor by_sequence(const AttentionCall& call, const Tensor& t) {
  return call.packed || call.batch_first ? t : t.transpose(0, 1);
}

// PyTorch's flash reads the flag of the process, so for the time of a call that is set.
class ScopedDeterminism {
 public:
  explicit ScopedDeterminism(bool wanted) {
    if (!wanted) return;
    lock_ = std::unique_lock(mutex_);
    auto& context = at::globalContext();
    was_ = context.deterministicAlgorithms(), warned_ = context.deterministicAlgorithmsWarnOnly();
    filled_ = context.deterministicFillUninitializedMemory();
    if (!was_) context.setDeterministicFillUninitializedMemory(false);
    context.setDeterministicAlgorithms(true, false);
  }
  ~ScopedDeterminism() {
    if (!lock_.owns_lock()) return;
    at::globalContext().setDeterministicAlgorithms(was_, warned_);
    at::globalContext().setDeterministicFillUninitializedMemory(filled_);
  }
  ScopedDeterminism(const ScopedDeterminism&) = delete;
  ScopedDeterminism& operator=(const ScopedDeterminism&) = delete;

 private:
  static inline std::mutex mutex_;
  std::unique_lock<std::mutex> lock_;
  bool was_ = false, warned_ = false, filled_ = false;
};

int64_t width_of(const AttentionCall& call) {
  return rounded_up(std::max(call.q.size(-1), call.v.size(-1)), kHeadDimUnit);
}

Tensor from_flash(const Tensor& t, int64_t width) {
  return (t.size(-1) == width ? t : t.narrow(-1, 0, width)).contiguous();
}

}  // namespace

void check_flash_attention(const AttentionCall& call) {
  const auto wanted = [&](bool holds, const auto&... what) {
    TORCH_CHECK_VALUE(holds, "attention: kernel 'flash' ", what..., "; use kernel='chunked'.");
  };
  const auto length = [&](const Tensor& t) { return t.sym_size(call.packed || !call.batch_first ? 0 : 1); };
  wanted(!call.rows[kMask].defined() && !call.rows[kPresentQ].defined() && !call.rows[kPresentKv].defined() &&
             !call.bias.has_value(),
         "has no arguments 'mask', 'present_q', 'present_kv' and 'bias'");
  wanted(call.q.scalar_type() == at::kHalf || call.q.scalar_type() == at::kBFloat16,
         "takes float16 and bfloat16, and argument 'q' is ", call.q.scalar_type());
  wanted(call.q.sym_size(-1) <= kMostHeadDim && call.v.sym_size(-1) <= kMostHeadDim,
         "takes a head_dim of at most 256, and those of 'q' and 'v' are ", call.q.sym_size(-1), " and ",
         call.v.sym_size(-1));
  wanted(!call.slopes.has_value(), "has no argument 'alibi_slopes'");
  wanted(call.softcap == 0.0, "has no argument 'softcap'");
  wanted(call.scale > 0.0, "takes a scale above 0, and argument 'scale' is ", call.scale);
  if (call.left < 0 && call.right < 0) return;
  wanted(call.bottom_right || (!call.packed && length(call.q) == length(call.k)),
         "ends its diagonal bottom right, and argument 'bottom_right' is False");
  wanted(call.packed || call.right == 0 || length(call.q) <= length(call.k),
         "takes a window beyond the diagonal of a batch with no more queries than keys, and has ", length(call.q),
         " queries and ", length(call.k), " keys");
}

AttentionResult flash_attention(const AttentionCall& call) {
  const FlashRows rows(call);
  if (!rows.has_pieces) check_sequences(call);
  Tensor out, kernel_lse;
  if (rows.empty) {
    auto shape = call.q.sizes().vec();
    shape.back() = call.v.size(-1);
    out = at::zeros(shape, call.q.options());
    kernel_lse =
        at::full(kernel_lse_shape(call), std::numeric_limits<double>::infinity(), call.q.options().dtype(at::kFloat));
  } else {
    const int64_t width = width_of(call);
    const auto input = [&](const Tensor& t) { return for_flash(by_sequence(call, t), width); };
    const OptionalTensor cumulative_q = rows.cumulative_q.defined() ? OptionalTensor(rows.cumulative_q) : std::nullopt;
    const OptionalTensor cumulative_k = rows.cumulative_k.defined() ? OptionalTensor(rows.cumulative_k) : std::nullopt;
    const auto result = at::_flash_attention_forward(input(call.q), input(call.k), input(call.v), cumulative_q,
                                                     cumulative_k, rows.queries.bound, rows.bound_k, 0.0, rows.causal(),
                                                     false, call.scale, rows.window_left(), rows.window_right());
    out = from_flash(by_sequence(call, std::get<0>(result)), call.v.size(-1));
    kernel_lse = std::get<1>(result);
  }
  return {out, lse_of_kernel(call, kernel_lse, out), {}};
}

namespace {

AttentionGradients backward(const AttentionCall& call, const AttentionResult& result, const Tensor& dout,
                            const Tensor& dlse, AttentionWanted wanted, bool deterministic) {
  TORCH_CHECK_NOT_IMPLEMENTED(!dlse.defined(),
                              "attention: kernel 'flash' has no gradient of the log-sum-exp; use "
                              "kernel='chunked'.");
  const FlashRows rows(call);
  AttentionGradients g;
  const KernelLse kernel = lse_for_kernel(call, result, dout, wanted[kSink]);
  g[kSink] = kernel.dsink;
  if (rows.empty) {
    g[kQuery] = at::zeros(call.q.sizes(), call.q.options());
    g[kKey] = at::zeros(call.k.sizes(), call.k.options());
    g[kValue] = at::zeros(call.v.sizes(), call.v.options());
    return g;
  }
  const int64_t width = width_of(call);
  const auto input = [&](const Tensor& t) { return for_flash(by_sequence(call, t), width); };
  const auto output = [&](const Tensor& t, const Tensor& like) {
    return from_flash(by_sequence(call, t), like.size(-1));
  };
  const Tensor seed = at::empty({2}, call.q.options().dtype(at::kUInt64)), unused = at::empty({0}, call.q.options());
  const Tensor d = input(dout), q = input(call.q), k = input(call.k), v = input(call.v), out = input(result.out);
  const auto [dq, dk, dv] = [&] {
    const ScopedDeterminism repeats(deterministic);  // no longer than the call: other threads see the flag too
    return at::_flash_attention_backward(d, q, k, v, out, kernel.lse, rows.cumulative_q, rows.cumulative_k,
                                         rows.queries.bound, rows.bound_k, 0.0, rows.causal(), seed, unused, call.scale,
                                         rows.window_left(), rows.window_right());
  }();
  if (wanted[kQuery]) g[kQuery] = output(dq, call.q);
  if (wanted[kKey]) g[kKey] = output(dk, call.k);
  if (wanted[kValue]) g[kValue] = output(dv, call.v);
  zero_padding(call, g);
  return g;
}

}  // namespace

AttentionGradients flash_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                            const Tensor& dout, const Tensor& dlse, AttentionWanted wanted) {
  return backward(call, result, dout, dlse, wanted, false);
}

AttentionGradients deterministic_flash_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                                          const Tensor& dout, const Tensor& dlse,
                                                          AttentionWanted wanted) {
  return backward(call, result, dout, dlse, wanted, true);
}

}  // namespace te_torch
