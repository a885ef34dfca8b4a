// linear_core: the three products of a linear layer, written once for every module family. It knows nothing of autograd
// or of norms and activations; gather, quantize and reduce steps belong here when their capabilities land.
#pragma once

#include "common.h"

namespace te_torch {

// y[..., N] = x[..., K] weight[N, K]^T + bias[N]
Tensor linear_fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

// dx[..., K] = dy[..., N] weight[N, K]
Tensor linear_dgrad(const Tensor& dy, const Tensor& weight);

// dweight[N, K] = dy^T x; dbias[N] = column sums of dy, empty unless asked for.
std::tuple<Tensor, Tensor> linear_wgrad(const Tensor& dy, const Tensor& x, bool with_bias);

}  // namespace te_torch
