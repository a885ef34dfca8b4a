// The three GEMMs of a linear layer on plain tensors, for every module family.
// - No autograd, norm, activation or FP8 (product.h).
#pragma once

#include "core/common.h"

namespace te_torch {

// Names what does not fit in a product of x, whose operand is `depth` wide. A weight that comes with a quantized copy
// of its own (own_copy) may have another dtype.
void check_product(const Tensor& x, const c10::SymInt& depth, const Tensor& weight, const OptionalTensor& bias,
                   bool own_copy);

// y[..., N] = x[..., K] weight[N, K]^T + bias[N]
Tensor linear_fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);

// dx[..., K] = dy[..., N] weight[N, K]
Tensor linear_dgrad(const Tensor& dy, const Tensor& weight);

// The same of matrices into d, which is contiguous: consecutive rows of a larger result.
void linear_fwd_into(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& d);
void linear_dgrad_into(const Tensor& dy, const Tensor& weight, const Tensor& d);

// dweight[N, K] = dy^T x; dbias[N] = column sums of dy, empty unless `with_bias`. Into: returns dbias alone.
std::tuple<Tensor, Tensor> linear_wgrad(const Tensor& dy, const Tensor& x, bool with_bias);
Tensor linear_wgrad_into(const Tensor& dy, const Tensor& x, bool with_bias, const Tensor& d);

}  // namespace te_torch
