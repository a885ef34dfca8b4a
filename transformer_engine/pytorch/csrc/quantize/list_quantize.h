// Kernel wrappers of list quantization: quantizes many matrices to FP8, each as if it was alone, in as few launches as
// possible (transformer_engine/quantize_list.h). Data and scales of all matrices are in one buffer each.
#pragma once

#include "quantize/quantize.h"

namespace te_torch {

// Whether one call of the engine can quantize them: several matrices of one shape, layout, dtype and device, and
// built-in quantizers that are equal except for their state. The quantizers must not be null.
bool takes_list(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs);

// quantize() of each; one by one where takes_list() is false.
std::vector<Quantized> quantize_list(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs, QuantizeUsage usage);

// The same into `outs`; noop as for quantize_into().
void quantize_list_into(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs, at::ArrayRef<Quantized> outs,
                        const Tensor& noop);

}  // namespace te_torch
