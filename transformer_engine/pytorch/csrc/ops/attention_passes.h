// The engine's passes around a kernel of attention (transformer_engine/attention.h): checks of packed sequences, the
// law of a sink, zeros of padding.
#pragma once

#include "ops/attention_call.h"

namespace te_torch {

// Lengths and beginnings of packed sequences: ValueError on the CPU; on a GPU the device asserts, and nothing waits.
// pieces: int32 [3 sequences + 1], written, or undefined: for a kernel without padding between sequences.
void check_sequences(const AttentionCall& call, const Tensor& pieces_q = {}, const Tensor& pieces_kv = {});

// [h, t] packed, [b, h, s] of a batch.
std::vector<int64_t> kernel_lse_shape(const AttentionCall& call);

// lse, of the kernel's [h, t] or [b, h, s], in the order of out's rows. Scales out by the sink in place; zeros in
// padding.
Tensor lse_of_kernel(const AttentionCall& call, const Tensor& kernel_lse, const Tensor& out);

struct KernelLse {
  Tensor lse;    // as the kernel's backward takes it
  Tensor dsink;  // undefined unless wanted
};
KernelLse lse_for_kernel(const AttentionCall& call, const AttentionResult& result, const Tensor& dout, bool needs_sink);

// t as fused kernels read memory: 16 bytes at once.
Tensor aligned_for_kernel(const Tensor& t);

// Zeros in the padding of dq, dk and dv, where they are defined.
void zero_padding(const AttentionCall& call, const AttentionGradients& gradients);

// Copies of tensors of a batch, [s, b, heads, width] or with b first, with zeros in the rows after each sequence's
// length. cumulative: int32 [b + 1].
std::vector<Tensor> without_padding(at::TensorList tensors, const Tensor& cumulative, bool batch_first);

}  // namespace te_torch
