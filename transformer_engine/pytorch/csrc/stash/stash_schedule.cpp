// See stash_schedule.h.
#include "stash/stash_schedule.h"

#include <torch/csrc/Exceptions.h>

#include <utility>

namespace te_torch {

namespace py = pybind11;

StashPython& stash_python() {
  static auto* const python = new StashPython();  // never destroyed: the interpreter may end first
  return *python;
}

StashEntry::StashEntry(py::object of) : entry(std::move(of)) {
  const auto fields = py::reinterpret_borrow<py::tuple>(entry);
  forward = py::cast<bool>(fields[0]);
  name = fields[1];
  microbatch = py::cast<int64_t>(fields[2]);
  key = py::make_tuple(name, fields[2]);
}

const StashEntry* StashSchedule::expected() {
  if (!known || numbered) return nullptr;
  if (fast_.size() != entries.size()) {
    fast_.clear();
    for (const auto& entry : entries) fast_.emplace_back(py::reinterpret_borrow<py::object>(entry));
  }
  return size_t(position) < fast_.size() ? &fast_[size_t(position)] : nullptr;
}

StashEntry StashSchedule::forward(const py::object& name) {
  PyObject* before = PyDict_GetItemWithError(microbatches_.ptr(), name.ptr());
  if (before == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  const int64_t number = before == nullptr ? 0 : py::cast<int64_t>(py::handle(before));
  const StashEntry* wanted = expected();
  StashEntry found;
  if (wanted != nullptr && wanted->forward && wanted->microbatch == number && equal(wanted->name, name)) {
    found = *wanted;
    advance();
  } else {
    found = StashEntry(stash_python().entry(true, name, number));
    self().attr("_pass")(found.entry);
  }
  microbatches_[name] = number + 1;
  return found;
}

void StashSchedule::backward(const StashEntry& entry) {
  const StashEntry* wanted = expected();
  if (wanted != nullptr && !wanted->forward && wanted->microbatch == entry.microbatch &&
      equal(wanted->name, entry.name)) {
    return advance();
  }
  self().attr("_pass")(entry.entry.attr("turned"));
}

void StashSchedule::refuse_backward(const py::object& name) {
  PyObject* before = PyDict_GetItemWithError(microbatches_.ptr(), name.ptr());
  if (before == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  const int64_t number = before == nullptr ? 0 : py::cast<int64_t>(py::handle(before));
  self().attr("_pass")(stash_python().entry(false, name, number));
}

StashEntry StashSchedule::next() {
  if (!known) return {};
  if (!numbered) {
    const StashEntry* found = expected();
    return found == nullptr ? StashEntry() : *found;
  }
  py::object found = self().attr("next");
  return found.is_none() ? StashEntry() : StashEntry(std::move(found));
}

void StashSchedule::begin() {
  position = 0;
  microbatches_ = py::dict();
}

void register_stash_schedule(py::module_& m) {
  py::class_<StashSchedule, std::shared_ptr<StashSchedule>>(m, "StashSchedule")
      .def(py::init<>())
      .def_readwrite("entries", &StashSchedule::entries)
      .def_readwrite("known", &StashSchedule::known)
      .def_readwrite("numbered", &StashSchedule::numbered)
      .def_readwrite("position", &StashSchedule::position)
      .def_readwrite("_at", &StashSchedule::at)
      .def("begin", &StashSchedule::begin);
  m.def("set_stash_python",
        [](py::object entry, py::object operation, py::object size_of, py::object evict_farthest, py::object endless) {
          stash_python() = {std::move(entry), std::move(operation), std::move(size_of), std::move(evict_farthest),
                            std::move(endless)};
        });
}

}  // namespace te_torch
