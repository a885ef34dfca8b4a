// The position of a step in its schedule: the part of stash/schedule.py that runs for every group. Python handles an
// entry other than the expected one, and orders that number their layers.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

namespace te_torch {

// Python's a == b.
inline bool equal(const pybind11::object& a, const pybind11::object& b) {
  const int found = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (found < 0) throw pybind11::error_already_set();
  return found != 0;
}

// Python functions and classes for steps that are recorded.
struct StashPython {
  pybind11::object entry, operation;  // the tuples of schedule.py
  pybind11::object size_of;           // (segments): the sizes of a group
  pybind11::object evict_farthest;    // (step, calls)
  pybind11::object endless;           // (step): no reset() ends the step that is recorded
};
StashPython& stash_python();

// A group's forward or backward (Entry in schedule.py); key: its name and microbatch.
struct StashEntry {
  explicit StashEntry(pybind11::object of);
  StashEntry() = default;

  bool forward = false;
  pybind11::object entry, name, key;  // null where there is no entry
  int64_t microbatch = 0;
};

class StashSchedule {
 public:
  StashSchedule() = default;
  StashSchedule(const StashSchedule&) = delete;
  StashSchedule& operator=(const StashSchedule&) = delete;

  StashEntry forward(const pybind11::object& name);  // passes the forward of the group's next microbatch
  void backward(const StashEntry& entry);            // passes the backward of a forward entry
  StashEntry next();                                 // empty where the schedule is unknown or at its end
  bool ended() const { return known && entries.size() != 0 && size_t(position) >= entries.size(); }
  void refuse_backward(const pybind11::object& name);  // of a group whose forward came after the schedule had ended
  void begin();                                        // starts a new step

  pybind11::list entries;
  bool known = false, numbered = false;
  int64_t position = 0, at = 0;

 private:
  const StashEntry* expected();  // null where Python has to decide
  pybind11::object self() { return pybind11::cast(this); }
  void advance() { at = ++position; }

  pybind11::dict microbatches_;
  std::vector<StashEntry> fast_;  // the entries, after they are known
};

}  // namespace te_torch
