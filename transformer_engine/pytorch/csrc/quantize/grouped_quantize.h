// Kernel wrappers of grouped quantization: quantizes rows in groups to FP8, each group as if it was alone, where the
// sizes of the groups are on the device alone (transformer_engine/grouped_quantize.h). One launch for all groups.
#pragma once

#include "quantize/quantize.h"

namespace te_torch {

inline constexpr size_t kMostQuantizedGroups = 1024;  // of a launch: TE_GROUPED_QUANTIZE_GROUPS

// Quantizes x [R, K]. Rowwise data are as of one matrix; columnwise data are panels [P, K, 128] of up to 128 rows of
// one group. Scales of TENSOR are [1, groups]; of blocks rowwise as of one matrix, columnwise [P, roundup(K, 4)]. Rows
// of no group, their scales, and panels after the last group's are undefined. quantizers: one for all groups or one
// each, of kind delayed, current or block1d, equal except for their state. row_map: int32 [R], row r is x[row_map[r]],
// 0 where the map names no row of x; x may have any number of rows then.
Quantized grouped_quantize(at::ArrayRef<const Quantizer*> quantizers, const Tensor& x, const Tensor& offsets,
                           QuantizeUsage usage, const OptionalTensor& row_map);

// The number of panels that grouped_quantize() writes for these offsets, int32 [1] on their device.
Tensor grouped_panels(const Tensor& offsets);

// The registered op te::grouped_quantize, for quantizers without state: (rowwise, its scales, panels, their scales),
// empty where not requested.
FourTensors grouped_quantize_op(const Tensor& x, const Tensor& offsets, at::ArrayRef<int64_t> spec, bool rowwise,
                                bool panels, const OptionalTensor& row_map);

// Dequantizes rowwise data [R, K] with scales [1, groups] to `dtype`. Rows of no group are undefined.
Tensor grouped_dequantize(const Tensor& data, const Tensor& scale_inv, const Tensor& offsets, bool e5m2,
                          at::ScalarType dtype);

}  // namespace te_torch
