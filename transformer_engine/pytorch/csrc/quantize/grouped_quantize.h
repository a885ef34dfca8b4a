// quantize_grouped, kernel wrappers that other bindings call: rows in groups as FP8, each group as if alone, where only
// the device knows how many rows a group has (transformer_engine/grouped_quantize.h). One launch for all of them.
#pragma once

#include "quantize/quantize.h"

namespace te_torch {

inline constexpr size_t kMostQuantizedGroups = 1024;  // of a launch: TE_GROUPED_QUANTIZE_GROUPS

// Of x [R, K]: rowwise data as ever, and, for columnwise, panels [P, K, 128], up to 128 rows of one group each. Scales
// of TENSOR are [1, groups]; of blocks rowwise those of one matrix, columnwise [P, roundup(K, 4)]. Rows of nobody,
// their scales, and panels behind the last group's hold anything. quantizers: one for all groups, or one for each;
// delayed, current or block1d, alike but for their state.
Quantized grouped_quantize(at::ArrayRef<const Quantizer*> quantizers, const Tensor& x, const Tensor& offsets,
                           QuantizeUsage usage);

// Quantizers without state as a registered op, te::grouped_quantize: (rowwise, its scales, panels, their scales), empty
// where not wanted.
FourTensors grouped_quantize_op(const Tensor& x, const Tensor& offsets, at::ArrayRef<int64_t> spec, bool rowwise,
                                bool panels);

// What rowwise data [R, K] with scales [1, groups] means, in `dtype`. Rows of nobody become anything.
Tensor grouped_dequantize(const Tensor& data, const Tensor& scale_inv, const Tensor& offsets, bool e5m2,
                          at::ScalarType dtype);

}  // namespace te_torch
