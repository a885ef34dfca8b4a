// comm, kernel wrappers that other bindings call inside their nodes. No autograd, and nobody to talk to, is here.
#pragma once

#include <transformer_engine/comm.h>

#include "common.h"

namespace te_torch {

// partials [ranks, ..., cols] -> [..., cols]: their sum in the order of the ranks, in float32, with bias [cols],
// rounded once. A new, contiguous tensor. Registered as te::comm_ordered_sum.
Tensor comm_ordered_sum(const Tensor& partials, const OptionalTensor& bias);

}  // namespace te_torch
