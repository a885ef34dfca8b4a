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
  Uncounted uncounted = {};
};

thread_local std::deque<Announced> announced;  // a deque: additions by hooks leave the entries in place
thread_local LiveGroup current_group;
thread_local int64_t current_trailing_rows = 0;

}  // namespace

void SaveContext::announce(const at::Tensor& t, const SavedInfo& info, const LiveRows& live) const {
  const bool counted = live.counter.defined();
  if (!counted && !current_group.open) return;
  const int64_t trailing = live.of_group ? current_trailing_rows : 0;
  announced.push_back({t.unsafeGetTensorImpl(), live, trailing, counted ? Uncounted{} : Uncounted{op_, info.name}});
}

// A row is an index of the first dimension of a matrix, or a value of a vector: an input of one dimension is one token,
// and a tensor of three dimensions has tokens along two. A node's own counter includes all rows that its backward
// reads.
void SaveContext::announce_tokens(const at::Tensor& t, const SavedInfo& info) const {
  const bool is_rows = t.dim() == (info.vector ? 1 : 2) && t.is_contiguous();
  if (live_.rows.defined() && is_rows) {
    return announce(t, info, {live_.rows, 1, LiveUnits::kRows, live_.of_group});
  }
  const auto& tokens = current_group.tokens;
  const bool counted = tokens.has_value() && is_rows && t.device() == tokens->device();
  if (!counted && current_trailing_rows == 0 && !current_group.open) return;
  announced.push_back({t.unsafeGetTensorImpl(),
                       {counted ? *tokens : at::Tensor(), 1},
                       current_trailing_rows,
                       counted ? Uncounted{} : Uncounted{op_, info.name}});
}

LiveGroup set_live_group(LiveGroup group) { return std::exchange(current_group, std::move(group)); }

const LiveGroup& live_group() { return current_group; }

AnnouncedRows::AnnouncedRows() : before_(announced.size()) {}

AnnouncedRows::~AnnouncedRows() { announced.erase(announced.begin() + std::ptrdiff_t(before_), announced.end()); }

const LiveRows* AnnouncedRows::of(const at::Tensor& t) {
  for (const auto& entry : announced) {
    if (entry.tensor == t.unsafeGetTensorImpl() && entry.live.counter.defined()) return &entry.live;
  }
  return nullptr;
}

Uncounted AnnouncedRows::uncounted(const at::Tensor& t) {
  for (const auto& entry : announced) {
    if (entry.tensor == t.unsafeGetTensorImpl() && entry.uncounted.node != nullptr) return entry.uncounted;
  }
  return {};
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
