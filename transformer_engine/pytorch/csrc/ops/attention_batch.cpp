// Attention by aten::_scaled_dot_product_cudnn_attention and aten::_scaled_dot_product_efficient_attention, which read
// [b, h, s, d] in any order of b, h and s. Both begin their diagonal top left, so every query sees a key.
#include "ops/attention_batch.h"

#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <limits>

#include "ops/attention_passes.h"

namespace te_torch {

namespace {

constexpr double kUnseen = std::numeric_limits<double>::infinity();
constexpr int64_t kMostCudnnHead = 128;
constexpr int64_t kEfficientRows = 32;  // its lse has a multiple of them for each head

int64_t seq_dim(const AttentionCall& call) { return call.batch_first ? 1 : 0; }
bool causal(const AttentionCall& call) { return call.right == 0; }
bool empty(const AttentionCall& call) { return call.q.numel() == 0 || call.k.numel() == 0; }

Tensor by_head(const AttentionCall& call, const Tensor& t) {
  return call.batch_first ? t.transpose(1, 2) : t.permute({1, 2, 0, 3});
}
Tensor by_token(const AttentionCall& call, const Tensor& t) {
  return (call.batch_first ? t.transpose(1, 2) : t.permute({2, 0, 1, 3})).contiguous();
}

// The checks of both kernels.
void check_batch(const AttentionCall& call, const char* kernel, int64_t unit) {
  const auto wanted = [&](bool holds, const auto&... what) {
    TORCH_CHECK_VALUE(holds, "attention: kernel '", kernel, "' ", what..., "; use kernel='chunked'.");
  };
  wanted(!call.packed, "takes batches alone, and argument 'layout' is 'thd'");
  wanted(!call.rows[kMask].defined() && !call.rows[kPresentQ].defined() && !call.rows[kPresentKv].defined() &&
             !call.bias.has_value() && !call.slopes.has_value(),
         "has no arguments 'mask', 'present_q', 'present_kv', 'bias' and 'alibi_slopes'");
  wanted(call.softcap == 0.0, "has no argument 'softcap'");
  wanted(call.scale > 0.0, "takes a scale above 0, and argument 'scale' is ", call.scale);
  wanted(call.q.sym_size(-1) % unit == 0 && call.v.sym_size(-1) % unit == 0, "takes multiples of ", unit,
         " as head_dim, and those of 'q' and 'v' are ", call.q.sym_size(-1), " and ", call.v.sym_size(-1));
  const auto queries = call.q.sym_size(seq_dim(call)), keys = call.k.sym_size(seq_dim(call));
  wanted(queries > 1 && keys > 1, "takes at least 2 queries and 2 keys, and has ", queries, " and ", keys);
  wanted(call.left < 0 && call.right <= 0, "takes the windows (-1, -1) and (-1, 0), and argument 'window' is (",
         call.left, ", ", call.right, ")");
  wanted(!causal(call) || !call.bottom_right || queries == keys,
         "begins its diagonal top left, and argument 'bottom_right' is True");
}

// Of an empty batch.
AttentionResult nothing(const AttentionCall& call) {
  auto shape = call.q.sizes().vec();
  shape.back() = call.v.size(-1);
  const Tensor out = at::zeros(shape, call.q.options());
  const Tensor lse = at::full(kernel_lse_shape(call), kUnseen, call.q.options().dtype(at::kFloat));
  return {out, lse_of_kernel(call, lse, out), {}};
}

using Gradients = std::array<Tensor, 3>;  // of q, k and v by head

// backward(dout, q, k, v, out, lse [b, h, s]) of a kernel, all by head.
template <class F>
AttentionGradients backward(const AttentionCall& call, const AttentionResult& result, const Tensor& dout,
                            const Tensor& dlse, AttentionWanted wanted, const char* kernel, const F& of_kernel) {
  TORCH_CHECK_NOT_IMPLEMENTED(!dlse.defined(), "attention: kernel '", kernel,
                              "' has no gradient of the log-sum-exp; use kernel='chunked'.");
  AttentionGradients g;
  const KernelLse of_lse = lse_for_kernel(call, result, dout, wanted[kSink]);
  g[kSink] = of_lse.dsink;
  const Tensor* const inputs[] = {&call.q, &call.k, &call.v};
  Gradients by_heads;
  if (!empty(call)) {
    const auto input = [&](const Tensor& t) { return by_head(call, aligned_for_kernel(t)); };
    // cuDNN's backward reads dout by the strides of out, which is contiguous.
    by_heads =
        of_kernel(input(dout.contiguous()), input(call.q), input(call.k), input(call.v), input(result.out), of_lse.lse);
  }
  for (int i = 0; i < 3; ++i) {
    if (!wanted[kQuery + i]) continue;
    g[kQuery + i] = empty(call) ? at::zeros(inputs[i]->sizes(), inputs[i]->options()) : by_token(call, by_heads[i]);
  }
  return g;
}

}  // namespace

void check_cudnn_attention(const AttentionCall& call) {
  check_batch(call, "cudnn", 8);
  TORCH_CHECK_VALUE(call.q.scalar_type() == at::kHalf || call.q.scalar_type() == at::kBFloat16,
                    "attention: kernel 'cudnn' takes float16 and bfloat16, and argument 'q' is ", call.q.scalar_type(),
                    "; use kernel='chunked'.");
  TORCH_CHECK_VALUE(call.q.sym_size(-1) <= kMostCudnnHead && call.v.sym_size(-1) <= kMostCudnnHead,
                    "attention: kernel 'cudnn' takes a head_dim of at most ", kMostCudnnHead,
                    ", and those of 'q' and 'v' are ", call.q.sym_size(-1), " and ", call.v.sym_size(-1),
                    "; use kernel='chunked'.");
}

namespace {

// q by head, in memory in the order of its dimensions. Torch keeps cuDNN's plans by the strides of q, k and v alone and
// gives the result the order of q, so a plan that another call made fits out and dout, which are contiguous.
Tensor ordered_query(const AttentionCall& call) {
  const Tensor& q = call.q;
  bool ordered = true;
  int64_t least = 1;
  for (int64_t dim = q.dim() - 1; dim >= 0; --dim) {
    if (q.size(dim) == 1) continue;
    ordered = ordered && q.stride(dim) >= least;
    least = q.stride(dim) * q.size(dim);
  }
  return by_head(call, aligned_for_kernel(ordered ? q : q.contiguous()));
}

}  // namespace

AttentionResult cudnn_attention(const AttentionCall& call) {
  if (empty(call)) return nothing(call);
  const auto input = [&](const Tensor& t) { return by_head(call, aligned_for_kernel(t)); };
  const auto result = at::_scaled_dot_product_cudnn_attention(ordered_query(call), input(call.k), input(call.v),
                                                              std::nullopt, true, 0.0, causal(call), false, call.scale);
  const Tensor out = by_token(call, std::get<0>(result));
  return {out, lse_of_kernel(call, std::get<1>(result).reshape(kernel_lse_shape(call)), out), {}};
}

AttentionGradients cudnn_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                            const Tensor& dout, const Tensor& dlse, AttentionWanted wanted) {
  return backward(call, result, dout, dlse, wanted, "cudnn",
                  [&](const Tensor& d, const Tensor&, const Tensor& k, const Tensor& v, const Tensor& out,
                      const Tensor& lse) -> Gradients {
                    const Tensor q = ordered_query(call);
                    const Tensor seed = at::empty({}, q.options().dtype(at::kLong));  // read with dropout alone
                    auto [dq, dk, dv] = at::_scaled_dot_product_cudnn_attention_backward(
                        d, q, k, v, out, lse.unsqueeze(-1), seed, seed, Tensor(), Tensor(), Tensor(), q.size(2),
                        k.size(2), 0.0, causal(call), call.scale);
                    return {dq, dk, dv};
                  });
}

