// Kernel wrappers and Meta functions of rotary embeddings: checks and views for the engine. The angles get no gradient.
#pragma once

#include <tuple>
#include <vector>

#include "core/common.h"

namespace te_torch {

using Tensors = std::vector<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// Rotates q and, if given, k; with `backward` their gradients, in the other direction. New contiguous tensors.
Tensors rope_fwd(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                 bool batch_first, bool interleaved, bool backward);
Tensors rope_fwd_meta(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                      bool batch_first, bool, bool);

// The parts of a packed tensor: rotated q and k, and a copy of v.
Three rope_qkv_fwd(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
                   at::IntArrayRef heads, bool batch_first, bool interleaved);
Three rope_qkv_fwd_meta(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs,
                        const OptionalTensor& start, at::IntArrayRef heads, bool batch_first, bool);

// The gradient of the packed tensor in one write. A part without a gradient becomes zero.
Tensor rope_qkv_bwd(const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv, const Tensor& q_freqs,
                    const OptionalTensor& k_freqs, const OptionalTensor& start, at::IntArrayRef heads, bool batch_first,
                    bool interleaved);
Tensor rope_qkv_bwd_meta(const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv,
                         const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
                         at::IntArrayRef heads, bool batch_first, bool);

}  // namespace te_torch
