// Kernel wrappers of grouped_gemm that other bindings call: GEMMs of rows in groups, one weight a group, where the
// sizes of the groups are on the device alone (transformer_engine/grouped_gemm.h).
// - On the CPU they are one GEMM a group.
// - Rows after the last group belong to no group: zeros in new results.
#pragma once

#include <transformer_engine/grouped_gemm.h>

#include "core/common.h"

namespace te_torch {

// int32 [groups + 1]: where each group's rows start. splits: int32 or int64 [groups], on x's device; a negative one
// counts as 0, and rows that x does not have are cut; with `count` both are counted (split_counters).
Tensor grouped_offsets(const Tensor& splits, const Tensor& x, bool count);

// The same for splits on the host, which add up to fewer than 2^31 rows; on like's device, without a copy.
Tensor grouped_offsets_of(at::ArrayRef<int64_t> splits, const Tensor& like);

// uint32 [3] on a device: negative splits and cut rows since the process began, or since it was zeroed; and the bits of
// a float32, the largest number of pairs that a map did not hold over that of an even choice (permute.h), or 0. Made on
// first use.
Tensor split_counters(const at::Device& device);

// FPROP: y [rows, N] = x [rows, K] weights[g]^T (+ biases[g]). DGRAD: dx [rows, K] = dy [rows, N] weights[g]. Into
// `out`, contiguous, whose rows of no group stay as they are; into a new tensor if it is undefined. weights: a matrix
// for each group, or one stacked tensor (core/grouped_operands.h), also in the two ops.
Tensor grouped_rows(te_grouped_product product, const Tensor& rows, at::TensorList weights, at::TensorList biases,
                    const Tensor& offsets, const Tensor& out);
// The ops of the two products, into a new tensor.
Tensor grouped_fprop(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets);
Tensor grouped_dgrad(const Tensor& dy, at::TensorList weights, const Tensor& offsets);

// Of each group dy^T x [N, K].
std::vector<Tensor> grouped_wgrad(const Tensor& dy, const Tensor& x, const Tensor& offsets);
// The same as new_matrices() makes them: results of a registered op have each memory of their own.
std::vector<Tensor> grouped_wgrad_together(const Tensor& dy, const Tensor& x, const Tensor& offsets);
// The same as one tensor [groups, N, K].
Tensor grouped_wgrad_stacked(const Tensor& dy, const Tensor& x, const Tensor& offsets);
// Of each group the column sums of dy: [groups, N]. as_quantized: in the order in which a quantizer of each group's
// rows sums them (CUDA has one order).
Tensor grouped_sums(const Tensor& dy, const Tensor& offsets, bool as_quantized);
// dy^T x into one of `outs` for each group whose mode is 0 (+=) or 1 (=); -1: the group has none.
void grouped_wgrad_accumulate(const Tensor& dy, const Tensor& x, const Tensor& offsets, at::TensorList outs,
                              at::ArrayRef<int64_t> modes);

}  // namespace te_torch
