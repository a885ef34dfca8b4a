// Compares the ranks' calls of collectives over NCCL while they run. A comparison before each collective (agreement.h)
// would take longer than many collectives. A rank writes a fingerprint of each call into a ring in memory that the
// ranks of one machine share. A thread compares the rings; where two differ, it aborts the group's communicators, so
// that no rank waits for ever. No function here waits.
#pragma once

#include <memory>
#include <shared_mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/collective_call.h"

namespace te_torch {

// Records a call of a group whose backend for `type` is NCCL, before the collective. ValueError where the thread has
// found a difference. Does nothing for a group of one rank.
void post_fingerprint(c10d::ProcessGroup& group, c10::DeviceType type, const CollectiveCall& call);

// Ends the comparison: this rank captures a collective of the group, and its replays write no fingerprints, while
// another rank may run the same call in eager mode.
void stop_comparing(c10d::ProcessGroup& group, c10::DeviceType type);

// ValueError where the thread has found a difference. Called after a collective of the group has raised.
void refuse_disagreement(c10d::ProcessGroup& group);

// Held while a collective is enqueued, after post_fingerprint(): the same ValueError, and no communicator is aborted
// meanwhile. After an abort torch would make a new communicator for the collective, and wait.
class EnqueueGuard {
 public:
  explicit EnqueueGuard(c10d::ProcessGroup& group);
  ~EnqueueGuard();
  EnqueueGuard(const EnqueueGuard&) = delete;
  EnqueueGuard& operator=(const EnqueueGuard&) = delete;

 private:
  std::shared_ptr<std::shared_timed_mutex> held_;
};

}  // namespace te_torch
