// activation, kernel wrappers that other bindings call.
#pragma once

#include <transformer_engine/activation.h>

#include "quantize/quantize.h"

namespace te_torch {

// y = act(x) or act(a) * b; params are (limit, alpha, glu_linear_offset) of clamped_swiglu, or empty for the defaults.
Tensor activation_fwd(const Tensor& x, std::string_view kind, at::ArrayRef<double> params);

// (dx, y): y is the forward's output again when emit, else an empty tensor.
std::tuple<Tensor, Tensor> activation_bwd(const Tensor& dy, const Tensor& x, std::string_view kind,
                                          at::ArrayRef<double> params, bool emit);

// The activation straight to FP8: the bytes of quantize(activation_fwd(x)), without the tensor between them.
Quantized activation_fwd_quantize(const Tensor& x, std::string_view kind, at::ArrayRef<double> params,
                                  const Quantizer& quantizer, QuantizeUsage usage);

// (dx, y) in FP8: dx by its quantizer, with the sums of its columns where dbias is not NULL; y, the forward's output
// again, by the scale it was quantized with before (see quantize_again), where y_directions want it.
std::pair<Quantized, Quantized> activation_bwd_quantize(const Tensor& dy, const Tensor& x, std::string_view kind,
                                                        at::ArrayRef<double> params, const Quantizer& dx_quantizer,
                                                        QuantizeUsage dx_directions, Tensor* dbias,
                                                        const QuantizeSpec& y_spec, const Tensor& y_used_scales,
                                                        QuantizeUsage y_directions);

// What the files of this binding share.
struct ActivationKind {
  int number;
  bool gated;
};
ActivationKind activation_kind(std::string_view name);
te_activation_params activation_params(at::ArrayRef<double> params);
c10::SymDimVector activation_shape(const Tensor& x, bool gated);  // of y
void check_activation_dy(const Tensor& dy, const Tensor& x, bool gated);

}  // namespace te_torch
