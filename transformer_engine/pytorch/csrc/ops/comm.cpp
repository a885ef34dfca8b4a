// The binding of the ordered sum and the interleave: kernel wrappers, schemas and Meta functions. Nodes call them; they
// have no derivative.
#include "ops/comm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include "core/op_registration.h"
#include "quantize/quantize.h"

namespace te_torch {

namespace {

void check_partials(const Tensor& partials, const OptionalTensor& bias) {
  const char* op = "comm_ordered_sum";
  check_float(partials, op, "partials");
  TORCH_CHECK_VALUE(partials.dim() >= 2 && partials.sym_size(0) >= 1, op, ": argument 'partials' has shape ",
                    partials.sym_sizes(), ", wanted [ranks, ..., cols] with one rank at least.");
  if (!bias.has_value()) return;
  check_same(*bias, partials, op, "bias");
  TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == partials.sym_size(-1), op, ": argument 'bias' has shape ",
                    bias->sym_sizes(), ", wanted [", partials.sym_size(-1), "].");
}

Tensor comm_ordered_sum_meta(const Tensor& partials, const OptionalTensor& bias) {
  check_partials(partials, bias);
  return partials.new_empty_symint(partials.sym_sizes().slice(1));
}

// Called by Python in eager mode.
Tensor ordered_sum(const Tensor& partials, const OptionalTensor& bias) {
  if (!must_dispatch({&partials, pointer_to(bias)})) return comm_ordered_sum(partials, bias);
  return Dispatched::call<comm_ordered_sum>("te::comm_ordered_sum", partials, bias);
}

constexpr int64_t kRowBytes = 16, kScaleRun = 4;

void check_shards(const Tensor& shards) {
  const char* op = "comm_interleave";
  TORCH_CHECK_VALUE(shards.dim() == 3 && shards.sym_size(0) >= 1, op, ": argument 'shards' has shape ",
                    shards.sym_sizes(), ", wanted [ranks, rows, columns of one] with one rank at least.");
  TORCH_CHECK_VALUE(shards.scalar_type() == at::kByte || shards.scalar_type() == at::kFloat, op,
                    ": argument 'shards' has dtype ", shards.scalar_type(),
                    ", wanted uint8 (FP8 data) or float32 (scales of blocks).");
}

Tensor comm_interleave_meta(const Tensor& shards) {
  check_shards(shards);
  const bool data = shards.scalar_type() == at::kByte;
  const c10::SymInt rows = shards.sym_size(1), cols = shards.sym_size(0) * shards.sym_size(2);
  const int64_t to = data ? kRowBytes : kScaleRun;
  const c10::SymInt pitch = (cols + (to - 1)) / to * to;
  if (!data) return shards.new_empty_symint({rows, pitch});
  return at::empty_strided_symint({rows, cols}, {pitch.max(1), 1}, shards.options());
}

// Called by Python in eager mode.
Tensor interleave(const Tensor& shards) {
  if (!must_dispatch({&shards})) return comm_interleave(shards);
  return Dispatched::call<comm_interleave>("te::comm_interleave", shards);
}

// Dense rows that do not share memory.
Tensor dense_rows(const Tensor& t) {
  const bool dense = t.numel() == 0 || t.size(2) == 1 || t.stride(2) == 1;
  const bool apart = t.size(1) <= 1 || t.stride(1) >= t.size(2);
  return dense && apart && !t.is_neg() ? t : t.contiguous();
}

}  // namespace

Tensor comm_interleave(const Tensor& shards) {
  const char* op = "comm_interleave";
  check_shards(shards);
  const Tensor in = dense_rows(shards);
  const int64_t rows = in.size(1), cols = in.size(0) * in.size(2);
  Tensor out;
  te_tensor target{};
  if (in.scalar_type() == at::kByte) {
    out = empty_fp8_data(rows, cols, in.options());
    target = bytes_view(out, TE_UINT8, op, "out");
  } else {
    out = at::empty({rows, (cols + kScaleRun - 1) / kScaleRun * kScaleRun}, in.options());
    target = view_2d(out, op, "out");
    target.cols = cols;
  }
  std::vector<te_tensor> ranks;
  for (const Tensor& shard : in.unbind(0)) ranks.push_back(view_2d(shard, op, "shards"));
  check(te_comm_interleave(ranks.data(), int32_t(ranks.size()), target, current_stream(in)));
  return out;
}

Tensor comm_ordered_sum(const Tensor& partials, const OptionalTensor& bias) {
  const char* op = "comm_ordered_sum";
  check_partials(partials, bias);
  const Tensor in = rows_of(partials);
  const Tensor added = bias.has_value() ? rows_of(*bias) : Tensor();
  const Tensor out = at::empty(in.sizes().slice(1), in.options());
  const te_tensor inbox = view_2d(in, op, "partials"), target = view_2d(out, op, "out");
  std::vector<te_tensor> ranks(static_cast<size_t>(in.size(0)), inbox);
  const int64_t step = target.rows * inbox.row_pitch * in.element_size();
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    ranks[rank].rows = target.rows;
    if (inbox.data != nullptr) ranks[rank].data = static_cast<char*>(inbox.data) + int64_t(rank) * step;
  }
  check(te_comm_ordered_sum(ranks.data(), int32_t(ranks.size()),
                            added.defined() ? view_2d(added, op, "bias") : absent(), target, current_stream(in)));
  return out;
}

TE_OP_REGISTRATION(comm, ops) {
  ops.op("comm_ordered_sum(Tensor partials, Tensor? bias) -> Tensor")
      .kernel(comm_ordered_sum)
      .meta(comm_ordered_sum_meta)
      .python(ordered_sum);
  ops.op("comm_interleave(Tensor shards) -> Tensor")
      .kernel(comm_interleave)
      .meta(comm_interleave_meta)
      .python(interleave);
}

}  // namespace te_torch
