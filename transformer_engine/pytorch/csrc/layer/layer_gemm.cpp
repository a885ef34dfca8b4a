// See layer_gemm.h.
#include "layer/layer_gemm.h"

namespace te_torch::layer {

namespace {

// Columns of the result of this pass; none where the weight lacks the direction that the pass reads.
std::optional<int64_t> result_columns(Pass pass, const Operand& weight) {
  const bool fprop = pass == Pass::kFprop;
  if (!weight.quantized()) return weight.plain.size(fprop ? 0 : 1);
  const Tensor& data = fprop ? weight.fp8.rowwise : weight.fp8.columnwise;
  return data.defined() ? std::optional(data.size(0)) : std::nullopt;
}

}  // namespace

PendingResult layer_gemm(const DispatchMode& dispatch, const LayerConfig& config, Pass pass, const Operand& operand,
                         const WeightSet& weights, const Tensor& like, std::unique_ptr<CommOp> comm_op) {
  const GemmPolicy& policy = *config.gemm_policy;
  const ProductQuantization* q = config.quantization.get();
  const bool fprop = pass == Pass::kFprop;
  const bool split = q == nullptr || (fprop ? q->split_fprop : q->split_dgrad);
  int64_t total_rows = 0;
  const auto gemm = [&](const Operand& part, const Rows* rows, const Tensor& shape, const Tensor& into) {
    if (fprop) {
      return into.defined() ? policy.fprop_into(dispatch, part, rows, weights, shape, split, total_rows, into)
                            : policy.fprop(dispatch, part, rows, weights, shape, split);
    }
    return into.defined() ? policy.dgrad_into(dispatch, part, rows, weights, shape, split, total_rows, into)
                          : policy.dgrad(dispatch, part, rows, weights, shape, split);
  };
  const auto plan = [&](CommOp& op) {
    if (!dispatch.direct()) return;
    total_rows = op.rows();
    const auto columns = total_rows > 0 ? result_columns(pass, weights.weights[0]) : std::nullopt;
    if (!columns.has_value()) return op.plan_chunks(std::nullopt);
    const auto tile = policy.takes_runs(pass, op.operand(), total_rows, weights, like, split);
    op.plan_chunks(tile.has_value() ? std::optional(ChunkedResult{*columns, *tile}) : std::nullopt);
  };
  return through(std::move(comm_op), operand, like, gemm, plan);
}

}  // namespace te_torch::layer
