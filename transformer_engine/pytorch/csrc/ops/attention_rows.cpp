// The rows of the sequences of an attention call: where they are, and checks of that.
#include "ops/attention_rows.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <string>

namespace te_torch {

namespace {

void check_values(const Tensor& holds, const char* argument, const Tensor& given, const std::string& wanted) {
  const std::string message = std::string("attention: argument '") + argument + "' ";
  if (!holds.is_cpu()) {
    at::_assert_async(holds, message + "does not fit: wanted " + wanted);
    return;
  }
  if (holds.item<bool>()) return;
  const Tensor numbers = given.to(at::kLong).contiguous();
  TORCH_CHECK_VALUE(false, message, "is ",
                    at::IntArrayRef(numbers.const_data_ptr<int64_t>(), static_cast<size_t>(numbers.numel())),
                    ", wanted ", wanted, ".");
}

void check_side(const AttentionCall& call, bool keys) {
  const Tensor& cumulative = call.rows[keys ? kLengthsKv : kLengthsQ];
  const Tensor& starts = call.rows[keys ? kStartsKv : kStartsQ];
  const int64_t rows = (keys ? call.k : call.q).size(0);
  const std::string name = keys ? "cu_seqlens_kv" : "cu_seqlens_q", tokens = std::to_string(rows);
  const Tensor lengths = cumulative.diff();
  Tensor grows = (lengths >= 0).all() & (cumulative[0] == 0);
  if (!starts.defined()) grows = grows & (cumulative[-1] <= rows);
  check_values(grows, name.c_str(), cumulative,
               "0 first and then each sequence's length added, up to the " + tokens + " tokens of the input");
  if (starts.defined()) {
    const Tensor ends = starts.narrow(0, 0, lengths.size(0)) + lengths;
    const Tensor fits = (ends <= starts.narrow(0, 1, lengths.size(0))).all() & (starts[0] >= 0) & (starts[-1] <= rows);
    check_values(
        fits, (name + "_padded").c_str(), starts,
        "the row where each sequence begins, with room for its tokens, up to the " + tokens + " rows of the input");
  }
  const auto most = call.max_lengths[keys ? 1 : 0];
  if (!most.has_value()) return;
  check_values((lengths <= *most).all(), keys ? "max_seqlen_kv" : "max_seqlen_q", lengths.new_full({1}, *most),
               "at least the longest sequence of '" + name + "'");
}

}  // namespace

void check_sequences(const AttentionCall& call) {
  if (!call.packed) return;
  check_side(call, false);
  const auto same = [&](AttentionRow one, AttentionRow other) { return call.rows[one].is_same(call.rows[other]); };
  const bool checked = same(kLengthsQ, kLengthsKv) && same(kStartsQ, kStartsKv) && call.q.size(0) == call.k.size(0) &&
                       call.max_lengths[0] == call.max_lengths[1];
  if (!checked) check_side(call, true);
}

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
