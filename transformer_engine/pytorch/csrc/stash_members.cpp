// See stash_members.h.
#include "stash_members.h"

#include <torch/csrc/Exceptions.h>
#include <transformer_engine/stash.h>

#include <array>
#include <string>
#include <utility>

namespace te_torch {

namespace py = pybind11;

namespace {

constexpr std::array<const char*, 6> kStates{"kept", "stored", "away", "coming", "back", "gone"};

// [start, end) in bytes of its storage.
std::pair<int64_t, int64_t> span_of(const Tensor& t) {
  const int64_t start = byte_offset(t);
  if (t.is_contiguous()) return {start, start + int64_t(t.nbytes())};
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return {start, start + (last + 1) * int64_t(t.element_size())};
}

// Tensors of inference mode have none, and nobody asks whether they change.
uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : uint32_t(t._version()); }

bool changed(const StashRegion& region) { return version_of(region.counter) != region.version; }

}  // namespace

// ---- StashHandle ----

bool StashHandle::has_members() {
  bool found = false;
  for (size_t i = pieces.size(); i-- > 0;) {
    if (!pieces[i]->storage) {
      pieces.erase(pieces.begin() + std::ptrdiff_t(i));
    } else {
      found |= !pieces[i]->regions.empty();
    }
  }
  return found;
}

void StashHandle::check_counters() const {
  for (const auto& piece : pieces) {
    if (std::none_of(piece->regions.begin(), piece->regions.end(), changed)) continue;
    throw std::runtime_error(c10::str("PagedStash: the counter of a tensor of group ", std::string(py::repr(name)),
                                      " was changed in place while the group was leaving: its rows are counted then. "
                                      "Give each group a counter of its own."));
  }
}

void StashHandle::free_originals() {
  const auto gone = std::exchange(taken, {});  // what is let go may come back here
  park();
  for (const auto& ref : gone) {
    if (const auto stashed = ref.lock()) stashed->let_go();
  }
}

void StashHandle::park() {
  for (const auto& piece : pieces) piece->storage = c10::Storage();
  state = StashState::kAway;
}

void StashHandle::give_up() {
  pieces.clear();
  taken.clear();
  state = StashState::kGone;
}

// ---- Stashed ----

Stashed::Stashed(std::shared_ptr<StashMembers> group, const Tensor& t)
    : Taken(t), group_(std::move(group)), piece_(std::make_shared<StashPiece>(storage(), 0, bytes())) {}

Stashed::~Stashed() {
  const StashState state = group_->handle().state;
  if (state == StashState::kKept || state == StashState::kBack) piece_->storage = c10::Storage();
  group_->dropped();
}

void Stashed::add(const Offered& offered) {
  if (there()) group_->place(*piece_, offered);
  Taken::add(offered);
}

void Stashed::fetch() {
  if (!away()) return;
  const StashState state = group_->handle().state;
  if (state != StashState::kStored && state != StashState::kAway && state != StashState::kComing) return;
  const py::object& handle = group_->python_handle();
  handle.attr("step").attr("wanted")(handle);
}

c10::Storage Stashed::restore() {
  fetch();
  if (piece_->storage) return piece_->storage;
  const py::object refusal = group_->python_handle().attr("refusal")("its backward");
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(refusal.ptr())), refusal.ptr());
  throw py::error_already_set();
}

bool Stashed::kept() const {
  const StashState state = group_->handle().state;
  return state == StashState::kKept || state == StashState::kGone;
}

// ---- StashMembers ----

template <class... Words>
void StashMembers::refuse(const Words&... words) const {
  throw py::value_error(c10::str("PagedStash: group ", std::string(py::repr(name_)), " saves ", words...));
}

void StashMembers::open(py::object handle) {
  own_ = py::cast<StashHandle*>(handle);
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
    own_->pieces.push_back(stashed->piece());
    own_->taken.push_back(stashed);
  }
}

