// What the ranks of a group over NCCL do, compared while they do it. A question before each collective, as gloo's ranks
// ask it (agreement.h), takes longer than many a collective there. So a rank writes a fingerprint of each into a ring
// that the ranks of one machine share, and goes on; a thread compares the rings, and where two differ it aborts the
// group's communicators, which ends what the ranks wait for. Nothing waits here, so a capture may write one too.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "agreement.h"

namespace te_torch {

// Before the collective that `said` describes. ValueError where the group's ranks were found to differ. Nothing where
// the group's backend for `type` is not NCCL, or it has one rank.
void post_fingerprint(c10d::ProcessGroup& group, c10::DeviceType type, const Said& said);

// The same error where they were; for who has seen a collective of the group raise.
void refuse_disagreement(c10d::ProcessGroup& group);

}  // namespace te_torch
