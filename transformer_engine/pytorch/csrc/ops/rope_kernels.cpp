// See rope_kernels.h.
#include "ops/rope_kernels.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/Exceptions.h>
#include <transformer_engine/rope.h>

#include <algorithm>

namespace te_torch {

namespace {

constexpr const char* kOp = "rope";

// ---- checks, on sizes that may be symbolic ----

void check_heads(const Tensor& t, const char* argument) {
  TORCH_CHECK_VALUE(
      t.dim() == 4, kOp, ": argument '", argument, "' has shape ", t.sym_sizes(),
      ", wanted 4 dimensions: [seq, batch, heads, head_dim] (sbhd) or [batch, seq, heads, head_dim] (bshd).");
}

// freqs: [positions, 1, 1, rot_dim], as of RotaryPositionEmbedding, or [positions, rot_dim].
void check_freqs(const Tensor& freqs, const char* argument, const Tensor& x, bool batch_first) {
  const bool shaped = freqs.dim() == 2 || (freqs.dim() == 4 && freqs.sym_size(1) == 1 && freqs.sym_size(2) == 1);
  TORCH_CHECK_VALUE(shaped, kOp, ": argument '", argument, "' has shape ", freqs.sym_sizes(),
                    ", wanted [positions, 1, 1, rot_dim] or [positions, rot_dim].");
  TORCH_CHECK_VALUE(freqs.scalar_type() == at::kFloat, kOp, ": argument '", argument, "' has dtype ",
                    freqs.scalar_type(), ", wanted angles of a float dtype.");
  TORCH_CHECK_VALUE(freqs.device() == x.device(), kOp, ": argument '", argument, "' is on ", freqs.device(),
                    ", wanted ", x.device(), " like the input; move it with .to(device).");
  TORCH_CHECK_NOT_IMPLEMENTED(!freqs.requires_grad(), kOp, ": argument '", argument,
                              "' requires a gradient, which the fused op does not compute; detach it, or call "
                              "apply_rotary_pos_emb with fused=False.");
  const c10::SymInt seq = x.sym_size(batch_first ? 1 : 0);
  TORCH_CHECK_VALUE(freqs.sym_size(0) >= seq, kOp, ": argument '", argument, "' has ", freqs.sym_size(0),
                    " positions, wanted at least the sequence length ", seq, ": pass RotaryPositionEmbedding(dim)(",
                    seq, ").");
}

void check_start_positions(const OptionalTensor& start, const Tensor& x, bool batch_first) {
  if (!start.has_value()) return;
  const c10::SymInt batch = x.sym_size(batch_first ? 0 : 1);
  TORCH_CHECK_VALUE(start->dim() == 1 && start->sym_size(0) == batch && start->scalar_type() == at::kInt &&
                        start->device() == x.device(),
                    kOp, ": argument 'start_positions' is ", start->scalar_type(), " of shape ", start->sym_sizes(),
                    " on ", start->device(), ", wanted int32 of shape [", batch, "] on ", x.device(), ".");
}

// head_dim of a packed tensor whose last dimension holds heads[0] + heads[1] + heads[2] heads for each group.
c10::SymInt packed_head_dim(const Tensor& qkv, at::IntArrayRef heads) {
  TORCH_CHECK_VALUE(heads.size() == 3 && heads[0] > 0 && heads[1] > 0 && heads[2] >= 0, kOp, ": argument 'heads' is ",
                    heads, ", wanted the number of q, k and v heads in a group.");
  const int64_t all = heads[0] + heads[1] + heads[2];
  check_heads(qkv, "qkv");
  TORCH_CHECK_VALUE(qkv.sym_size(3) % all == 0, kOp, ": argument 'qkv' has shape ", qkv.sym_sizes(),
                    ", wanted a last dimension that is a multiple of the ", all, " heads in a group.");
  return qkv.sym_size(3) / all;
}

// ---- tensors for the C API ----

Tensor dense_last(const Tensor& t) {
  if (t.is_neg()) return t.resolve_neg().contiguous();
  return t.size(-1) <= 1 || t.stride(-1) == 1 ? t : t.contiguous();
}

// Strides of t [seq, batch, heads, head_dim] or batch first.
te_rope_tensor heads_of(const Tensor& t, bool batch_first) {
  te_rope_tensor out{};
  out.data = t.numel() == 0 ? nullptr : t.data_ptr();
  out.seq_stride = t.stride(batch_first ? 1 : 0);
  out.batch_stride = t.stride(batch_first ? 0 : 1);
  out.head_stride = t.stride(2);
  return out;
}

// The heads [first, first + heads) of each group of a packed tensor.
te_rope_tensor group_of(const Tensor& qkv, bool batch_first, int64_t first, int64_t heads, int64_t head_dim) {
  te_rope_tensor out = heads_of(qkv, batch_first);
  out.group_stride = out.head_stride;
  out.head_stride = head_dim;
  out.heads_per_group = heads;
  if (out.data != nullptr) out.data = static_cast<char*>(out.data) + first * head_dim * qkv.element_size();
  return out;
}

te_rope_plan plan_of(const Tensor& x, const char* argument, bool batch_first, bool interleaved, bool backward) {
  te_rope_plan plan{};
  plan.seq = x.size(batch_first ? 1 : 0);
  plan.batch = x.size(batch_first ? 0 : 1);
  plan.interleaved = interleaved;
  plan.backward = backward;
  plan.dtype = dtype_of(x, kOp, argument);
  plan.device = x.is_cpu() ? TE_DEVICE_CPU : x.device().index();
  return plan;
}

Tensor dense_rows(const Tensor& freqs) {
  const bool apart = freqs.size(0) <= 1 || freqs.stride(0) >= freqs.size(-1);
  return dense_last(apart ? freqs : freqs.contiguous());
}

// The angles of a plan; holds copies until the launch.
class Angles {
 public:
  Angles(te_rope_plan& plan, const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start)
      : q_(dense_rows(q_freqs)), k_(k_freqs.has_value() ? dense_rows(*k_freqs) : q_) {
    plan.rot_dim = q_.size(-1);
    plan.q_freqs = table(q_);
    const te_tensor own = table(k_);
    if (own.data != plan.q_freqs.data || own.rows != plan.q_freqs.rows || own.cols != plan.q_freqs.cols ||
        own.row_pitch != plan.q_freqs.row_pitch) {
      plan.k_freqs = own;
    }
    if (!start.has_value()) return;
    start_ = start->contiguous();
    plan.start_positions = view_2d(start_, kOp, "start_positions");
  }

