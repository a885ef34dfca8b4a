// GemmPolicy over several weights whose groups of rows the device alone knows: one kernel a product, one a
// quantization, and no look at how many rows a group has. FP8 rows are rowwise data and panels
// (quantize/grouped_quantize.h).
#pragma once

#include "layer/grouping.h"

namespace te_torch::layer {

std::shared_ptr<const GemmPolicy> device_groups(Grouping grouping);

// Why such products do not take groups that are quantized like that; null: they do.
const char* device_refuses(at::ArrayRef<Quantization> quantizations, size_t groups);

}  // namespace te_torch::layer
