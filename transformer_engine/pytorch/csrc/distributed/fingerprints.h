// What the ranks of a group over NCCL do, compared while they do it. A question before each collective, as gloo's ranks
// ask it (agreement.h), takes longer than many a collective there. So a rank writes a fingerprint of each into a ring
// that the ranks of one machine share, and goes on; a thread compares the rings, and where two differ it aborts the
// group's communicators, which ends what the ranks wait for. Nothing waits here.
#pragma once

#include <memory>
#include <shared_mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/agreement.h"

namespace te_torch {

// Before the collective that `said` describes, of a group whose backend for `type` is NCCL, which the caller knows.
// ValueError where the group's ranks were found to differ. Nothing where it has one rank.
void post_fingerprint(c10d::ProcessGroup& group, c10::DeviceType type, const Said& said);

// From here on the ranks are not compared: one has a graph with a collective of the group, of whose replays its ring
// says nothing, and another may run the same call in eager mode.
void stop_comparing(c10d::ProcessGroup& group, c10::DeviceType type);

// The same error where they were; for who has seen a collective of the group raise.
void refuse_disagreement(c10d::ProcessGroup& group);

// While a collective is handed to the group, behind its post: the same error where the ranks were found to differ, and
// no communicator is aborted meanwhile. Torch would make a new one for a collective that comes behind an abort, and
// wait.
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
