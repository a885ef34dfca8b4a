// PyTorch's kernels for batches alone, on a GPU: cuDNN's in 16 bits, and the memory-efficient one in 16 and 32 bits.
// Causal from the top left or without a mask.
#pragma once

#include "ops/attention_call.h"

namespace te_torch {

void check_cudnn_attention(const AttentionCall& call);
void check_efficient_attention(const AttentionCall& call);

// Without max_logit.
AttentionResult cudnn_attention(const AttentionCall& call);
AttentionResult efficient_attention(const AttentionCall& call);

// NotImplementedError for a gradient of lse, which the kernels do not take.
AttentionGradients cudnn_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                            const Tensor& dout, const Tensor& dlse, AttentionWanted wanted);
AttentionGradients efficient_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                                const Tensor& dout, const Tensor& dlse, AttentionWanted wanted);

}  // namespace te_torch
