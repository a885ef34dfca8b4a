// Where a step is in its schedule: the part of stash/schedule.py that every group of a step asks. An entry that is not
// what comes next, and orders that number their layers, are Python's.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace te_torch {

// a == b, of Python.
inline bool equal(const pybind11::object& a, const pybind11::object& b) {
  const int found = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (found < 0) throw pybind11::error_already_set();
  return found != 0;
}

// A group's forward or backward (schedule.py's Entry); key: its name and microbatch.
struct StashEntry {
  explicit StashEntry(pybind11::object of);
  StashEntry() = default;

  bool forward = false;
  pybind11::object entry, name, key;  // entry: null where there is none
  int64_t microbatch = 0;
};

class StashSchedule {
 public:
  StashSchedule() = default;
  StashSchedule(const StashSchedule&) = delete;
  StashSchedule& operator=(const StashSchedule&) = delete;

  StashEntry forward(const pybind11::object& name);  // the next microbatch of that group comes by
  void backward(const StashEntry& entry);            // of what this was the forward of
  StashEntry next();                                 // none: not known, or nothing
  bool over() const { return known && entries.size() != 0 && size_t(position) >= entries.size(); }
  void refuse_backward(const pybind11::object& name);  // of a group whose forward came when it was over
  void begin();                                        // a new step

  pybind11::list entries;
  bool known = false, numbered = false;
  int64_t position = 0, at = 0;

 private:
  const StashEntry* expected();  // null: Python is asked
  pybind11::object self() { return pybind11::cast(this); }
  void passed() { at = ++position; }

  pybind11::dict microbatches_;
  std::vector<StashEntry> fast_;  // the entries, once they are known
};

}  // namespace te_torch
