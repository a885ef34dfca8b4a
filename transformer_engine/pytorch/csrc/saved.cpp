// See saved.h.
#include "saved.h"

#include <deque>
#include <utility>

namespace te_torch {

namespace {

struct Announced {
  const c10::TensorImpl* tensor;  // kept by the node whose announcement it is
  LiveRows live;
};

thread_local std::deque<Announced> announced;  // those that hooks add leave these where they are
thread_local std::optional<at::Tensor> live_tokens;

}  // namespace

void Keeper::announce(const at::Tensor& t, const LiveRows& live) {
  announced.push_back({t.unsafeGetTensorImpl(), live});
}

// A row is an index of the first dimension, which of three is not that of the tokens alone.
void Keeper::announce_tokens(const at::Tensor& t) {
  if (!live_tokens.has_value() || t.dim() < 1 || t.dim() > 2 || !t.is_contiguous()) return;
  if (t.device() == live_tokens->device()) announce(t, {*live_tokens, 1});
}

std::optional<at::Tensor> set_live_tokens(std::optional<at::Tensor> counter) {
  std::swap(live_tokens, counter);
  return counter;
}

AnnouncedRows::AnnouncedRows() : before_(announced.size()) {}

AnnouncedRows::~AnnouncedRows() { announced.erase(announced.begin() + std::ptrdiff_t(before_), announced.end()); }

const LiveRows* AnnouncedRows::of(const at::Tensor& t) {
  for (const auto& entry : announced) {
    if (entry.tensor == t.unsafeGetTensorImpl()) return &entry.live;
  }
  return nullptr;
}

}  // namespace te_torch
