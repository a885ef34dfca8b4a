// Kernel wrappers of the activation ops, for other bindings.
#pragma once

#include <transformer_engine/activation.h>

#include "quantize/quantize.h"

namespace te_torch {

// y = act(x) or act(a) * b; params are (limit, alpha, glu_linear_offset) of clamped_swiglu, or empty for the defaults.
Tensor activation_fwd(const Tensor& x, std::string_view kind, at::ArrayRef<double> params);

// (dx, y). y: the recomputed output of the forward with emit, else an empty tensor.
std::tuple<Tensor, Tensor> activation_bwd(const Tensor& dy, const Tensor& x, std::string_view kind,
                                          at::ArrayRef<double> params, bool emit);

// activation_bwd with emit, with y in the memory of a dy that nothing else reads.
std::tuple<Tensor, Tensor> activation_bwd_over_dy(const Tensor& dy, const Tensor& x, std::string_view kind,
                                                  at::ArrayRef<double> params);

// The activation with an FP8 output: the bytes of quantize(activation_fwd(x)), without the intermediate tensor.
Quantized activation_fwd_quantize(const Tensor& x, std::string_view kind, at::ArrayRef<double> params,
                                  const Quantizer& quantizer, QuantizeUsage usage);

// (dx, y) in FP8. dx: by its quantizer; dbias gets its column sums if it is not null. y: the recomputed output of the
// forward in y_directions, with the scale of its earlier quantization (see quantize_again).
std::pair<Quantized, Quantized> activation_bwd_quantize(const Tensor& dy, const Tensor& x, std::string_view kind,
                                                        at::ArrayRef<double> params, const Quantizer& dx_quantizer,
                                                        QuantizeUsage dx_directions, Tensor* dbias,
                                                        const QuantizeSpec& y_spec, const Tensor& y_used_scales,
                                                        QuantizeUsage y_directions);

// With a scale for each row (transformer_engine/activation.h): y[r] = act(x[r]) * scale[r]. scale has x's leading
// dimensions. live: one int32 that counts the rows from the first on that are read and written; rows of y after them
// are undefined.
Tensor scaled_activation_fwd(const Tensor& x, const Tensor& scale, const OptionalTensor& live, std::string_view kind,
                             at::ArrayRef<double> params);
// (dx, dscale, y). dx and y are undefined after the live rows, dscale is 0 there; dscale and y are empty if they are
// not wanted.
std::tuple<Tensor, Tensor, Tensor> scaled_activation_bwd(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                                         const OptionalTensor& live, std::string_view kind,
                                                         at::ArrayRef<double> params, bool needs_dscale, bool emit);
// The same, but dscale is undefined after the live rows too: without the launch that zeroes it.
std::tuple<Tensor, Tensor, Tensor> scaled_activation_bwd_of_live(const Tensor& dy, const Tensor& x, const Tensor& scale,
                                                                 const OptionalTensor& live, std::string_view kind,
                                                                 at::ArrayRef<double> params, bool needs_dscale,
                                                                 bool emit);

// Shared by the files of this binding.
struct ActivationKind {
  int number;
  bool gated;
};
ActivationKind activation_kind(std::string_view name);
te_activation_params activation_params(at::ArrayRef<double> params);
c10::SymDimVector activation_shape(const Tensor& x, bool gated);  // of y
void check_activation_dy(const Tensor& dy, const Tensor& x, bool gated);

}  // namespace te_torch
