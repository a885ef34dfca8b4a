// See saved.h.
#include "autograd/saved.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "autograd/rows_behind.h"

namespace te_torch {

namespace {

struct Announced {
  const c10::TensorImpl* tensor;  // kept by the node whose announcement it is
  LiveRows live;                  // no counter: the node knows of none
  int64_t behind = 0;
};

thread_local std::deque<Announced> announced;  // those that hooks add leave these where they are
thread_local std::optional<at::Tensor> live_tokens;
thread_local int64_t rows_now_behind = 0;

}  // namespace

void SaveContext::announce(const at::Tensor& t, const LiveRows& live) {
  announced.push_back({t.unsafeGetTensorImpl(), live, 0});
}

// A row is an index of the first dimension, which of three is not that of the tokens alone.
void SaveContext::announce_tokens(const at::Tensor& t) {
  const bool counted = live_tokens.has_value() && t.dim() >= 1 && t.dim() <= 2 && t.is_contiguous() &&
                       t.device() == live_tokens->device();
  if (!counted && rows_now_behind == 0) return;
  announced.push_back({t.unsafeGetTensorImpl(), {counted ? *live_tokens : at::Tensor(), 1}, rows_now_behind});
}

std::optional<at::Tensor> set_live_tokens(std::optional<at::Tensor> counter) {
  std::swap(live_tokens, counter);
  return counter;
}

AnnouncedRows::AnnouncedRows() : before_(announced.size()) {}

AnnouncedRows::~AnnouncedRows() { announced.erase(announced.begin() + std::ptrdiff_t(before_), announced.end()); }

const LiveRows* AnnouncedRows::of(const at::Tensor& t) {
  for (const auto& entry : announced) {
    if (entry.tensor == t.unsafeGetTensorImpl() && entry.live.counter.defined()) return &entry.live;
  }
  return nullptr;
}

RowsBehind::RowsBehind(int64_t rows) : before_(std::exchange(rows_now_behind, rows)) {}

RowsBehind::~RowsBehind() { rows_now_behind = before_; }

int64_t rows_behind(const at::Tensor& t) {
  int64_t rows = 0;
  for (const auto& entry : announced) {
    if (entry.tensor == t.unsafeGetTensorImpl()) rows = std::max(rows, entry.behind);
  }
  return rows;
}

}  // namespace te_torch
