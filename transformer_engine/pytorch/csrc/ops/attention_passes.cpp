// See attention_passes.h.
#include "ops/attention_passes.h"

#include <ATen/ops/empty.h>
#include <transformer_engine/attention.h>

#include <algorithm>

namespace te_torch {

namespace {

constexpr const char* kOfPasses = "attention";

te_attention_rows rows_of_side(const AttentionCall& call, bool keys) {
  te_attention_rows rows{};
  const Tensor& t = keys ? call.k : call.q;
  rows.rows = call.packed ? t.size(0) : t.size(0) * t.size(1);
  rows.lengths = rows.starts = absent();
  const Tensor& lengths = call.rows[keys ? kLengthsKv : kLengthsQ];
  const Tensor& starts = call.rows[keys ? kStartsKv : kStartsQ];
  if (lengths.defined()) rows.lengths = view_2d(lengths, kOfPasses, "cu_seqlens");
  if (starts.defined()) rows.starts = view_2d(starts, kOfPasses, "cu_seqlens_padded");
  return rows;
}

// t [.., heads, width] as rows with all heads.
te_tensor rows_with_heads(const Tensor& t, const char* argument) {
  te_tensor view = view_2d(t, kOfPasses, argument);
  const int64_t heads = t.size(-2);
  view.rows = heads == 0 ? 0 : view.rows / heads;
  view.cols = heads * t.size(-1);
  view.row_pitch = t.dim() == 3 && t.size(0) > 1 ? t.stride(0) : view.cols;
  return view;
}

bool has_dense_heads(const Tensor& t) {
  return t.is_contiguous() ||
         (t.dim() == 3 && t.stride(2) == 1 && t.stride(1) == t.size(2) && t.stride(0) >= t.size(1) * t.size(2));
}

// A plan, with its copies until the launch.
struct Plan : te_attention_plan {
  explicit Plan(const AttentionCall& call) : te_attention_plan{} {
    queries = rows_of_side(call, false);
    batch = call.packed ? 1 : std::max<int64_t>(1, call.q.size(call.batch_first ? 0 : 1));
    batch_first = call.batch_first;
    sink = absent();
    if (!call.sink.has_value()) return;
    dense_sink = call.sink->contiguous();
    sink = view_2d(dense_sink, kOfPasses, "sink");
  }
  Tensor dense_sink;
};

te_tensor view_of_kernel(const Tensor& lse, const Plan& plan, int64_t heads) {
  te_tensor view = view_2d(lse, kOfPasses, "lse");
  view.rows = plan.batch * heads, view.cols = view.row_pitch = plan.queries.rows / plan.batch;
  return view;
}

}  // namespace

void check_sequences(const AttentionCall& call, const Tensor& pieces_q, const Tensor& pieces_kv) {
  if (!call.packed) return;
  const auto same = [&](AttentionRow one, AttentionRow other) { return call.rows[one].is_same(call.rows[other]); };
  const bool alike = same(kLengthsQ, kLengthsKv) && same(kStartsQ, kStartsKv) && call.q.size(0) == call.k.size(0) &&
                     call.max_lengths[0] == call.max_lengths[1];
  const te_attention_rows queries = rows_of_side(call, false), keys = rows_of_side(call, true);
  const auto view = [](const Tensor& t) { return t.defined() ? view_2d(t, kOfPasses, "pieces") : absent(); };
  const bool checks_keys = !alike || pieces_q.defined();
  check(te_attention_sequences(&queries, call.max_lengths[0].value_or(-1), checks_keys ? &keys : nullptr,
                               call.max_lengths[1].value_or(-1), view(pieces_q), view(pieces_kv),
                               current_stream(call.q)));
}

std::vector<int64_t> kernel_lse_shape(const AttentionCall& call) {
  if (call.packed) return {call.heads(), call.q.size(0)};
  const int64_t batch_dim = call.batch_first ? 0 : 1;
  return {call.q.size(batch_dim), call.heads(), call.q.size(1 - batch_dim)};
}

Tensor lse_of_kernel(const AttentionCall& call, const Tensor& kernel_lse, const Tensor& out) {
  TORCH_INTERNAL_ASSERT(kernel_lse.sizes() == at::IntArrayRef(kernel_lse_shape(call)),
                        "the kernel's log-sum-exp has shape ", kernel_lse.sizes());
  const Tensor lse = at::empty(call.q.sizes().slice(0, call.q.dim() - 1), kernel_lse.options());
  const Tensor dense = kernel_lse.contiguous();
  const Plan plan(call);
  check(te_attention_forward(&plan, view_of_kernel(dense, plan, call.heads()), rows_with_heads(out, "out"),
                             view_2d(lse, kOfPasses, "lse"), current_stream(out)));
  return lse;
}

KernelLse lse_for_kernel(const AttentionCall& call, const AttentionResult& result, const Tensor& dout,
                         bool needs_sink) {
  const Tensor lse = result.lse.contiguous();
  KernelLse kernel{at::empty(kernel_lse_shape(call), lse.options()), {}};
  const Plan plan(call);
  te_tensor dout_rows = absent(), out_rows = absent(), dsink = absent(), workspace = absent();
  Tensor out, dense, floats;
  if (needs_sink) {
    out = result.out.contiguous(), dense = dout.resolve_neg();
    if (!has_dense_heads(dense)) dense = dense.contiguous();
    kernel.dsink = at::empty({call.heads()}, lse.options());
    floats = at::empty({te_attention_backward_workspace(plan.queries.rows, call.heads())}, lse.options());
    dout_rows = rows_with_heads(dense, "dout"), out_rows = rows_with_heads(out, "out");
    dsink = view_2d(kernel.dsink, kOfPasses, "sink"), workspace = view_2d(floats, kOfPasses, "workspace");
  }
  check(te_attention_backward(&plan, view_2d(lse, kOfPasses, "lse"), dout_rows, out_rows,
                              view_of_kernel(kernel.lse, plan, call.heads()), dsink, workspace, current_stream(lse)));
  return kernel;
}

Tensor aligned_for_kernel(const Tensor& t) {
  const int64_t unit = 16 / t.element_size();
  bool aligned = reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && t.stride(-1) == 1;
  for (int64_t dim = 0; dim + 1 < t.dim(); ++dim) aligned = aligned && (t.size(dim) == 1 || t.stride(dim) % unit == 0);
  return aligned ? t : t.clone(at::MemoryFormat::Contiguous);
}

void zero_padding(const AttentionCall& call, const AttentionGradients& gradients) {
  if (!call.packed) return;
  const auto view = [](const Tensor& t) { return t.defined() ? rows_with_heads(t, "gradient") : absent(); };
  const te_attention_rows queries = rows_of_side(call, false), keys = rows_of_side(call, true);
  check(te_attention_zero_padding(&queries, &keys, view(gradients[kQuery]), view(gradients[kKey]),
                                  view(gradients[kValue]), current_stream(call.q)));
}

std::vector<Tensor> without_padding(at::TensorList tensors, const Tensor& cumulative, bool batch_first) {
  constexpr size_t kMost = 3;
  TORCH_CHECK_VALUE(!tensors.empty() && tensors.size() <= kMost, "attention_without_padding: argument 'tensors' has ",
                    tensors.size(), " elements, wanted 1 to ", kMost, ".");
  const Tensor dense = cumulative.contiguous();
  te_attention_rows rows{};
  rows.rows = tensors[0].size(0) * tensors[0].size(1);
  rows.lengths = view_2d(dense, kOfPasses, "cu_seqlens"), rows.starts = absent();
  rows.seq = tensors[0].size(batch_first ? 1 : 0), rows.batch_first = batch_first;
  std::vector<Tensor> copies;
  std::array<te_tensor, kMost> views{absent(), absent(), absent()};
  for (size_t i = 0; i < tensors.size(); ++i) {
    copies.push_back(tensors[i].clone(at::MemoryFormat::Contiguous));
    views[i] = rows_with_heads(copies[i], "padded");
  }
  if (rows.rows == 0) return copies;
  check(te_attention_zero_padding(&rows, &rows, views[0], views[1], views[2], current_stream(tensors[0])));
  return copies;
}

}  // namespace te_torch
