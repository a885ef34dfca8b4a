// Kernel wrappers of norms with an FP8 output, for other bindings.
#pragma once

#include "quantize/quantize.h"

namespace te_torch {

struct QuantizedNorm {
  Quantized quantized;
  Tensor y;           // undefined unless with_output
  Tensor h;           // x + residual, rounded; an empty tensor without a residual
  Tensor mean, rstd;  // float32 [rows]; mean is empty for RMSNorm
};

// The bytes of normalization_fwd followed by quantize. y itself is written only with with_output, or for a quantizer
// written in Python. The leading dimensions of x are folded into rows.
QuantizedNorm normalization_fwd_quantize(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                         const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma,
                                         const Quantizer& quantizer, QuantizeUsage usage, bool with_output);

// Recomputes the same bytes from the saved norm input and its statistics, with the earlier scale (TENSOR: in
// `used_scales`; blocks need none). Changes no amax.
Quantized normalization_again_quantize(const Tensor& h, const Tensor& gamma, const OptionalTensor& beta,
                                       const Tensor& mean, const Tensor& rstd, bool rms, bool zero_centered_gamma,
                                       const QuantizeSpec& spec, const Tensor& used_scales, QuantizeUsage usage);

}  // namespace te_torch
