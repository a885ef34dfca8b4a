// normalization, kernel wrappers that other bindings call.
#pragma once

#include <array>

#include "core/common.h"

namespace te_torch {

// Names what does not fit x.
void check_normalization(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                         const OptionalTensor& beta);

// gamma or beta as kernels read it: in x's dtype or in float32, to which another 16-bit type is widened.
Tensor parameter_beside(const Tensor& x, const Tensor& parameter);

// (y, h, mean, rstd). h = x + residual, rounded, and the norm is taken of it; without a residual h is an empty tensor.
// mean and rstd are float32 of shape [rows]; mean is empty for RMSNorm.
std::tuple<Tensor, Tensor, Tensor, Tensor> normalization_fwd(const Tensor& x, const OptionalTensor& residual,
                                                             const Tensor& gamma, const OptionalTensor& beta,
                                                             double eps, bool rms, bool zero_centered_gamma);

// (dx, dgamma, dbeta), each an empty tensor where it is not wanted, from the saved norm input x (h where there was a
// residual); residual_grad is added to dx before its one rounding. mean is empty for RMSNorm, which has no dbeta.
std::tuple<Tensor, Tensor, Tensor> normalization_bwd(const Tensor& dy, const OptionalTensor& residual_grad,
                                                     const Tensor& x, const Tensor& gamma, const Tensor& mean,
                                                     const Tensor& rstd, bool rms, bool zero_centered_gamma,
                                                     std::array<bool, 3> wanted);

}  // namespace te_torch
