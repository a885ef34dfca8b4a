// Compares the ranks' calls of a collective before it starts, over gloo: there a rank with another call ends the other
// processes, or hangs them. All comparisons have one form, so that ranks in different places of a program get an error.
// Over NCCL the calls are compared while they run (fingerprints.h).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string_view>
#include <vector>

#include "distributed/collective_call.h"

namespace te_torch {

// The calls of all ranks, in their order. Waits for all of them. ValueError where an error has ended the call of
// another rank.
std::vector<CollectiveCall> gather_calls(c10d::ProcessGroup& group, const CollectiveCall& mine);

// Raises the same ValueError on every rank where tensors or operations differ. Over NCCL it is raised by the group's
// next call, and the group's running collectives are aborted. RuntimeError where gloo would be captured in a graph.
void check_agreement(c10d::ProcessGroup& group, const Tensor& t, const char* op);

// Guards the part of an operation before its first collective of `group`, whose tensor is t: where an error ends it,
// the other ranks, which wait for this one, get a ValueError. An empty name: there are no other ranks.
class RankErrorGuard {
 public:
  RankErrorGuard(std::string_view group, const Tensor& t, const char* op);
  ~RankErrorGuard();
  RankErrorGuard(const RankErrorGuard&) = delete;
  RankErrorGuard& operator=(const RankErrorGuard&) = delete;

 private:
  std::string_view group_;
  const Tensor& t_;
  const char* op_;
  int errors_;
  uint64_t comparisons_;  // of this thread, before the guarded part
};

}  // namespace te_torch
