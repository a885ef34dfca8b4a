// A stashed group from its store to its reload: its segments and their state. A handle has its owner as an interface
// alone; stash_step.h decides when each method runs.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "saved_hooks/saved_tensor_hooks.h"
#include "stash/stash_calls.h"

namespace te_torch {

class StashHandle;

// The step that a handle was made in.
class StashHandleOwner {
 public:
  StashHandleOwner() = default;
  virtual ~StashHandleOwner() = default;
  StashHandleOwner(const StashHandleOwner&) = delete;
  StashHandleOwner& operator=(const StashHandleOwner&) = delete;

  virtual void restore(StashHandle& handle) = 0;         // a backward needs its tensors now
  virtual void read_originals(StashHandle& handle) = 0;  // a backward reads originals that were not freed yet
  virtual void release(StashHandle& handle) = 0;         // its last reference is gone
  virtual void record_operation(StashHandle& handle, bool store) = 0;  // a store or a load, for the plan
};

// kKept: nothing was copied. kStored: the copy was started, the originals are not freed yet. kAway: the originals are
// freed. kComing: the copy back was started. kBack: the tensors can be read again. kGone: the pages were given back.
enum class StashState : uint8_t { kKept, kStored, kAway, kComing, kBack, kGone };
const char* name_of(StashState state);

class StashHandle : public StashCopy {
 public:
  // stash: identity of the stash that made it.
  StashHandle(pybind11::object group_name, pybind11::object group_key, int32_t rest,
              std::weak_ptr<StashHandleOwner> made_in, std::weak_ptr<const void> made_by)
      : StashCopy(std::move(group_name), rest),
        key(std::move(group_key)),
        owner(std::move(made_in)),
        stash(std::move(made_by)) {}
  ~StashHandle();  // of PagedStash.stash(): gives its pages back. Groups are released by their tensors.
  StashHandle(const StashHandle&) = delete;
  StashHandle& operator=(const StashHandle&) = delete;

  void store(const std::shared_ptr<StashCalls>& calls);  // starts the copy, after the work of the current stream
  void free_originals();               // the current stream waits for the copy; the originals are freed
  void start_load(bool keep = false);  // starts the copy back into new memory
  void finish_load();                  // the current stream waits for the copy back
  void cancel();                       // the originals are read before they were freed: gives the pages back unread
  void evict(int64_t low_water);       // moves the pages to the host where fewer than low_water are free
  void detach_buffers();               // the loaded memory belongs to the caller
  void release();                      // waits for copies that are under way and gives the pages back
  void finish();                       // drops everything; the pool has no pages of it any more
  std::runtime_error gone_error(const std::string& reader) const;

  pybind11::object key;  // the name and the microbatch
  std::weak_ptr<StashHandleOwner> owner;
  std::weak_ptr<const void> stash;
  StashState state = StashState::kKept;
  bool scheduled = false, evicted = false, traced = false;
  bool leaves_in_step = false;                       // the group of a probe stays; a step would stash it
  std::vector<std::weak_ptr<PackedStorage>> packed;  // to release when the originals are freed
  std::optional<std::vector<std::pair<at::ScalarType, std::vector<int64_t>>>> like;  // dtypes and shapes of stash()

 private:
  bool has_regions();           // removes segments without memory; whether a region is left
  void check_counters() const;  // raises where one was changed in place since the region was made

  std::shared_ptr<StashCalls> calls_;
};

}  // namespace te_torch
