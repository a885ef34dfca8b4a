// The calls on one pool, in their order, and the events that each store, load or drop waits for. stash_step.h decides
// what is stashed and when it is loaded.
#pragma once

#include <memory>
#include <string>

#include "stash/stash_pool.h"
#include "stash/stash_streams.h"

namespace te_torch {

// The segments of one group, and its calls on a pool so far.
struct StashCopy {
  StashCopy(pybind11::object group_name, int32_t rest) : name(std::move(group_name)), tail(rest) {}

  pybind11::object name;
  int32_t tail;
  StashSegments segments;
  std::shared_ptr<StashGroup> group;
  StashEventPtr stored, loaded;
};

// Loads and drops count as loads.
class StashCalls {
 public:
  StashCalls(std::shared_ptr<StashPool> native, std::shared_ptr<StashStreams> streams)
      : native_(std::move(native)), streams_(std::move(streams)), started_(streams_->now("started")) {}

  const std::shared_ptr<StashPool>& native() const { return native_; }
  StashStreams& streams() const { return *streams_; }

  // Starts to copy the regions of the segments, counter * unit_rows live rows of each, after the work of the current
  // stream so far. The segments must not change before `stored`.
  void store(StashCopy& copy);
  // Starts to copy them back into the memory of the segments, which the current stream may have used before.
  void load(StashCopy& copy, bool keep);
  StashEventPtr drop(const StashCopy& copy);  // gives the pages back unread
  // Moves the pages to the host where fewer than low_water are free: after every call before it, before every later
  // one.
  void evict(const StashCopy& copy, int64_t low_water);

  void join() const;                   // the current stream waits for all calls so far
  void report(const Tensor& mailbox);  // writes the report of all calls so far to the mailbox. Waits for the device.
  void reset(const Tensor& mailbox);   // starts the next step; the report of this one goes to the mailbox

  bool captured = false;  // a graph holds the pool's addresses

 private:
  StashEventPtr after_store(const StashWork& work, const StashCopy& copy, const char* verb);
  StashWork work_of(const StashCopy& copy, std::function<void(te_stream)> start) const;
  void note_captured(const StashEventPtr& event) { captured |= event->capture != 0; }

  std::shared_ptr<StashPool> native_;
  std::shared_ptr<StashStreams> streams_;
  StashEventPtr started_, stored_, loaded_;
  int64_t stored_groups_ = 0;  // since the last reset
  bool evicted_ = false;       // the last call that gives pages back was an evict, whether it has run or not
};

}  // namespace te_torch