 private:
  static te_tensor table(const Tensor& freqs) {
    const int32_t device = freqs.is_cpu() ? TE_DEVICE_CPU : freqs.device().index();
    const int64_t pitch = std::max(freqs.stride(0), freqs.size(-1));  // the stride of a single row is arbitrary
    return {freqs.numel() == 0 ? nullptr : freqs.data_ptr(), freqs.size(0), freqs.size(-1), pitch, TE_FLOAT32, device};
  }

  Tensor q_, k_, start_;
};

Tensor empty_heads(const Tensor& like, bool batch_first, const te_rope_plan& plan, int64_t heads) {
  return at::empty({batch_first ? plan.batch : plan.seq, batch_first ? plan.seq : plan.batch, heads, plan.head_dim},
                   like.options());
}

void check_pair(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                bool batch_first) {
  check_heads(q, "q");
  if (k.has_value()) {
    check_heads(*k, "k");
    check_same(*k, q, kOp, "k");
    TORCH_CHECK_VALUE(
        k->sym_size(0) == q.sym_size(0) && k->sym_size(1) == q.sym_size(1) && k->sym_size(3) == q.sym_size(3), kOp,
        ": argument 'k' has shape ", k->sym_sizes(), ", wanted that of q, ", q.sym_sizes(),
        ", but for the number of heads.");
  }
  check_freqs(freqs, "freqs", q, batch_first);
  check_start_positions(start, q, batch_first);
}

void check_packed(const Tensor& like, const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
                  bool batch_first) {
  check_freqs(q_freqs, "q_freqs", like, batch_first);
  if (k_freqs.has_value()) check_freqs(*k_freqs, "k_freqs", like, batch_first);
  check_start_positions(start, like, batch_first);
}

bool is_there(const OptionalTensor& t) { return t.has_value() && t->defined(); }

// The first defined gradient and its index; autograd runs no node without one.
size_t first_of(const OptionalTensor (&grads)[3]) {
  for (size_t i = 0; i < 3; ++i) {
    if (is_there(grads[i])) return i;
  }
  TORCH_CHECK_VALUE(false, kOp, ": arguments 'dq', 'dk', 'dv' are all absent, wanted at least one.");
}

}  // namespace

Tensors rope_fwd(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                 bool batch_first, bool interleaved, bool backward) {
  check_pair(q, k, freqs, start, batch_first);
  const Tensor q_in = dense_last(q);
  const Tensor k_in = k.has_value() ? dense_last(*k) : Tensor();
  te_rope_plan plan = plan_of(q_in, "q", batch_first, interleaved, backward);
  const Angles angles(plan, freqs, std::nullopt, start);
  plan.head_dim = q_in.size(3);
  plan.q_heads = q_in.size(2);
  Tensors out{empty_heads(q_in, batch_first, plan, plan.q_heads)};
  plan.q = heads_of(q_in, batch_first);
  plan.q_out = heads_of(out[0], batch_first);
  if (k_in.defined()) {
    plan.k_heads = k_in.size(2);
    out.push_back(empty_heads(k_in, batch_first, plan, plan.k_heads));
    plan.k = heads_of(k_in, batch_first);
    plan.k_out = heads_of(out[1], batch_first);
  }
  check(te_rope_apply(&plan, current_stream(q_in)));
  return out;
}

Tensors rope_fwd_meta(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                      bool batch_first, bool, bool) {
  check_pair(q, k, freqs, start, batch_first);
  Tensors out{q.new_empty_symint(q.sym_sizes())};
  if (k.has_value()) out.push_back(k->new_empty_symint(k->sym_sizes()));
  return out;
}

Three rope_qkv_fwd(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
                   at::IntArrayRef heads, bool batch_first, bool interleaved) {
  const int64_t head_dim = packed_head_dim(qkv, heads).expect_int();
  check_packed(qkv, q_freqs, k_freqs, start, batch_first);
  const Tensor in = dense_last(qkv);
  te_rope_plan plan = plan_of(in, "qkv", batch_first, interleaved, false);
  const Angles angles(plan, q_freqs, k_freqs, start);
  plan.head_dim = head_dim;
  plan.q_heads = in.size(2) * heads[0];
  plan.k_heads = in.size(2) * heads[1];
  plan.v_heads = in.size(2) * heads[2];
  const Three out{empty_heads(in, batch_first, plan, plan.q_heads), empty_heads(in, batch_first, plan, plan.k_heads),
                  empty_heads(in, batch_first, plan, plan.v_heads)};
  plan.q = group_of(in, batch_first, 0, heads[0], head_dim);
  plan.k = group_of(in, batch_first, heads[0], heads[1], head_dim);
  plan.v = group_of(in, batch_first, heads[0] + heads[1], heads[2], head_dim);
  plan.q_out = heads_of(std::get<0>(out), batch_first);
  plan.k_out = heads_of(std::get<1>(out), batch_first);
  plan.v_out = heads_of(std::get<2>(out), batch_first);
  check(te_rope_apply(&plan, current_stream(in)));
  return out;
}

Three rope_qkv_fwd_meta(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs,
                        const OptionalTensor& start, at::IntArrayRef heads, bool batch_first, bool) {
  const c10::SymInt head_dim = packed_head_dim(qkv, heads);
  check_packed(qkv, q_freqs, k_freqs, start, batch_first);
  const auto part = [&](int64_t n) {
    return qkv.new_empty_symint({qkv.sym_size(0), qkv.sym_size(1), qkv.sym_size(2) * n, head_dim});
  };
  return {part(heads[0]), part(heads[1]), part(heads[2])};
}

Tensor rope_qkv_bwd(const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv, const Tensor& q_freqs,
                    const OptionalTensor& k_freqs, const OptionalTensor& start, at::IntArrayRef heads, bool batch_first,
                    bool interleaved) {
  const OptionalTensor grads[3] = {dq, dk, dv};
  const size_t first = first_of(grads);
  const Tensor& like = *grads[first];
  check_heads(like, "gradient");
  check_packed(like, q_freqs, k_freqs, start, batch_first);
  te_rope_plan plan = plan_of(like, "gradient", batch_first, interleaved, true);
  const Angles angles(plan, q_freqs, k_freqs, start);
  const int64_t groups = like.size(2) / heads[first];
  const int64_t head_dim = plan.head_dim = like.size(3);
  const Tensor dqkv =
      at::empty({like.size(0), like.size(1), groups, (heads[0] + heads[1] + heads[2]) * head_dim}, like.options());
  Tensor parts[3];
  for (size_t i = 0; i < 3; ++i) {
    const std::vector<int64_t> sizes{like.size(0), like.size(1), groups * heads[i], head_dim};
    if (!is_there(grads[i])) {
      parts[i] = at::zeros({head_dim}, like.options()).expand(sizes);
      continue;
    }
    parts[i] = dense_last(*grads[i]);
    check_same(parts[i], like, kOp, "gradient");
    TORCH_CHECK_VALUE(parts[i].sizes() == at::IntArrayRef(sizes), kOp, ": a gradient has shape ", parts[i].sizes(),
                      ", wanted ", at::IntArrayRef(sizes), ".");
  }
  plan.q_heads = groups * heads[0];
  plan.k_heads = groups * heads[1];
  plan.v_heads = groups * heads[2];
  plan.q = heads_of(parts[0], batch_first);
  plan.k = heads_of(parts[1], batch_first);
  plan.v = heads_of(parts[2], batch_first);
  plan.q_out = group_of(dqkv, batch_first, 0, heads[0], head_dim);
  plan.k_out = group_of(dqkv, batch_first, heads[0], heads[1], head_dim);
  plan.v_out = group_of(dqkv, batch_first, heads[0] + heads[1], heads[2], head_dim);
  check(te_rope_apply(&plan, current_stream(dqkv)));
  return dqkv;
}

Tensor rope_qkv_bwd_meta(const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv,
                         const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
                         at::IntArrayRef heads, bool batch_first, bool) {
  const OptionalTensor grads[3] = {dq, dk, dv};
  const size_t first = first_of(grads);
  const Tensor& like = *grads[first];
  check_heads(like, "gradient");
  check_packed(like, q_freqs, k_freqs, start, batch_first);
  return like.new_empty_symint({like.sym_size(0), like.sym_size(1), like.sym_size(2) / heads[first],
                                like.sym_size(3) * (heads[0] + heads[1] + heads[2])});
}

}  // namespace te_torch
