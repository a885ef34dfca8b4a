// Packed attention by aten::_flash_attention_forward and _backward, which read rows cum[i] .. cum[i + 1] as sequence i.
// - Rows of padding become sequences of their own: queries without keys and keys without queries. So the kernel reads
//   no padding of the keys, and writes zeros as results and gradients of padding. It visits as many rows of a sequence
//   as the longest has: padding after the last sequence is cut into pieces of that length; padding between sequences
//   may be longer, so there a pass over the results writes the zeros.
// - Its diagonal ends bottom right. It clamps a window's right side by the bound of the keys' lengths, which a window
//   without a right side has for one, too.
// - Rows without keys have lse = inf there, -inf here.
#include "ops/attention_flash.h"

#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>

#include "ops/attention_laws.h"

namespace te_torch {

namespace {

constexpr int64_t kMostHeadDim = 256, kHeadDimUnit = 8;
// Bounds are multiples of it: the kernel takes at least as many rows at once, and has another form for a bound of 1.
constexpr int64_t kFlashRows = 128;
constexpr int64_t kMostFlashSequences = 65535;  // the second dimension of its grid
constexpr double kFlashInfinity = std::numeric_limits<double>::infinity();

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The sequences of one side of a call.
struct FlashSide {
  FlashSide(const AttentionCall& call, bool keys)
      : lengths(call.rows[keys ? kLengthsKv : kLengthsQ]),
        starts(call.rows[keys ? kStartsKv : kStartsQ]),
        rows((keys ? call.k : call.q).size(0)),
        sequences(lengths.size(0) - 1) {
    if (rows == 0 || sequences == 0) return;
    const auto most = call.max_lengths[keys ? 1 : 0];
    longest = std::min(rows, most.has_value() ? *most : lengths.diff().max().item<int64_t>());
    bound = rounded_up(std::max<int64_t>(longest, 1), kFlashRows);
  }

  // The rows where sequences begin, and one more.
  Tensor begins() const { return starts.defined() ? starts : lengths; }

  // bool [rows]
  Tensor padding() const {
    const Tensor own = at::arange(rows, lengths.options());
    if (sequences == 0) return own >= 0;
    if (!starts.defined()) return own >= lengths[-1];
    const Tensor sequence =
        (at::searchsorted(starts.narrow(0, 0, sequences), own, true, true) - 1).clamp_(0, sequences - 1);
    const Tensor place = own - starts.index_select(0, sequence);
    return (place < 0) | (place >= lengths.diff().index_select(0, sequence));
  }

  Tensor lengths, starts;
  int64_t rows, sequences, longest = 0, bound = kFlashRows;
};

// The arguments of the kernel that both directions take.
struct FlashRows {
  explicit FlashRows(const AttentionCall& call) : queries(call, false), keys(call, true) {
    empty = queries.rows == 0 || keys.rows == 0 || queries.sequences == 0;
    between = queries.starts.defined() || keys.starts.defined();
    if (empty) return;
    left = call.left >= keys.longest ? -1 : call.left;
    right = call.right >= queries.longest ? -1 : call.right;
    const int64_t least = left >= 0 && right < 0 ? queries.bound : rounded_up(right + 1, kFlashRows);
    bound_k = std::max(keys.bound, least);
    if (between) {
      pad_between();
    } else {
      pad_after();
    }
    TORCH_CHECK_VALUE(cumulative_q.size(0) - 1 <= kMostFlashSequences, "attention: kernel 'flash' takes at most ",
                      kMostFlashSequences, " sequences, those of padding with them, got ", cumulative_q.size(0) - 1,
                      "; use kernel='chunked' (NVTE_FLASH_ATTN=0), or a larger max_seqlen_q and max_seqlen_kv.");
  }

