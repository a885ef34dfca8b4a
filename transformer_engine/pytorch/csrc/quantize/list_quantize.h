// quantize_list, kernel wrappers that other bindings call: many matrices as FP8, each as if alone, by as few launches
// as there may be (transformer_engine/quantize_list.h). Data and scales of all lie in one buffer each.
#pragma once

#include "quantize/quantize.h"

namespace te_torch {

// Whether one call of the engine takes them: several, of one shape, layout, dtype and device, by built-in quantizers
// that are alike but for their state. No null quantizers among those.
bool takes_list(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs);

// quantize() of each; matrices that no one call takes are quantized one by one.
std::vector<Quantized> quantize_list(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs, QuantizeUsage usage);

// The same into `outs`; noop as quantize_into()'s.
void quantize_list_into(at::ArrayRef<const Quantizer*> quantizers, at::TensorList xs, at::ArrayRef<Quantized> outs,
                        const Tensor& noop);

}  // namespace te_torch
