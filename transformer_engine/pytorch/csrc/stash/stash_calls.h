// One pool on one device, and the order of its calls: which point a store, a load or a drop runs behind. Sizes, when
// something is stashed and what of it comes back are the step's (stash_step.h).
#pragma once

#include <memory>
#include <string>

#include "stash/stash_lanes.h"
#include "stash/stash_pool.h"

namespace te_torch {

// Loads and drops count as loads.
class StashCalls {
 public:
  StashCalls(std::shared_ptr<StashPool> native, std::shared_ptr<StashLanes> lanes)
      : native_(std::move(native)), lanes_(std::move(lanes)), started_(lanes_->now("started")) {}

  const std::shared_ptr<StashPool>& native() const { return native_; }
  StashLanes& lanes() const { return *lanes_; }

  // Starts to copy the regions of its pieces, of which counter * unit_rows rows are alive, behind what the current
  // stream has been given. They stay as they are until its point.
  void store(StashHandle& handle);
  // Starts to copy them back, into the memory of its pieces, which the current stream may have used before.
  void load(StashHandle& handle, bool keep);
  StashPointPtr drop(const StashHandle& handle);  // its pages are given back unread
  // Its pages move to the host where few are free: behind every call before it, before those behind it.
  void evict(const StashHandle& handle, int64_t low_water);

  void join() const;                   // the current stream waits for everything so far
  void end_capture() const;            // before a capture ends behind which others come
  void report(const Tensor& mailbox);  // that of everything so far is in the mailbox. Waits for the device.
  void reset(const Tensor& mailbox);   // the next step starts; the report of this one goes to the mailbox

 private:
  StashPointPtr behind_store(const StashWork& work, const StashHandle& handle, const char* verb);
  StashWork work_of(const StashHandle& handle, std::function<void(te_stream)> start) const;

  std::shared_ptr<StashPool> native_;
  std::shared_ptr<StashLanes> lanes_;
  StashPointPtr started_, stored_, loaded_;
  int64_t stored_groups_ = 0;  // since the last reset
  bool evicted_ = false;       // the last call that gave pages back was an evict, whether it has run or not
};

}  // namespace te_torch
