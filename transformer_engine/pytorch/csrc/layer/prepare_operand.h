// Prepares the operand of a layer's GEMMs: decides when it is quantized, and by which quantizer.
// - The GEMM of this pass reads `for_gemm`; what a later product reads is `for_backward()`.
// - An operand is quantized before its gather over ranks (by its producer, if that can), with a scale shared by all
//   ranks, or after the gather; with several weights, each group of rows by itself.
#pragma once

#include <c10/util/FunctionRef.h>

#include "layer/layer.h"

namespace te_torch::layer {

struct PreparedOperand {
  Operand for_gemm;
  Operand high_precision;                   // before it was quantized, where the backward reads that; else undefined
  const Quantizer* after_gather = nullptr;  // quantizes what a TPComm gathers of for_gemm; null: it stays as it is

  const Operand& for_backward() const { return high_precision.defined() ? high_precision : for_gemm; }
};

struct OperandRequest {
  Pass pass;
  const Quantizer* quantizer;  // null: the operand is not quantized
  QuantizeUsage usage;
  bool keep_high_precision;
  Tensor* column_sums;  // of a gradient that is quantized: receives its column sums; null: they are not wanted
};

// produce(quantizer) returns the operand, quantized if the quantizer is not null. like: what it is made of.
PreparedOperand prepare_operand(const DispatchMode& dispatch, const LayerConfig& config, const OperandRequest& request,
                                const Tensor& like, c10::function_ref<Operand(const Quantizer*)> produce);

// How a backward recomputes the forward's operand, to the same bits.
struct OperandRecompute {
  const Quantizer* in_prologue = nullptr;  // applied by the prologue as it recomputes the operand columnwise
  const Quantizer* afterwards = nullptr;   // applied to the prologue's values; null: these stay as they are
};

OperandRecompute plan_recompute(const DispatchMode& dispatch, const LayerConfig& config, const Tensor& input);

// operand: what the prologue recomputed. used_scales: those of the forward's operand.
Operand finish_recompute(const DispatchMode& dispatch, const LayerConfig& config, const OperandRecompute& plan,
                         Operand operand, at::TensorList used_scales);

}  // namespace te_torch::layer