  // Each sequence, the padding after it of the queries, and that of the keys.
  void pad_between() {
    const auto of = [&](const FlashSide& side, bool is_keys) {
      const int64_t n = side.sequences;
      const Tensor begins = side.begins(), next = begins.narrow(0, 1, n);
      const Tensor ends = side.starts.defined() ? begins.narrow(0, 0, n) + side.lengths.diff() : next;
      const Tensor rest = at::stack({ends, is_keys ? ends : next, next}, 1).view(-1);
      return at::cat({begins.narrow(0, 0, 1), rest});
    };
    cumulative_q = of(queries, false), cumulative_k = of(keys, true);
  }

  // The sequences, the pieces of the queries' padding, and those of the keys'.
  void pad_after() {
    const auto pieces = [](const FlashSide& side, int64_t size) {
      const int64_t count = (side.rows + size - 1) / size;
      const Tensor ends = at::arange(size, (count + 1) * size, size, side.lengths.options());
      return (ends + side.lengths.narrow(0, side.sequences, 1)).clamp_max_(side.rows);
    };
    const bool same = keys.lengths.is_same(queries.lengths) && keys.rows == queries.rows && bound_k == queries.bound;
    const Tensor of_q = pieces(queries, queries.bound), of_k = same ? of_q : pieces(keys, bound_k);
    const Tensor end_q = of_q.narrow(0, of_q.size(0) - 1, 1).expand({of_k.size(0)});
    const Tensor end_k = keys.lengths.narrow(0, keys.sequences, 1).expand({of_q.size(0)});
    cumulative_q = at::cat({queries.lengths, of_q, end_q});
    cumulative_k = at::cat({keys.lengths, end_k, of_k});
  }

  bool causal() const { return left < 0 && right == 0; }

