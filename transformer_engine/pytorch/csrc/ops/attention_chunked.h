// Attention in blocks of queries x keys, on any device, for what no fused kernel takes: sinks, caps, packed sequences,
// float64, biases with gradients. Scores are in float32 (float64 for float64), never more than one block of them.
#pragma once

#include "ops/attention_call.h"

namespace te_torch {

AttentionResult chunked_attention(const AttentionCall& call);

// The gradients that are wanted; the backward computes the scores again. dlse: of lse, or undefined.
AttentionGradients chunked_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                              const Tensor& dout, const Tensor& dlse, AttentionWanted wanted);

}  // namespace te_torch