void check_efficient_attention(const AttentionCall& call) {
  check_batch(call, "efficient", call.q.scalar_type() == at::kFloat ? 4 : 8);
  TORCH_CHECK_VALUE(call.q.scalar_type() != at::kDouble,
                    "attention: kernel 'efficient' takes float32, float16 and bfloat16, and argument 'q' is ",
                    call.q.scalar_type(), "; use kernel='chunked'.");
}

namespace {

// The kernel has no groups.
Tensor for_each_query_head(const AttentionCall& call, const Tensor& t) {
  const int64_t shared = call.heads() / call.groups();
  return shared == 1 ? t : t.repeat_interleave(shared, 1);
}

Tensor of_groups(const AttentionCall& call, const Tensor& t) {
  return call.heads() == call.groups() ? t : t.unflatten(1, {call.groups(), -1}).sum(2);
}

}  // namespace

AttentionResult efficient_attention(const AttentionCall& call) {
  if (empty(call)) return nothing(call);
  const auto input = [&](const Tensor& t) { return by_head(call, aligned_for_kernel(t)); };
  const auto keys = [&](const Tensor& t) { return for_each_query_head(call, input(t)); };
  const auto result = at::_scaled_dot_product_efficient_attention(input(call.q), keys(call.k), keys(call.v),
                                                                  std::nullopt, true, 0.0, causal(call), call.scale);
  const Tensor out = by_token(call, std::get<0>(result));
  const Tensor lse = std::get<1>(result).narrow(2, 0, call.q.size(seq_dim(call)));
  return {out, lse_of_kernel(call, lse, out), {}};
}

AttentionGradients efficient_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                                const Tensor& dout, const Tensor& dlse, AttentionWanted wanted) {
  return backward(call, result, dout, dlse, wanted, "efficient",
                  [&](const Tensor& d, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                      const Tensor& lse) -> Gradients {
                    // The kernel of 16-bit types takes the rows of out to be one after another, [b, s, h, d].
                    const Tensor by_rows = out.transpose(1, 2).contiguous().transpose(1, 2);
                    const int64_t rest = (kEfficientRows - lse.size(2) % kEfficientRows) % kEfficientRows;
                    const Tensor padded = rest == 0 ? lse : at::constant_pad_nd(lse, {0, rest}, kUnseen);
                    const Tensor seed = at::empty({}, at::TensorOptions(at::kLong));  // read with dropout alone
                    auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(
                        d, q, for_each_query_head(call, k), for_each_query_head(call, v), Tensor(), by_rows, padded,
                        seed, seed, 0.0, {true, true, true, false}, causal(call), call.scale);
                    return {dq, of_groups(call, dk), of_groups(call, dv)};
                  });
}

}  // namespace te_torch
