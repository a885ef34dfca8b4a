// See prepare_operand.h.
#include "layer/prepare_operand.h"

namespace te_torch::layer {

namespace {

QuantizeAt quantize_at(const DispatchMode& dispatch, const LayerConfig& config, Pass pass, const Quantizer* quantizer,
                       const Tensor& like) {
  if (config.tp_comm == nullptr) return QuantizeAt::kBeforeGather;
  return config.tp_comm->quantize_at(dispatch, pass, quantizer, like);
}

}  // namespace

PreparedOperand prepare_operand(const DispatchMode& dispatch, const LayerConfig& config, const OperandRequest& request,
                                const Tensor& like, c10::function_ref<Operand(const Quantizer*)> produce) {
  const ProductQuantization* q = config.quantization.get();
  const Quantizer* quantizer = request.quantizer;
  const QuantizeAt when = quantize_at(dispatch, config, request.pass, quantizer, like);
  const bool by_groups = config.gemm_policy->quantizes_groups(q);
  const bool in_producer = when == QuantizeAt::kBeforeGather && !by_groups && !request.keep_high_precision;
  PreparedOperand prepared{produce(in_producer ? quantizer : nullptr), {}, nullptr};
  Operand& operand = prepared.for_gemm;
  if (operand.row_map.defined() && (!by_groups || request.keep_high_precision)) {
    operand = {gathered_rows(dispatch, operand), {}};
  }
  if (in_producer) return prepared;
  if (request.keep_high_precision) prepared.high_precision = operand;
  if (by_groups) {
    operand = config.gemm_policy->quantized_groups(dispatch, request.pass, Operand(operand), request.usage,
                                                   request.column_sums);
    return prepared;
  }
  if (when == QuantizeAt::kBeforeGather) {
    operand = operand_of(dispatch, quantizer, operand.plain, request.usage);
    return prepared;
  }
  if (request.column_sums != nullptr) {  // of this rank's rows alone, in the order of any other quantizer
    operand_of(dispatch, gradient_quantizer(q, {}), operand.plain, {}, request.column_sums);
  }
  if (when == QuantizeAt::kWithSharedAmax) {
    operand = config.tp_comm->quantized(*quantizer, operand.plain, request.usage);
  } else {
    prepared.after_gather = quantizer;
  }
  return prepared;
}

OperandRecompute plan_recompute(const DispatchMode& dispatch, const LayerConfig& config, const Tensor& input) {
  const ProductQuantization* q = config.quantization.get();
  const BackwardReads reads = backward_reads(q);
  if (q == nullptr || reads == BackwardReads::kHighPrecision) return {};
  if (config.gemm_policy->quantizes_groups(q)) return {nullptr, &q->x};
  if (quantize_at(dispatch, config, Pass::kFprop, &q->x, input) == QuantizeAt::kAfterGather) return {};
  return reads == BackwardReads::kQuantized ? OperandRecompute{&q->x, nullptr} : OperandRecompute{nullptr, &q->x};
}

Operand finish_recompute(const DispatchMode& dispatch, const LayerConfig& config, const OperandRecompute& plan,
                         Operand operand, at::TensorList used_scales) {
  if (plan.afterwards == nullptr) {
    if (operand.row_map.defined()) operand = {gathered_rows(dispatch, operand), {}};
    return operand;
  }
  const ProductQuantization* q = config.quantization.get();
  if (config.gemm_policy->quantizes_groups(q)) {
    return config.gemm_policy->quantized_again(dispatch, operand, kept_usage(q), used_scales);
  }
  const Tensor scales = used_scales.empty() ? Tensor() : used_scales[0];
  return recomputed_operand(dispatch, plan.afterwards, scales, gathered_rows(dispatch, operand), kept_usage(q));
}

}  // namespace te_torch::layer
