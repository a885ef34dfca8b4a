// Kernel wrappers of the local parts of tensor parallelism, for other bindings. They do not communicate and have no
// derivative.
#pragma once

#include <transformer_engine/comm.h>

#include "core/common.h"

namespace te_torch {

// partials [ranks, ..., cols] -> [..., cols]: the sum in the order of the ranks, in float32, plus bias [cols], rounded
// once. A new contiguous tensor. Registered as te::comm_ordered_sum.
Tensor comm_ordered_sum(const Tensor& partials, const OptionalTensor& bias);

// shards [ranks, rows, m] -> [rows, ranks * m], side by side (transformer_engine/comm.h). uint8: FP8 data as of
// empty_fp8_data, padded with zeros. float32: scales [rows, ranks * m rounded up to 4], padded with zeros; the shards
// are passed without their own padding (narrowed to m). Registered as te::comm_interleave.
Tensor comm_interleave(const Tensor& shards);

}  // namespace te_torch
