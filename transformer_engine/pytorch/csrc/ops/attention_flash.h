// PyTorch's flash attention on a GPU in 16 bits, packed or of a batch.
#pragma once

#include "ops/attention_call.h"

namespace te_torch {

void check_flash_attention(const AttentionCall& call);

AttentionResult flash_attention(const AttentionCall& call);  // without max_logit

// NotImplementedError for a gradient of lse, which the kernel does not take.
AttentionGradients flash_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                            const Tensor& dout, const Tensor& dlse, AttentionWanted wanted);

// Repeats its bits, whether torch's deterministic algorithms are on or not.
AttentionGradients deterministic_flash_attention_backward(const AttentionCall& call, const AttentionResult& result,
                                                          const Tensor& dout, const Tensor& dlse,
                                                          AttentionWanted wanted);

}  // namespace te_torch
