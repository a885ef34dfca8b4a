// Kernel wrappers of the norms, for other bindings.
#pragma once

#include <array>

#include "core/common.h"
#include "core/probe.h"

namespace te_torch {

// Raises ValueError for arguments that do not fit x.
void check_normalization(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                         const OptionalTensor& beta);

// Of the mean and rstd of x, which have a value for each row of x: for each token if x is a matrix. Of other inputs a
// token may have several, or one token all of them.
inline const SavedInfo& statistic_of(const Tensor& x) {
  static constexpr SavedInfo kRows{kStatistic.name, kStatistic.reason, kStatistic.recompute_cost, true};
  return x.dim() == 2 ? kStatistic : kRows;
}

// gamma or beta for the kernels: in x's dtype, or in float32 for any other dtype.
Tensor parameter_beside(const Tensor& x, const Tensor& parameter);

// (y, h, mean, rstd). With a residual, h = x + residual, rounded, is the norm's input; without one h is an empty
// tensor. mean and rstd are float32 of shape [rows]; mean is empty for RMSNorm.
std::tuple<Tensor, Tensor, Tensor, Tensor> normalization_fwd(const Tensor& x, const OptionalTensor& residual,
                                                             const Tensor& gamma, const OptionalTensor& beta,
                                                             double eps, bool rms, bool zero_centered_gamma);

// (dx, dgamma, dbeta), each an empty tensor if it is not needed. x: the saved norm input, which is h with a residual.
// residual_grad is added to dx before its one rounding. mean is empty for RMSNorm, which has no dbeta.
std::tuple<Tensor, Tensor, Tensor> normalization_bwd(const Tensor& dy, const OptionalTensor& residual_grad,
                                                     const Tensor& x, const Tensor& gamma, const Tensor& mean,
                                                     const Tensor& rstd, bool rms, bool zero_centered_gamma,
                                                     std::array<bool, 3> wanted);

}  // namespace te_torch
