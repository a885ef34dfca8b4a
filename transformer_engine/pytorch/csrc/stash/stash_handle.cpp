// See stash_handle.h.
#include "stash/stash_handle.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>

#include "stash/stash_calls.h"
#include "stash/stash_members.h"
#include "stash/stash_step.h"

namespace te_torch {

namespace py = pybind11;

namespace {

constexpr std::array<const char*, 6> kStates{"kept", "stored", "away", "coming", "back", "gone"};

}  // namespace

const char* name_of(StashState state) { return kStates[size_t(state)]; }

uint32_t version_of(const Tensor& t) { return t.is_inference() ? 0 : uint32_t(t._version()); }

StashRegion::StashRegion(int64_t at, int64_t count, int64_t bytes, int64_t unit, const Tensor& alive)
    : offset(at), rows(count), row_bytes(bytes), unit_rows(unit), counter(alive), version(version_of(alive)) {}

bool StashRegion::changed() const { return version_of(counter) != version; }

StashHandle::~StashHandle() {
  if (!like.has_value()) return;
  if (state != StashState::kKept && state != StashState::kStored && state != StashState::kAway) return;
  try {
    if (const auto owner = step.lock()) {
      owner->dropped(*this);
    } else {
      let_go();
    }
  } catch (py::error_already_set& error) {  // of a destructor, as Python has it in __del__
    error.discard_as_unraisable("a handle of a PagedStash that nobody wants any more");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
}

// A graph that has a call of the pool has its addresses.
void StashHandle::note_captured(const StashPoint& point) const {
  const auto owner = core.lock();
  if (owner != nullptr && point.captured) owner->captured = true;
}

bool StashHandle::has_members() {
  std::erase_if(pieces, [](const auto& piece) { return !piece->storage; });
  return std::any_of(pieces.begin(), pieces.end(), [](const auto& piece) { return !piece->regions.empty(); });
}

void StashHandle::check_counters() const {
  for (const auto& piece : pieces) {
    if (std::none_of(piece->regions.begin(), piece->regions.end(), [](const auto& r) { return r.changed(); })) continue;
    throw std::runtime_error(c10::str("PagedStash: the counter of a tensor of group ", std::string(py::repr(name)),
                                      " was changed in place while the group was leaving: its rows are counted then. "
                                      "Give each group a counter of its own."));
  }
}

void StashHandle::store(const std::shared_ptr<StashCalls>& calls) {
  if (state != StashState::kKept || !has_members()) return;
  check_counters();
  calls_ = calls;
  calls->store(*this);
  note_captured(*stored);
  state = StashState::kStored;
}

void StashHandle::free() {
  if (state != StashState::kStored) return;
  calls_->lanes().wait(stored);
  check_counters();
  group->forget_counters();
  free_originals();
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

void StashHandle::start_load(bool keep) {
  free();
  if (state != StashState::kAway) return;
  group->bring(*this);
  calls_->load(*this, keep);
  note_captured(*back);
  state = StashState::kComing;
}

void StashHandle::finish_load() {
  start_load();
  if (state != StashState::kComing) return;
  calls_->lanes().wait(back);
  state = StashState::kBack;
}

void StashHandle::stay() {
  if (state != StashState::kStored) return;
  calls_->lanes().wait(calls_->drop(*this));  // and for the store, which reads them
  taken.clear();
  group.reset();
  state = StashState::kBack;
}

void StashHandle::evict(int64_t low_water) {
  calls_->evict(*this, low_water);
  evicted = true;
}

void StashHandle::let_go() {
  if (state == StashState::kComing) calls_->lanes().wait(back);
  if (state == StashState::kStored || state == StashState::kAway) {
    calls_->lanes().wait(calls_->drop(*this));  // a drop is behind the store, so that this waits for both
  }
  give_up();
}

void StashHandle::give_up() {
  pieces.clear();
  taken.clear();
  state = StashState::kGone;
  group.reset();
  stored.reset();
  back.reset();
}

std::runtime_error StashHandle::refusal(const std::string& who) const {
  return std::runtime_error(
      c10::str("PagedStash: group ", std::string(py::repr(name)), " is wanted by ", who,
               ", and its pages are gone: a reload gave them back, or a reset() or close() did. Reload it once, "
               "keep=True for more, before the next reset()."));
}

void register_stash_handle(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashRegion>(m, "StashRegion")
      .def_readonly("offset", &StashRegion::offset)
      .def_readonly("rows", &StashRegion::rows)
      .def_readonly("row_bytes", &StashRegion::row_bytes)
      .def_readonly("unit_rows", &StashRegion::unit_rows)
      .def_property_readonly(
          "behind", [](const StashRegion& r) { return stash_units_behind(r); }, "in units")
      .def_readonly("counter", &StashRegion::counter);
  py::class_<StashPiece, std::shared_ptr<StashPiece>>(m, "StashPiece")
      .def(py::init([](const Tensor& memory) {
             return std::make_shared<StashPiece>(memory.storage(), memory.storage_offset(), memory.numel());
           }),
           py::arg("memory"), "bytes")
      .def("add", [](StashPiece& p, int64_t offset, int64_t rows, int64_t row_bytes, const Tensor& counter,
                     int64_t unit_rows) { p.regions.emplace_back(offset, rows, row_bytes, unit_rows, counter); })
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
      .def(py::init([](py::object name) {
             return std::make_shared<StashHandle>(name, py::make_tuple(name, 0), TE_STASH_TAIL_ZERO,
                                                  std::weak_ptr<StashStep>(), std::weak_ptr<StashCore>());
           }),
           py::arg("name"))
      .def("__repr__",
           [](const StashHandle& h) {
             return c10::str("Handle(", std::string(py::repr(h.name)), ", ", name_of(h.state), ", ", h.pieces.size(),
                             " pieces)");
           })
      .def_readonly("name", &StashHandle::name)
      .def_readonly("key", &StashHandle::key)
      .def_readonly("pieces", &StashHandle::pieces)
      .def_property_readonly("step", [](const StashHandle& h) { return h.step.lock(); })
      .def_readonly("group", &StashHandle::group)
      .def_readonly("back", &StashHandle::back)
      .def_readonly("evicted", &StashHandle::evicted)
      .def_property_readonly("state", [](const StashHandle& h) { return name_of(h.state); })
      .def("add", [](StashHandle& h, std::shared_ptr<StashPiece> piece) { h.pieces.push_back(std::move(piece)); })
      .def("store", wrapped([](StashHandle& h, const std::shared_ptr<StashCalls>& calls) { h.store(calls); }))
      .def("start_load", wrapped([](StashHandle& h, bool keep) { h.start_load(keep); }), py::arg("keep") = false)
      .def("finish_load", wrapped([](StashHandle& h) { h.finish_load(); }))
      .def("let_go", wrapped([](StashHandle& h) { h.let_go(); }))
      .def("evict", wrapped([](StashHandle& h, int64_t low_water) { h.evict(low_water); }));
}

}  // namespace te_torch