  FlashSide queries, keys;
  bool empty, between;
  Tensor cumulative_q, cumulative_k;
  int64_t left = -1, right = -1, bound_k = 0;
};

// t [rows, heads, any width] with `width` columns, zeros after its own, as the kernel reads memory: 16 bytes at once.
Tensor for_flash(const Tensor& t, int64_t width) {
  if (t.size(-1) != width) return at::constant_pad_nd(t, {0, width - t.size(-1)});
  const bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.stride(-1) == 1 &&
                       t.stride(0) % kHeadDimUnit == 0 && t.stride(1) % kHeadDimUnit == 0;
  return aligned ? t : t.clone(at::MemoryFormat::Contiguous);
}

int64_t width_of(const AttentionCall& call) {
  return rounded_up(std::max(call.q.size(-1), call.v.size(-1)), kHeadDimUnit);
}

Tensor from_flash(const Tensor& t, int64_t width) { return t.narrow(-1, 0, width).contiguous(); }

}  // namespace

void check_flash_attention(const AttentionCall& call) {
  const auto wanted = [&](bool holds, const auto&... what) {
    TORCH_CHECK_VALUE(holds, "attention: kernel 'flash' ", what..., "; use kernel='chunked'.");
  };
  wanted(call.packed, "takes packed sequences, and argument 'layout' is not 'thd'");
  wanted(call.q.scalar_type() == at::kHalf || call.q.scalar_type() == at::kBFloat16,
         "takes float16 and bfloat16, and argument 'q' is ", call.q.scalar_type());
  wanted(call.q.sym_size(-1) <= kMostHeadDim && call.v.sym_size(-1) <= kMostHeadDim,
         "takes a head_dim of at most 256, and those of 'q' and 'v' are ", call.q.sym_size(-1), " and ",
         call.v.sym_size(-1));
  wanted(!call.slopes.has_value(), "has no argument 'alibi_slopes'");
  wanted(call.softcap == 0.0, "has no argument 'softcap'");
  wanted(call.scale > 0.0, "takes a scale above 0, and argument 'scale' is ", call.scale);
  wanted(call.bottom_right || (call.left < 0 && call.right < 0),
         "ends its diagonal bottom right, and argument 'bottom_right' is False");
}

AttentionResult flash_attention(const AttentionCall& call) {
  const FlashRows rows(call);
  Tensor out, lse;  // lse [h, t]
  if (rows.empty) {
    out = at::zeros({rows.queries.rows, call.heads(), call.v.size(-1)}, call.q.options());
    lse = at::full({call.heads(), rows.queries.rows}, -kFlashInfinity, call.q.options().dtype(at::kFloat));
  } else {
    const int64_t width = width_of(call);
    const auto result =
        at::_flash_attention_forward(for_flash(call.q, width), for_flash(call.k, width), for_flash(call.v, width),
                                     rows.cumulative_q, rows.cumulative_k, rows.queries.bound, rows.bound_k, 0.0,
                                     rows.causal(), false, call.scale, rows.left, rows.right);
    out = from_flash(std::get<0>(result), call.v.size(-1));
    lse = std::get<1>(result);
    TORCH_INTERNAL_ASSERT(lse.dim() == 2 && lse.size(1) == rows.queries.rows,
                          "flash attention's log-sum-exp has shape ", lse.sizes());
    lse = lse.masked_fill(lse == kFlashInfinity, -kFlashInfinity);
  }
  if (call.sink.has_value()) {
    Tensor by_head = out.transpose(0, 1), column = lse.unsqueeze(-1);
    apply_sink(by_head, column, *call.sink);
    lse = column.squeeze(-1);
  }
  const Tensor padding = rows.queries.padding();
  if (rows.between) out.masked_fill_(padding.view({-1, 1, 1}), 0.0);
  return {out, lse.masked_fill_(padding, 0.0).t().contiguous(), {}};
}

AttentionGradients flash_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                            const Tensor& dout, const Tensor& dlse, AttentionWanted wanted) {
  TORCH_CHECK_NOT_IMPLEMENTED(!dlse.defined(),
                              "attention: kernel 'flash' has no gradient of the log-sum-exp; use "
                              "kernel='chunked'.");
  const FlashRows rows(call);
  AttentionGradients g;
  const Tensor lse = result.lse.t().contiguous();
  if (wanted[kSink]) {
    Tensor delta = dout.to(at::kFloat).mul_(result.out).sum({-1});
    delta.masked_fill_(rows.queries.padding().unsqueeze(-1), 0.0);
    g[kSink] = sink_gradient(delta.t().unsqueeze(-1), lse.unsqueeze(-1), *call.sink);
  }
  if (rows.empty) {
    g[kQuery] = at::zeros(call.q.sizes(), call.q.options());
    g[kKey] = at::zeros(call.k.sizes(), call.k.options());
    g[kValue] = at::zeros(call.v.sizes(), call.v.options());
    return g;
  }
  const int64_t width = width_of(call);
  const Tensor kernel_lse = lse.masked_fill(lse.isneginf(), kFlashInfinity);
  const Tensor seed = at::empty({2}, call.q.options().dtype(at::kUInt64)), unused = at::empty({0}, call.q.options());
  const auto [dq, dk, dv] = at::_flash_attention_backward(
      for_flash(dout, width), for_flash(call.q, width), for_flash(call.k, width), for_flash(call.v, width),
      for_flash(result.out, width), kernel_lse, rows.cumulative_q, rows.cumulative_k, rows.queries.bound, rows.bound_k,
      0.0, rows.causal(), seed, unused, call.scale, rows.left, rows.right);
  g[kQuery] = from_flash(dq, call.q.size(-1)), g[kKey] = from_flash(dk, call.k.size(-1));
  g[kValue] = from_flash(dv, call.v.size(-1));
  if (rows.between) {
    g[kQuery].masked_fill_(rows.queries.padding().view({-1, 1, 1}), 0.0);
    const Tensor padding = rows.keys.padding().view({-1, 1, 1});
    g[kKey].masked_fill_(padding, 0.0), g[kValue].masked_fill_(padding, 0.0);
  }
  for (const AttentionInput input : {kQuery, kKey, kValue}) {
    if (!wanted[input]) g[input] = Tensor();
  }
  return g;
}

}  // namespace te_torch
