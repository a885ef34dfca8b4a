// One step of a stash: which groups came by, which leaves, which comes back. What a group's tensors are is its own;
// what comes by next is the schedule's. What is done once a step, or only while it is recorded, is Python's
// (stash/step.py). Called with the GIL held.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "stash/stash_calls.h"
#include "stash/stash_schedule.h"

namespace te_torch {

// What Python says for steps that are recorded.
struct StashPython {
  pybind11::object entry, operation;  // schedule.py's tuples
  pybind11::object size_of;           // (pieces): what a group holds
  pybind11::object evict_farthest;    // (step, calls)
  pybind11::object endless;           // (step): it is recorded, and no reset() comes
};
StashPython& stash_python();

// What lies between one pre_schedule and its post_schedule: the group, and its entry from then on.
struct StashVisit {
  std::shared_ptr<StashHandle> handle;
  StashEntry entry;
};

// What a step is for. kAside: none of the schedule's, whose groups stay where they are: what runs behind the last entry
// of a step, as a validation does, and has no backward there; kProbe: the run of a probe, which has one.
enum class StashRun : uint8_t { kStep, kAside, kProbe };

// From one reset() to the next. records: its order and sizes are noted.
class StashStep : public std::enable_shared_from_this<StashStep> {
 public:
  StashStep(std::weak_ptr<StashCore> core, bool records, StashRun run = StashRun::kStep)
      : core_(std::move(core)), records_(records), run_(run) {}
  StashStep(const StashStep&) = delete;
  StashStep& operator=(const StashStep&) = delete;

  void over();  // the next step has started: nothing of this one comes back
  std::shared_ptr<StashHandle> handle(const pybind11::object& name, int32_t tail);  // of the group's next microbatch

  std::shared_ptr<StashHandle> open(const pybind11::object& name, int32_t tail);
  void exit(const std::shared_ptr<StashHandle>& handle, bool failed);
  void start(const std::shared_ptr<StashHandle>& handle);  // the group leaves, if there is anywhere to go yet
  void measure(const StashHandle& handle);
  void note(StashHandle& handle, bool store);  // schedulers note their entries instead
  void free_leaving();                         // what is leaving has left
  void wanted(StashHandle& handle);            // a backward reads it now
  void read(StashHandle& handle);              // or its originals, which are there still
  void dropped(StashHandle& handle);           // nobody wants anything of it any more

  void before_forward();  // here the originals of the group before are freed: the experts now allocate another set
  std::shared_ptr<StashVisit> after_forward();
  void before_backward(const StashVisit& visit);
  void load_ahead();                    // the group whose backward is next starts to come back
  void passes_by() { visit_.reset(); }  // nothing behind the group has a backward

  std::shared_ptr<StashCore> core() const { return core_.lock(); }
  std::vector<std::shared_ptr<StashHandle>> handles() const;  // that are wanted by somebody
  std::vector<std::shared_ptr<StashHandle>> scheduled() const;
  bool records() const { return records_; }
  void forget_records();  // it goes on without being recorded
  bool visits() const { return visit_ != nullptr; }
  StashRun run() const { return run_; }

  bool passed = false, counted = false;  // a group was opened; one of them had something to stash
  pybind11::list trace;                  // of groups between schedulers their entries, of others what they do
  pybind11::dict sizes;                  // of groups, by their keys
  pybind11::list names;                  // of stores, by number

 private:
  struct Hash {
    size_t operator()(const pybind11::object& key) const { return size_t(pybind11::hash(key)); }
  };
  struct Same {
    bool operator()(const pybind11::object& a, const pybind11::object& b) const { return equal(a, b); }
  };
  template <class Value>
  using ByKey = std::unordered_map<pybind11::object, Value, Hash, Same>;

  bool runs(const StashCore* core) const;  // whether it is the one that runs
  void stay(StashHandle& handle) const;    // nothing is copied; a probe is shown what a step would do

  std::weak_ptr<StashCore> core_;
  bool records_;
  StashRun run_;
  std::shared_ptr<StashVisit> visit_;
  std::shared_ptr<StashHandle> opened_, leaving_;  // leaving: its originals are there still
  ByKey<int64_t> microbatches_;
  std::vector<std::weak_ptr<StashHandle>> handles_;
  size_t sweep_at_ = 64;
  ByKey<std::shared_ptr<StashHandle>> scheduled_;
};

// What PagedStash derives: what its steps, groups and schedulers ask of it.
class StashCore : public std::enable_shared_from_this<StashCore> {
 public:
  explicit StashCore(const at::Device& on) : device(on), lanes(std::make_shared<StashLanes>(on)) {}
  StashCore(const StashCore&) = delete;
  StashCore& operator=(const StashCore&) = delete;

  std::shared_ptr<StashCalls> calls_now();  // the pool's, once its size is known
  void check_open(const char* call) const;
  // The step of what is called now: the one that runs, or one aside. begins: a visit of schedulers does.
  std::shared_ptr<StashStep> step_now(bool begins);

  at::Device device;
  std::shared_ptr<StashLanes> lanes;
  std::shared_ptr<StashCalls> calls;
  std::shared_ptr<StashSchedule> schedule;
  pybind11::object python_schedule;  // the same, as Python derives it
  std::shared_ptr<StashStep> step;   // the one that runs
  std::shared_ptr<StashStep> aside;  // beside it
  int64_t probe = 0;                 // whose run `aside` is
  int64_t low_water = 0;
  bool sized = false;     // the number of pages is known before a step was recorded
  bool captured = false;  // a graph has calls on the pool
  bool closed = false;
};

// The stashes of which groups were opened on this thread, the last one first; those that are gone are not among them.
std::vector<std::shared_ptr<StashCore>> stashes_used();

}  // namespace te_torch
