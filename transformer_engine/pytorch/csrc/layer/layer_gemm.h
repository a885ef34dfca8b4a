// One GEMM of a layer, of the forward or of the input's gradient, over the rows that a TPComm hands over.
#pragma once

#include "layer/layer.h"

namespace te_torch::layer {

// comm_op: null: this process has all rows. The result has the leading dimensions and the dtype of `like`.
PendingResult layer_gemm(const DispatchMode& dispatch, const LayerConfig& config, Pass pass, const Operand& operand,
                         const WeightSet& weights, const Tensor& like, std::unique_ptr<CommOp> comm_op);

}  // namespace te_torch::layer
