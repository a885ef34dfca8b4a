// See stash_handle.h.
#include "stash/stash_handle.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <array>

namespace te_torch {

namespace py = pybind11;

namespace {

constexpr std::array<const char*, 6> kStates{"kept", "stored", "away", "coming", "back", "gone"};

}  // namespace

const char* name_of(StashState state) { return kStates[size_t(state)]; }

StashHandle::~StashHandle() {
  if (!like.has_value()) return;
  if (state != StashState::kKept && state != StashState::kStored && state != StashState::kAway) return;
  try {
    if (const auto step = owner.lock()) {
      step->release(*this);
    } else {
      release();
    }
  } catch (py::error_already_set& error) {  // a destructor does not throw: reported as Python reports errors of __del__
    error.discard_as_unraisable("the release of a PagedStash handle");
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    PyErr_WriteUnraisable(nullptr);
  }
}

bool StashHandle::has_regions() {
  std::erase_if(segments, [](const auto& segment) { return !segment->storage; });
  return std::any_of(segments.begin(), segments.end(), [](const auto& segment) { return !segment->regions.empty(); });
}

void StashHandle::check_counters() const {
  for (const auto& segment : segments) {
    for (const StashRegion& region : segment->regions) {
      if (!region.counter_changed()) continue;
      throw std::runtime_error(c10::str("PagedStash: the counter of a tensor of group ", std::string(py::repr(name)),
                                        " was changed in place before the store had read it. Give each group a "
                                        "counter of its own."));
    }
  }
}

void StashHandle::store(const std::shared_ptr<StashCalls>& calls) {
  if (state != StashState::kKept || !has_regions()) return;
  check_counters();
  calls_ = calls;
  calls->store(*this);
  state = StashState::kStored;
}

void StashHandle::free_originals() {
  if (state != StashState::kStored) return;
  calls_->streams().wait(stored);
  check_counters();
  group->release_counters();
  const auto released = std::exchange(packed, {});  // a destructor may call back into this handle
  detach_buffers();
  for (const auto& ref : released) {
    if (const auto memory = ref.lock()) memory->let_go();
  }
}

void StashHandle::detach_buffers() {
  for (const auto& segment : segments) segment->storage = c10::Storage();
  state = StashState::kAway;
}

void StashHandle::start_load(bool keep) {
  free_originals();
  if (state != StashState::kAway) return;
  group->allocate(segments);
  calls_->load(*this, keep);
  state = StashState::kComing;
}

void StashHandle::finish_load() {
  start_load();
  if (state != StashState::kComing) return;
  calls_->streams().wait(loaded);
  state = StashState::kBack;
}

void StashHandle::cancel() {
  if (state != StashState::kStored) return;
  calls_->streams().wait(calls_->drop(*this));  // which comes after the store, so that the originals may be written
  packed.clear();
  group.reset();
  state = StashState::kBack;
}

void StashHandle::evict(int64_t low_water) {
  calls_->evict(*this, low_water);
  evicted = true;
}

void StashHandle::release() {
  if (state == StashState::kComing) calls_->streams().wait(loaded);
  if (state == StashState::kStored || state == StashState::kAway) {
    calls_->streams().wait(calls_->drop(*this));  // which comes after the store: this waits for both
  }
  finish();
}

void StashHandle::finish() {
  segments.clear();
  packed.clear();
  state = StashState::kGone;
  group.reset();
  stored.reset();
  loaded.reset();
}

std::runtime_error StashHandle::gone_error(const std::string& reader) const {
  return std::runtime_error(c10::str("PagedStash: ", reader, " needs group ", std::string(py::repr(name)),
                                     ", but its pages are gone: an earlier reload, a reset() or close() gave them "
                                     "back. Reload it before the next reset(), with keep=True where it is reloaded "
                                     "again."));
}

void register_stash_handle(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashHandle, std::shared_ptr<StashHandle>>(m, "StashHandle")
      .def(py::init([](py::object name) {
             return std::make_shared<StashHandle>(name, py::make_tuple(name, 0), TE_STASH_TAIL_ZERO,
                                                  std::weak_ptr<StashHandleOwner>(), std::weak_ptr<const void>());
           }),
           py::arg("name"))
      .def("__repr__",
           [](const StashHandle& h) {
             return c10::str("Handle(", std::string(py::repr(h.name)), ", ", name_of(h.state), ", ", h.segments.size(),
                             " segments)");
           })
      .def_property_readonly("name", [](const StashHandle& h) { return h.name; })
      .def_readonly("key", &StashHandle::key)
      .def_property_readonly("segments", [](const StashHandle& h) { return h.segments; })
      .def_property_readonly("group", [](const StashHandle& h) { return h.group; })
      .def_property_readonly("loaded", [](const StashHandle& h) { return h.loaded; })
      .def_readonly("evicted", &StashHandle::evicted)
      .def_property_readonly("state", [](const StashHandle& h) { return name_of(h.state); })
      .def("add",
           [](StashHandle& h, std::shared_ptr<StashSegment> segment) { h.segments.push_back(std::move(segment)); })
      .def("store", wrapped([](StashHandle& h, const std::shared_ptr<StashCalls>& calls) { h.store(calls); }))
      .def("start_load", wrapped([](StashHandle& h, bool keep) { h.start_load(keep); }), py::arg("keep") = false)
      .def("finish_load", wrapped([](StashHandle& h) { h.finish_load(); }))
      .def("release", wrapped([](StashHandle& h) { h.release(); }))
      .def("evict", wrapped([](StashHandle& h, int64_t low_water) { h.evict(low_water); }));
}

}  // namespace te_torch
