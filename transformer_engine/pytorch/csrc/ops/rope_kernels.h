// rope, kernel wrappers and Meta functions: checks, views as the engine takes them. No formula is repeated here, and no
// gradient of the angles is made.
#pragma once

#include <tuple>
#include <vector>

#include "core/common.h"

namespace te_torch {

using Tensors = std::vector<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// q, and k if there is one, rotated: forward, or the gradients when `backward`. New, contiguous tensors.
Tensors rope_fwd(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                 bool batch_first, bool interleaved, bool backward);
Tensors rope_fwd_meta(const Tensor& q, const OptionalTensor& k, const Tensor& freqs, const OptionalTensor& start,
                      bool batch_first, bool, bool);

// The parts of a packed tensor, q and k rotated and v copied.
Three rope_qkv_fwd(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
                   at::IntArrayRef heads, bool batch_first, bool interleaved);
Three rope_qkv_fwd_meta(const Tensor& qkv, const Tensor& q_freqs, const OptionalTensor& k_freqs,
                        const OptionalTensor& start, at::IntArrayRef heads, bool batch_first, bool);

// The gradient of the packed tensor, written once. A part whose gradient is absent becomes zero.
Tensor rope_qkv_bwd(const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv, const Tensor& q_freqs,
                    const OptionalTensor& k_freqs, const OptionalTensor& start, at::IntArrayRef heads, bool batch_first,
                    bool interleaved);
Tensor rope_qkv_bwd_meta(const OptionalTensor& dq, const OptionalTensor& dk, const OptionalTensor& dv,
                         const Tensor& q_freqs, const OptionalTensor& k_freqs, const OptionalTensor& start,
                         at::IntArrayRef heads, bool batch_first, bool);

}  // namespace te_torch
