// GemmPolicy over several weights, for groups of rows whose sizes are on the device alone.
// - One kernel computes a GEMM of all groups, and one quantizes them; the host never reads the sizes.
// - FP8 rows are rowwise data and panels (quantize/grouped_quantize.h).
#pragma once

#include "layer/grouping.h"

namespace te_torch::layer {

std::shared_ptr<const GemmPolicy> device_groups(Grouping grouping);

// Why these kernels cannot compute groups with such quantizations; null: they can.
const char* device_refuses(at::ArrayRef<Quantization> quantizations, size_t groups);

}  // namespace te_torch::layer
