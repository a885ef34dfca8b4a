// Rows behind the live ones that a backward reads all the same: it quantizes what was kept once more, and has to come
// to the scales of the forward, which were made of these rows too. Said while a node keeps its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace te_torch {

inline constexpr int64_t kAllRows = INT64_MAX;

// Within it, what this thread's nodes keep a row of for each token is kept with `rows` more.
class RowsBehind {
 public:
  explicit RowsBehind(int64_t rows);
  ~RowsBehind();
  RowsBehind(const RowsBehind&) = delete;
  RowsBehind& operator=(const RowsBehind&) = delete;

 private:
  int64_t before_;
};

// Of a tensor that the node at work keeps, whoever says how many of its rows are alive.
int64_t rows_behind(const at::Tensor& t);

}  // namespace te_torch
