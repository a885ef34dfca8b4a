// activation, kernel wrappers that other bindings call.
#pragma once

#include "common.h"

namespace te_torch {

// y = act(x) or act(a) * b; params are (limit, alpha, glu_linear_offset) of clamped_swiglu, or empty for the defaults.
Tensor activation_fwd(const Tensor& x, std::string_view kind, at::ArrayRef<double> params);

// (dx, y): y is the forward's output again when emit, else an empty tensor.
std::tuple<Tensor, Tensor> activation_bwd(const Tensor& dy, const Tensor& x, std::string_view kind,
                                          at::ArrayRef<double> params, bool emit);

}  // namespace te_torch
