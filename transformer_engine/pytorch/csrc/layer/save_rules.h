// The tensors that a layer's forward saves for its backward: one table of tensors, conditions, and whether each is
// kept.
#pragma once

#include "layer/layer.h"

namespace te_torch::layer {

// The values of a forward that the table reads.
struct LayerSaves {
  const LayerConfig& config;
  size_t layer_idx;
  const LayerInput& in;
  const PrologueOutput& prologue;
  const OwnSaves& epilogue;
  const Operand& operand;   // as the backward reads it
  const Operand& gathered;  // with all ranks' rows, where that is kept in place of the operand; else undefined
  at::ArrayRef<Operand> weights;
  const WantedGradients& wanted;
};

void save_layer(const DispatchMode& dispatch, SaveContext& save, const LayerSaves& saves, SaveFor save_for);

inline constexpr SavedInfo kGatheredInput{"gathered input", "the weight's gradient is taken with all ranks' rows",
                                          "gathering it again; tp_recompute_allgather=False keeps it"};

// Whether the backward reads operands as they were before they were quantized.
inline bool reads_high_precision(const ProductQuantization* q) {
  return backward_reads(q) == BackwardReads::kHighPrecision;
}

// The text where the reason is a recipe's backward_override.
SavedInfo saved_info(SavedInfo info, const ProductQuantization* q);

// Reports an operand that the backward recomputes. like: has the dtype of its values.
void report_recomputed(const SaveContext& save, const Operand& operand, const ProductQuantization* q,
                       const Tensor& like, const SavedInfo& info);

}  // namespace te_torch::layer
