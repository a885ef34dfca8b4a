// The rows of one sequence within a tensor of many: loaded a block at a time, with zeros where there is no token, and
// stored. Lengths that are on a GPU stay there: loops run to a bound of them, and an index finds the rows.
#pragma once

#include <optional>

#include "ops/attention_call.h"

namespace te_torch {

class SequenceRows {
 public:
  int64_t length() const { return length_; }  // the rows to visit
  // The number of tokens among them, if the host has it, or on the device.
  std::optional<int64_t> count() const { return tokens_.defined() ? std::nullopt : std::optional(length_); }
  Tensor device_count() const { return tokens_.sum(); }
  // bool [count], undefined: all rows are tokens.
  Tensor tokens(int64_t first, int64_t count) const {
    return tokens_.defined() ? tokens_.narrow(0, first, count) : Tensor();
  }

  // Rows of t [.., heads, width] as a copy [heads, count, width] in `dtype`.
  Tensor load(const Tensor& t, int64_t first, int64_t count, at::ScalarType dtype) const;
  // values [heads, count, width] into rows of a buffer of the same SequenceSet.
  void store(const Tensor& buffer, int64_t first, const Tensor& values) const;

 private:
  friend class SequenceSet;
  Tensor view(const Tensor& t) const;  // [length, heads, width], of sequences without an index

  int64_t length_ = 0, first_ = 0, batch_dim_ = -1;  // first_: number of the batch, or the first row of packed ones
  Tensor tokens_, from_, to_;                        // from_, to_: int64 [length], the rows to load from and store to
};

// The sequences of the queries of a call, or of its keys.
class SequenceSet {
 public:
  SequenceSet(const AttentionCall& call, bool keys);

  int64_t size() const { return sequences_; }
  SequenceRows operator[](int64_t number) const;

  // Zeros for store(), in the layout of the call with these last dimensions, and its result.
  Tensor buffer(int64_t heads, int64_t width, const at::TensorOptions& options) const;
  Tensor values(const Tensor& buffer) const { return by_index_ ? buffer.narrow(0, 0, rows_) : buffer; }

 private:
  std::vector<int64_t> outer_;  // dimensions before the heads
  bool by_index_ = false;
  int64_t sequences_ = 0, rows_ = 0, bound_ = 0, batch_dim_ = -1;
  Tensor present_, starts_, lengths_;  // starts_, lengths_: int64 [sequences], on the CPU unless by_index_
};

}  // namespace te_torch
