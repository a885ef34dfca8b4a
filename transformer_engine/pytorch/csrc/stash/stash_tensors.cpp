// See stash_tensors.h.
#include "stash/stash_tensors.h"

#include <transformer_engine/stash.h>

#include <algorithm>
#include <string>
#include <utility>

#include "autograd/trailing_rows.h"

namespace te_torch {

namespace py = pybind11;

namespace {

constexpr int64_t kLarge = int64_t(1) << 20;  // bytes

// [start, end) of a tensor in its storage, in bytes.
std::pair<int64_t, int64_t> span_of(const Tensor& t) {
  const int64_t start = byte_offset(t);
  if (t.is_contiguous()) return {start, start + int64_t(t.nbytes())};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {start, start + (last + 1) * int64_t(t.element_size())};
}

}  // namespace

// ---- Stashed ----

Stashed::Stashed(std::shared_ptr<StashTensors> group, const Tensor& t)
    : PackedStorage(t), group_(std::move(group)), segment_(std::make_shared<StashSegment>(storage(), 0, bytes())) {}

Stashed::~Stashed() {
  const StashState state = group_->handle().state;
  if (state == StashState::kKept || state == StashState::kBack) segment_->storage = c10::Storage();
  group_->release_one();
}

void Stashed::add(const SaveRequest& request) {
  if (is_resident()) group_->add_region(*segment_, request);
  PackedStorage::add(request);
}

void Stashed::fetch() {
  StashHandle& handle = group_->handle();
  // With retain_graph a handle that is read in place would hold its pages for as long as the graph.
  if (is_resident() && handle.state == StashState::kStored) {
    if (const auto step = handle.owner.lock()) step->read_originals(handle);
  }
  if (!is_away()) return;
  const StashState state = handle.state;
  if (state != StashState::kStored && state != StashState::kAway && state != StashState::kComing) return;
  if (const auto step = handle.owner.lock()) return step->restore(handle);
  handle.finish_load();  // its step, and so the stash, is gone
}

c10::Storage Stashed::restore() {
  fetch();
  if (segment_->storage) return segment_->storage;
  throw group_->handle().gone_error("the backward");
}

bool Stashed::kept() const {
  const StashState state = group_->handle().state;
  return (state == StashState::kKept && !group_->handle().leaves_in_step) || state == StashState::kGone;
}

// ---- StashTensors ----

template <class... Text>
void StashTensors::refuse(const Text&... text) const {
  throw py::value_error(c10::str("PagedStash: group ", std::string(py::repr(name_)), " saves ", text...));
}

void StashTensors::open(std::shared_ptr<StashHandle> handle) {
  handle_ = std::move(handle);
  outer_ = set_live_group({true, counts_});
  open_ = true;
}

void StashTensors::close() {
  set_live_group(std::move(outer_));
  open_ = false;
  for (const auto& memory : taken()) {
    const auto stashed = std::static_pointer_cast<Stashed>(memory);
    if (!stashed->is_resident() || stashed->segment()->regions.empty() || stashed->marked()) continue;
    handle_->segments.push_back(stashed->segment());
    handle_->packed.push_back(stashed);
  }
}

std::shared_ptr<PackedStorage> StashTensors::take(const SaveRequest& request) {
  const Tensor& t = request.tensor;
  if (t.numel() == 0) return nullptr;
  if (request.live() == nullptr) {
    warn_if_uncounted(t);
    return nullptr;
  }
  if (t.device() != device_) {
    refuse("a tensor ", t.sizes(), " with counted rows on ", t.device(), ", wanted the pool's device, ", device_,
           "; make one PagedStash for each device.");
  }
  auto packed = std::make_shared<Stashed>(shared_from_this(), t);
  ++readers_;
  return packed;
}

void StashTensors::warn_if_uncounted(const Tensor& t) const {
  const Uncounted found = AnnouncedRows::uncounted(t);
  if (found.node == nullptr || *warned_ || int64_t(t.nbytes()) < kLarge) return;
  *warned_ = true;
  const std::string text = c10::str(
      "PagedStash: group ", std::string(py::repr(name_)), " keeps all rows of '", found.name, "' of ", found.node, ", ",
      name_of(t.scalar_type()), " ", t.sizes(), ", ", t.nbytes(),
      " bytes, because no counter on the device applies to its first dimension. Matrices of tokens need counts in "
      "group(), or sizes on the device in GroupedLinear; FP8 data by columns have a counter in GroupedLinear's panels "
      "alone. Other tensors of this stash get no warning.");
  if (PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1) != 0) throw py::error_already_set();
}

