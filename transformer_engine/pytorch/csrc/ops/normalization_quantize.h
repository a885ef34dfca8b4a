// normalization_quantize, kernel wrappers that other bindings call: a norm whose output is FP8 where it is made.
#pragma once

#include "quantize/quantize.h"

namespace te_torch {

struct QuantizedNorm {
  Quantized quantized;
  Tensor y;           // undefined unless it was wanted
  Tensor h;           // x + residual, rounded; an empty tensor without a residual
  Tensor mean, rstd;  // float32 [rows]; mean is empty for RMSNorm
};

// normalization_fwd's y quantized, with the bytes of normalization_fwd followed by quantize. y is written only with
// with_output (or for a quantizer written in Python). The leading dimensions of x are folded into rows.
QuantizedNorm normalization_fwd_quantize(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                         const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma,
                                         const Quantizer& quantizer, QuantizeUsage usage, bool with_output);

// The same bytes again from the saved norm input and its statistics, by the scale that was used (TENSOR: `used_scales`
// holds it; blocks need none). No amax is touched.
Quantized normalization_again_quantize(const Tensor& h, const Tensor& gamma, const OptionalTensor& beta,
                                       const Tensor& mean, const Tensor& rstd, bool rms, bool zero_centered_gamma,
                                       const QuantizeSpec& spec, const Tensor& used_scales, QuantizeUsage usage);

}  // namespace te_torch
