// See stash_members.h.
#include "stash/stash_members.h"

#include <transformer_engine/stash.h>

#include <algorithm>
#include <string>
#include <utility>

#include "autograd/rows_behind.h"
#include "stash/stash_step.h"

namespace te_torch {

namespace py = pybind11;

namespace {

// [start, end) in bytes of its storage.
std::pair<int64_t, int64_t> span_of(const Tensor& t) {
  const int64_t start = byte_offset(t);
  if (t.is_contiguous()) return {start, start + int64_t(t.nbytes())};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {start, start + (last + 1) * int64_t(t.element_size())};
}

}  // namespace

// ---- Stashed ----

Stashed::Stashed(std::shared_ptr<StashMembers> group, const Tensor& t)
    : PackedStorage(t), group_(std::move(group)), piece_(std::make_shared<StashPiece>(storage(), 0, bytes())) {}

Stashed::~Stashed() {
  const StashState state = group_->handle().state;
  if (state == StashState::kKept || state == StashState::kBack) piece_->storage = c10::Storage();
  group_->dropped();
}

void Stashed::add(const SaveRequest& offered) {
  if (there()) group_->place(*piece_, offered);
  PackedStorage::add(offered);
}

void Stashed::fetch() {
  if (there() && group_->handle().state == StashState::kStored) {  // a graph that stays would hold its pages
    if (const auto step = group_->handle().step.lock()) step->read(group_->handle());
  }
  if (!away()) return;
  const StashState state = group_->handle().state;
  if (state != StashState::kStored && state != StashState::kAway && state != StashState::kComing) return;
  StashHandle& handle = group_->handle();
  if (const auto step = handle.step.lock()) return step->wanted(handle);
  handle.finish_load();  // nobody has the stash any more
}

c10::Storage Stashed::restore() {
  fetch();
  if (piece_->storage) return piece_->storage;
  throw group_->handle().refusal("its backward");
}

bool Stashed::kept() const {
  const StashState state = group_->handle().state;
  return (state == StashState::kKept && !group_->handle().leaves) || state == StashState::kGone;
}

// ---- StashMembers ----

template <class... Words>
void StashMembers::refuse(const Words&... words) const {
  throw py::value_error(c10::str("PagedStash: group ", std::string(py::repr(name_)), " saves ", words...));
}

void StashMembers::open(std::shared_ptr<StashHandle> handle) {
  handle_ = std::move(handle);
  before_ = set_live_tokens(counts_);
  open_ = true;
}

void StashMembers::close() {
  set_live_tokens(std::move(before_));
  open_ = false;
  for (const auto& memory : taken()) {
    const auto stashed = std::static_pointer_cast<Stashed>(memory);
    if (!stashed->there() || stashed->piece()->regions.empty() || stashed->marked()) continue;
    handle_->pieces.push_back(stashed->piece());
    handle_->taken.push_back(stashed);
  }
}

std::shared_ptr<PackedStorage> StashMembers::take(const SaveRequest& offered) {
  const Tensor& t = offered.tensor;
  if (t.numel() == 0 || offered.live() == nullptr) return nullptr;
  if (t.device() != device_) {
    refuse("a tensor ", t.sizes(), " on ", t.device(), " whose rows are counted, wanted ", device_,
           ", the pool's; make one PagedStash for each device.");
  }
  auto taken = std::make_shared<Stashed>(shared_from_this(), t);
  ++wanted_;
  return taken;
}

void StashMembers::check_rows(const Tensor& t, const LiveRows& live) {
  const int64_t rows = t.size(0);
  if (counts_.has_value() && live.counter.data_ptr() == counts_->data_ptr() && AnnouncedRows::of(t) != nullptr) {
    if (rows_.value_or(rows) != rows) {
      refuse("tensors of ", *rows_, " rows and of ", rows,
             ", and its counts are said of one number of rows. Open a group for each, or declare the tensors of one "
             "(mark_pageable).");
    }
    rows_ = rows;
  }
  if (rows % live.unit_rows != 0) {
    refuse("a tensor of ", rows, " rows, wanted a multiple of the ", live.unit_rows,
           " rows that its counter counts by.");
  }
}

void StashMembers::place(StashPiece& piece, const SaveRequest& offered) {
  const Tensor& t = offered.tensor;
  if (t.numel() == 0) return;
  const auto [start, end] = span_of(t);
  StashRegion* inside = nullptr;
  bool shares = false;
  for (StashRegion& r : piece.regions) {
    if (inside == nullptr && r.offset <= start && end <= r.end()) inside = &r;
    shares |= start < r.end() && r.offset < end;
  }
  const int64_t behind = rows_behind(t);
  if (inside != nullptr) inside->behind = std::max(inside->behind, behind);
  if (offered.live() == nullptr) {
    if (inside != nullptr) return;
    refuse("a tensor ", t.sizes(),
           " that lies in one storage with a tensor whose rows are counted, and not in its rows: it could not come "
           "back. Say how many of its rows are alive (mark_pageable), or clone it.");
  }
  const LiveRows live = *offered.live();
  check_rows(t, live);
  Tensor counter = live.counter;
  if (counter.scalar_type() == at::kChar || counter.scalar_type() == at::kShort) {  // which the engine does not read
    auto& [narrow, wide] = wide_[{counter.data_ptr(), version_of(counter)}];
    if (!wide.defined()) {
      narrow = counter;
      wide = counter.to(at::kInt);
    }
    counter = wide;
  }
  const int64_t rows = t.size(0), row_bytes = int64_t(t.nbytes()) / rows;
  if (inside != nullptr) {
    if (inside->offset == start && inside->counter.data_ptr() == counter.data_ptr() &&
        inside->unit_rows * inside->row_bytes == live.unit_rows * row_bytes) {
      return;
    }
    refuse("a tensor ", t.sizes(),
           " that lies in another one whose rows are counted, and whose live rows are not the first of both; say one "
           "counter for the rows of both, or clone it.");
  }
  if (shares) {
    refuse("a tensor ", t.sizes(),
           " that shares a part of its memory with another one whose rows are counted, wanted tensors apart, or one "
           "in the other.");
  }
  if (++members_ > TE_STASH_MOST_MEMBERS) {
    refuse("more than ", TE_STASH_MOST_MEMBERS,
           " tensors whose rows are counted, wanted at most as many; open a second group for the others.");
  }
  piece.regions.emplace_back(start, rows, row_bytes, live.unit_rows, counter).behind = behind;
}

void StashMembers::dropped() {
  if (--wanted_ != 0 || open_) return;
  try {
    if (const auto step = handle_->step.lock()) return step->dropped(*handle_);
    handle_->let_go();
  } catch (py::error_already_set& error) {  // of a destructor, as Python has it in __del__
    error.discard_as_unraisable("a group of a PagedStash that nobody wants any more");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
}

void register_stash_members(py::module_& m) {
  py::class_<Stashed, PackedStorage, std::shared_ptr<Stashed>>(m, "Stashed")
      .def_property_readonly("status", [](const Stashed& s) { return s.kept() ? "kept" : "stashed"; })
      .attr("back") = "a copy out of the pages";
}

}  // namespace te_torch
