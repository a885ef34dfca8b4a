// PyTorch's flash attention for packed sequences on a GPU, in 16 bits.
#pragma once

#include "ops/attention_call.h"

namespace te_torch {

void check_flash_attention(const AttentionCall& call);

AttentionResult flash_attention(const AttentionCall& call);  // without max_logit

// NotImplementedError for a gradient of lse, which the kernel does not take.
AttentionGradients flash_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                            const Tensor& dout, const Tensor& dlse, AttentionWanted wanted);

}  // namespace te_torch
