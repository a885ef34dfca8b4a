// Rows behind the live ones that a backward reads too: it quantizes a saved tensor again and needs the scales of the
// forward, which included these rows. Announced while a node saves its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace te_torch {

inline constexpr int64_t kAllRows = INT64_MAX;

// While it lives, tensors that nodes of this thread save with a row for each token are saved with `rows` more.
class TrailingRows {
 public:
  explicit TrailingRows(int64_t rows);
  ~TrailingRows();
  TrailingRows(const TrailingRows&) = delete;
  TrailingRows& operator=(const TrailingRows&) = delete;

 private:
  int64_t before_;
};

// The trailing rows of a tensor that the running node saves.
int64_t trailing_rows(const at::Tensor& t);

}  // namespace te_torch
