// See saved.h.
#include "autograd/saved.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "autograd/trailing_rows.h"

namespace te_torch {

namespace {

struct Announced {
  const c10::TensorImpl* tensor;  // alive, as the announcing node saves it
  LiveRows live;                  // the counter may be undefined
  int64_t trailing = 0;
};

thread_local std::deque<Announced> announced;  // a deque: additions by hooks leave the entries in place
thread_local std::optional<at::Tensor> live_tokens;
thread_local int64_t current_trailing_rows = 0;

}  // namespace

void SaveContext::announce(const at::Tensor& t, const LiveRows& live) {
  announced.push_back({t.unsafeGetTensorImpl(), live, 0});
}

// A row is an index of the first dimension, which is not the tokens' alone in a tensor of three dimensions.
void SaveContext::announce_tokens(const at::Tensor& t) {
  const bool counted = live_tokens.has_value() && t.dim() >= 1 && t.dim() <= 2 && t.is_contiguous() &&
                       t.device() == live_tokens->device();
  if (!counted && current_trailing_rows == 0) return;
  announced.push_back({t.unsafeGetTensorImpl(), {counted ? *live_tokens : at::Tensor(), 1}, current_trailing_rows});
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

TrailingRows::TrailingRows(int64_t rows) : before_(std::exchange(current_trailing_rows, rows)) {}

TrailingRows::~TrailingRows() { current_trailing_rows = before_; }

int64_t trailing_rows(const at::Tensor& t) {
  int64_t rows = 0;
  for (const auto& entry : announced) {
    if (entry.tensor == t.unsafeGetTensorImpl()) rows = std::max(rows, entry.trailing);
  }
  return rows;
}

}  // namespace te_torch
