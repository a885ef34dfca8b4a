// One step of a stash: stores, frees and reloads its groups. stash_schedule.h predicts the next entry; Python
// (stash/schedule.py, stash/plan.py) does what happens once a step or only while a step is recorded. Called with the
// GIL held.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "stash/stash_calls.h"
#include "stash/stash_handle.h"
#include "stash/stash_schedule.h"

namespace te_torch {

class StashCore;

// From pre_schedule() to its post_schedule(): the group between them. entry: set by post_schedule().
struct StashScheduleScope {
  std::shared_ptr<StashHandle> handle;
  StashEntry entry;
};

// kScheduled: a step of the schedule. Groups of the others stay in memory. kOutside: forwards without a backward after
// the last entry of a step, such as a validation. kProbe: the run of a probe, with backwards.
enum class StashStepKind : uint8_t { kScheduled, kOutside, kProbe };

// From one reset() to the next. records: its order and sizes are recorded.
class StashStep : public StashHandleOwner, public std::enable_shared_from_this<StashStep> {
 public:
  StashStep(std::weak_ptr<StashCore> core, bool records, StashStepKind kind = StashStepKind::kScheduled)
      : core_(std::move(core)), records_(records), kind_(kind) {}

  void end();  // the next step has started: handles of this one are gone
  std::shared_ptr<StashHandle> new_handle(const pybind11::object& name, int32_t tail);  // of the next microbatch

  std::shared_ptr<StashHandle> open_group(const pybind11::object& name, int32_t tail);
  void close_group(const std::shared_ptr<StashHandle>& handle, bool failed);
  void store(const std::shared_ptr<StashHandle>& handle);  // unless there is no pool yet
  void record_size(const StashHandle& handle);
  void free_leaving();  // frees the originals of the last store

  void restore(StashHandle& handle) override;
  void read_originals(StashHandle& handle) override;
  void release(StashHandle& handle) override;
  void record_operation(StashHandle& handle, bool store) override;  // unless schedulers record the group's entries

  void before_forward();  // frees the originals of the group before: the experts allocate another set after this
  std::shared_ptr<StashScheduleScope> after_forward();
  void before_backward(const StashScheduleScope& scope);
  void load_ahead();                        // starts to load the group whose backward is the next entry
  void discard_scope() { scope_.reset(); }  // its output needs no gradient

  std::shared_ptr<StashCore> core() const { return core_.lock(); }
  std::vector<std::shared_ptr<StashHandle>> handles() const;  // those alive
  std::vector<std::shared_ptr<StashHandle>> scheduled() const;
  bool records() const { return records_; }
  void forget_records();  // continues without recording
  bool in_scope() const { return scope_ != nullptr; }

  bool any_group = false, any_counted = false;  // a group was opened; one of them had a tensor with counted rows
  pybind11::list trace;                         // entries of groups between schedulers, operations of others
  pybind11::dict sizes;                         // of groups, by their keys
  pybind11::list names;                         // of the group of each store

 private:
  struct Hash {
    size_t operator()(const pybind11::object& key) const { return size_t(pybind11::hash(key)); }
  };
  struct Same {
    bool operator()(const pybind11::object& a, const pybind11::object& b) const { return equal(a, b); }
  };
  template <class Value>
  using ByKey = std::unordered_map<pybind11::object, Value, Hash, Same>;

  bool is_current(const StashCore* core) const;
  void keep(StashHandle& handle) const;  // copies nothing; a probe reports whether a step would

  std::weak_ptr<StashCore> core_;
  bool records_;
  StashStepKind kind_;
  std::shared_ptr<StashScheduleScope> scope_;
  std::shared_ptr<StashHandle> opened_, leaving_;  // leaving: stored, its originals are not freed yet
  ByKey<int64_t> microbatches_;
  std::vector<std::weak_ptr<StashHandle>> handles_;
  size_t sweep_at_ = 64;
  ByKey<std::shared_ptr<StashHandle>> scheduled_;
};

// The base of PagedStash: its pool, schedule and steps.
class StashCore : public std::enable_shared_from_this<StashCore> {
 public:
  explicit StashCore(const at::Device& on) : device(on), streams(std::make_shared<StashStreams>(on)) {}
  StashCore(const StashCore&) = delete;
  StashCore& operator=(const StashCore&) = delete;

  std::shared_ptr<StashCalls> ensure_pool();  // null where its size is not known yet
  void check_open(const char* call) const;
  // The step that a call belongs to: the current one, or one outside of the schedule. begins: the call is
  // pre_schedule().
  std::shared_ptr<StashStep> step_of_call(bool begins);

  at::Device device;
  std::shared_ptr<StashStreams> streams;
  std::shared_ptr<StashCalls> calls;
  std::shared_ptr<StashSchedule> schedule;
  pybind11::object python_schedule;    // the same object, of the class that Python derives
  std::shared_ptr<StashStep> step;     // the current one
  std::shared_ptr<StashStep> outside;  // of a probe, or after the end of the schedule
  int64_t probe = 0;                   // number of the probe of `outside`, 0: none
  pybind11::list captured_names;       // of the last step with a captured store: replays have the numbers of its groups
  int64_t low_water = 0;
  bool sized = false;  // the number of pages is known without a recorded step
  bool closed = false;
  const std::shared_ptr<bool> warned_uncounted = std::make_shared<bool>(false);  // see StashTensors
};

// The stashes that this thread has opened groups of and that are alive, the last one first.
std::vector<std::shared_ptr<StashCore>> stashes_used();

}  // namespace te_torch
