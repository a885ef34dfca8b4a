// See attention_rows.h.
#include "ops/attention_rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

namespace te_torch {

Tensor SequenceRows::view(const Tensor& t) const {
  return batch_dim_ >= 0 ? t.select(batch_dim_, first_) : t.narrow(0, first_, length_);
}

Tensor SequenceRows::load(const Tensor& t, int64_t first, int64_t count, at::ScalarType dtype) const {
  const Tensor rows =
      from_.defined() ? t.index_select(0, from_.narrow(0, first, count)) : view(t).narrow(0, first, count);
  const Tensor copy = rows.transpose(0, 1).to(dtype, false, true, c10::MemoryFormat::Contiguous);
  // Not by a product: padding may hold any finite value, whose square overflows.
  if (tokens_.defined()) copy.masked_fill_(tokens(first, count).logical_not().unsqueeze(-1), 0.0);
  return copy;
}

void SequenceRows::store(const Tensor& buffer, int64_t first, const Tensor& values) const {
  const Tensor rows = values.transpose(0, 1);
  if (from_.defined()) {
    buffer.index_copy_(0, to_.narrow(0, first, values.size(1)), rows.to(buffer.scalar_type()));
  } else {
    view(buffer).narrow(0, first, values.size(1)).copy_(rows);
  }
}

SequenceSet::SequenceSet(const AttentionCall& call, bool keys) {
  const Tensor& t = keys ? call.k : call.q;
  outer_ = t.sizes().slice(0, t.dim() - 2).vec();
  rows_ = t.size(0);
  if (!call.packed) {
    batch_dim_ = call.batch_first ? 0 : 1;
    sequences_ = t.size(batch_dim_);
    bound_ = t.size(1 - batch_dim_);
    present_ = call.rows[keys ? kPresentKv : kPresentQ];
    return;
  }
  by_index_ = !t.is_cpu();
  const Tensor cumulative = call.rows[keys ? kLengthsKv : kLengthsQ].to(at::kLong);
  const Tensor& starts = call.rows[keys ? kStartsKv : kStartsQ];
  lengths_ = cumulative.diff();
  sequences_ = lengths_.size(0);
  starts_ = (starts.defined() ? starts.to(at::kLong) : cumulative).narrow(0, 0, sequences_);
  if (!by_index_ || rows_ == 0) return;
  const auto most = call.max_lengths[keys ? 1 : 0];
  bound_ = most.has_value() ? *most : sequences_ == 0 ? 0 : lengths_.max().item<int64_t>();
  // Whole blocks: the shapes of the products, and so the bits, do not depend on the bound.
  const int64_t block = keys ? kAttentionKeyBlock : kAttentionQueryBlock;
  bound_ = (bound_ + block - 1) / block * block;
}

SequenceRows SequenceSet::operator[](int64_t number) const {
  SequenceRows rows;
  if (batch_dim_ >= 0) {
    rows.batch_dim_ = batch_dim_, rows.first_ = number, rows.length_ = bound_;
    if (present_.defined()) rows.tokens_ = present_.select(0, number);
  } else if (!by_index_) {
    rows.first_ = starts_[number].item<int64_t>(), rows.length_ = lengths_[number].item<int64_t>();
  } else {
    const Tensor places = at::arange(bound_, starts_.options());
    rows.length_ = bound_;
    rows.tokens_ = places < lengths_[number];
    const Tensor at = places + starts_[number];
    rows.from_ = at.masked_fill(rows.tokens_.logical_not(), 0);
    rows.to_ = at.masked_fill(rows.tokens_.logical_not(), rows_);
  }
  return rows;
}

Tensor SequenceSet::buffer(int64_t heads, int64_t width, const at::TensorOptions& options) const {
  auto shape = outer_;
  if (by_index_) ++shape[0];  // for rows of padding
  shape.push_back(heads), shape.push_back(width);
  return at::zeros(shape, options);
}

}  // namespace te_torch