std::shared_ptr<Taken> StashMembers::take(const Offered& offered) {
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

void StashMembers::place(StashPiece& piece, const Offered& offered) {
  const Tensor& t = offered.tensor;
  if (t.numel() == 0) return;
  const auto [start, end] = span_of(t);
  const StashRegion* inside = nullptr;
  bool shares = false;
  for (const StashRegion& r : piece.regions) {
    if (inside == nullptr && r.offset <= start && end <= r.end()) inside = &r;
    shares |= start < r.end() && r.offset < end;
  }
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
  piece.regions.push_back({start, rows, row_bytes, live.unit_rows, counter, version_of(counter)});
}

void StashMembers::dropped() {
  if (--wanted_ != 0 || open_) return;
  try {
    handle_.attr("step").attr("dropped")(handle_);
  } catch (py::error_already_set& error) {  // of a destructor, as Python has it in __del__
    error.discard_as_unraisable("a group of a PagedStash that nobody wants any more");
  }
}

void register_stash_members(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashRegion>(m, "StashRegion")
      .def_readonly("offset", &StashRegion::offset)
      .def_readonly("rows", &StashRegion::rows)
      .def_readonly("row_bytes", &StashRegion::row_bytes)
      .def_readonly("unit_rows", &StashRegion::unit_rows)
      .def_readonly("counter", &StashRegion::counter);
  py::class_<StashPiece, std::shared_ptr<StashPiece>>(m, "StashPiece")
      .def(py::init([](const Tensor& memory) {
             return std::make_shared<StashPiece>(memory.storage(), memory.storage_offset(), memory.numel());
           }),
           py::arg("memory"), "bytes")
      .def(
          "add",
          [](StashPiece& p, int64_t offset, int64_t rows, int64_t row_bytes, const Tensor& counter, int64_t unit_rows) {
            p.regions.push_back({offset, rows, row_bytes, unit_rows, counter, version_of(counter)});
          })
      .def_readonly("bytes", &StashPiece::bytes)
      .def_readonly("regions", &StashPiece::regions)
      .def_property(
          "memory",
          [](const StashPiece& p) -> std::optional<Tensor> {
            if (!p.storage) return std::nullopt;
            return bytes_over(p.storage, p.start, p.bytes);
          },
          [](StashPiece& p, const Tensor& memory) {
            p.storage = memory.storage();
            p.start = memory.storage_offset();
          });
  py::class_<StashHandle, std::shared_ptr<StashHandle>>(m, "StashHandle")
      .def(py::init<py::object>(), py::arg("name"))
      .def_readonly("name", &StashHandle::name)
      .def_readonly("pieces", &StashHandle::pieces)
      .def_property_readonly("has_pieces", [](const StashHandle& h) { return !h.pieces.empty(); })
      .def("add", [](StashHandle& h, std::shared_ptr<StashPiece> piece) { h.pieces.push_back(std::move(piece)); })
      .def_property(
          "state",
          [](const StashHandle& h) {
            static const auto* const names = [] {
              auto* made = new std::vector<py::str>();
              for (const char* state : kStates) made->push_back(py::str(state));
              return made;
            }();
            return (*names)[size_t(h.state)];
          },
          [](StashHandle& h, const std::string& state) {
            const auto* found = std::find(kStates.begin(), kStates.end(), state);
            if (found == kStates.end()) throw py::value_error("StashHandle: there is no state " + state + ".");
            h.state = StashState(found - kStates.begin());
          })
      .def("has_members", &StashHandle::has_members)
      .def("check_counters", &StashHandle::check_counters)
      .def("free_originals", &StashHandle::free_originals)
      .def("park", &StashHandle::park)
      .def("give_up", &StashHandle::give_up);
  py::class_<StashMembers, Client, std::shared_ptr<StashMembers>>(m, "StashMembers")
      .def(py::init([](py::object name, std::optional<Tensor> counts, const at::Device& device) {
        return std::make_shared<StashMembers>(std::move(name), std::move(counts), device);
      }))
      .def("open", &StashMembers::open)
      .def("close", wrapped([](StashMembers& self) { self.close(); }));
  py::class_<Stashed, Taken, std::shared_ptr<Stashed>>(m, "Stashed")
      .def_property_readonly("status", [](const Stashed& s) { return s.kept() ? "kept" : "stashed"; })
      .attr("back") = "a copy out of the pages";
}

}  // namespace te_torch