void StashTensors::check_rows(const Tensor& t, const LiveRows& live) {
  const int64_t rows = t.size(live.units == LiveUnits::kColumns ? 1 : 0);
  if (live.units == LiveUnits::kRows && counts_.has_value() && live.counter.data_ptr() == counts_->data_ptr() &&
      AnnouncedRows::of(t) != nullptr) {
    if (rows_.value_or(rows) != rows) {
      refuse("tensors of ", *rows_, " rows and of ", rows,
             ", but its counts apply to one number of rows. Open one group for each number of rows, or declare the "
             "tensors of one of them with mark_pageable().");
    }
    rows_ = rows;
  }
  if (rows % live.unit_rows != 0) {
    refuse("a tensor of ", rows, " rows, wanted a multiple of ", live.unit_rows,
           ", the rows in one unit of its counter.");
  }
}

void StashTensors::add_region(StashSegment& segment, const SaveRequest& request) {
  const Tensor& t = request.tensor;
  if (t.numel() == 0) return;
  const auto [start, end] = span_of(t);
  StashRegion* enclosing = nullptr;
  bool overlaps = false;
  for (StashRegion& r : segment.regions) {
    if (enclosing == nullptr && r.offset <= start && end <= r.end()) enclosing = &r;
    overlaps |= start < r.end() && r.offset < end;
  }
  const int64_t trailing = trailing_rows(t);
  if (enclosing != nullptr) enclosing->trailing_rows = std::max(enclosing->trailing_rows, trailing);
  if (request.live() == nullptr) {
    if (enclosing != nullptr) return;
    refuse("a tensor ", t.sizes(),
           " in the storage of a tensor with counted rows, but not in its rows: a reload could not restore it. Declare "
           "its live rows with mark_pageable(), or clone it.");
  }
  const LiveRows live = *request.live();
  check_rows(t, live);
  Tensor counter = live.counter;
  if (counter.scalar_type() == at::kChar || counter.scalar_type() == at::kShort) {  // not read by the engine
    auto& [narrow, wide] = wide_[{counter.data_ptr(), version_of(counter)}];
    if (!wide.defined()) {
      narrow = counter;
      wide = counter.to(at::kInt);
    }
    counter = wide;
  }
  const bool columns = live.units == LiveUnits::kColumns;
  const int64_t rows = t.size(columns ? 1 : 0), repeats = columns ? t.size(0) : 1;
  const int64_t row_bytes = int64_t(t.nbytes()) / (rows * repeats);
  if (enclosing != nullptr) {
    const bool alike = enclosing->offset == start && enclosing->repeats == repeats &&
                       enclosing->unit_rows * enclosing->row_bytes == live.unit_rows * row_bytes;
    if (alike && enclosing->is_counted_by(counter)) return;
    if (alike && enclosing->end() == end) return enclosing->count_also(counter);
    refuse("a tensor ", t.sizes(),
           " inside another tensor with counted rows, and the live rows of the two differ; declare one counter for "
           "both, or clone it.");
  }
  if (overlaps) {
    refuse("a tensor ", t.sizes(),
           " that shares a part of its memory with another tensor with counted rows, wanted no overlap, or one tensor "
           "inside the other; clone it.");
  }
  if (++regions_ > TE_STASH_MOST_MEMBERS) {
    refuse("more than ", TE_STASH_MOST_MEMBERS, " tensors with counted rows, wanted at most ", TE_STASH_MOST_MEMBERS,
           "; open a second group for the others.");
  }
  StashRegion& region = segment.regions.emplace_back(start, rows, row_bytes, live.unit_rows, counter);
  region.trailing_rows = trailing;
  region.repeats = repeats;
  region.pitch = rows * row_bytes;
  region.panels = live.units == LiveUnits::kPanels;
}

void StashTensors::release_one() {
  if (--readers_ != 0 || open_) return;
  try {
    if (const auto step = handle_->owner.lock()) return step->release(*handle_);
    handle_->release();
  } catch (py::error_already_set& error) {  // called by a destructor: reported as Python reports errors of __del__
    error.discard_as_unraisable("the release of a PagedStash group");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
}

void register_stash_tensors(py::module_& m) {
  py::class_<Stashed, PackedStorage, std::shared_ptr<Stashed>>(m, "Stashed")
      .def_property_readonly("status", [](const Stashed& s) { return s.kept() ? "kept" : "stashed"; })
      .attr("back") = "a copy out of the pages";
}

}  // namespace te_torch
