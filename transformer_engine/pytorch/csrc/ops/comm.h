// comm, kernel wrappers that other bindings call inside their nodes. No autograd, and nobody to talk to, is here.
#pragma once

#include <transformer_engine/comm.h>

#include "core/common.h"

namespace te_torch {

// partials [ranks, ..., cols] -> [..., cols]: their sum in the order of the ranks, in float32, with bias [cols],
// rounded once. A new, contiguous tensor. Registered as te::comm_ordered_sum.
Tensor comm_ordered_sum(const Tensor& partials, const OptionalTensor& bias);

// shards [ranks, rows, m] -> [rows, ranks * m], side by side; what is what in transformer_engine/comm.h. uint8: FP8
// data as of empty_fp8_data, zeros behind them. float32: scales [rows, ranks * m rounded up to 4], zeros behind them;
// the shards without their own padding (narrow them to m). Registered as te::comm_interleave.
Tensor comm_interleave(const Tensor& shards);

}  // namespace te_torch
