// Kernel wrappers of grouped_gemm_fp8 that other bindings call: GEMMs of FP8 rows in groups, as
// quantize/grouped_quantize.h makes them, one launch each (transformer_engine/grouped_gemm.h).
// - On the CPU they are the loop of te_grouped_gemm.
#pragma once

#include "core/common.h"

namespace te_torch {

// Rows of FP8: data uint8 [rows, features]; scales [1, groups], or of blocks those of one matrix; 2 * te_scaling +
// e5m2. Weights: one E4M3 matrix for each group, [N, K] rowwise for fprop and [K, N] columnwise for dgrad, in scales of
// a tensor (one, or it and its inverse), beside rows in blocks of 128 x 128. out_dtype: float32, float16 or bfloat16.
Tensor grouped_fp8_fprop(const Tensor& x, const Tensor& x_scale_inv, int64_t x_code, at::TensorList weights,
                         at::TensorList weights_scale_inv, at::TensorList biases, const Tensor& offsets,
                         at::ScalarType out_dtype);
Tensor grouped_fp8_dgrad(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, at::TensorList weights,
                         at::TensorList weights_scale_inv, const Tensor& offsets, at::ScalarType out_dtype);
// The same into `out`, contiguous; its rows of no group stay as they are.
void grouped_fp8_fprop_into(const Tensor& x, const Tensor& x_scale_inv, int64_t x_code, at::TensorList weights,
                            at::TensorList weights_scale_inv, at::TensorList biases, const Tensor& offsets,
                            const Tensor& out);
void grouped_fp8_dgrad_into(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, at::TensorList weights,
                            at::TensorList weights_scale_inv, const Tensor& offsets, const Tensor& out);

// dy^T x of each group, of panels [P, N, 128] and [P, K, 128]; scales [1, groups] or [P, roundup(features, 4)].
std::vector<Tensor> grouped_fp8_wgrad(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                      const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets,
                                      at::ScalarType out_dtype);
// The same as new_matrices() makes them: results of a registered op have each memory of their own.
std::vector<Tensor> grouped_fp8_wgrad_together(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code,
                                               const Tensor& x, const Tensor& x_scale_inv, int64_t x_code,
                                               const Tensor& offsets, at::ScalarType out_dtype);
// The same as one tensor [groups, N, K].
Tensor grouped_fp8_wgrad_stacked(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                 const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets,
                                 at::ScalarType out_dtype);
// Into one of `outs` for each group whose mode is 0 (+=) or 1 (=); -1: the group has none.
void grouped_fp8_wgrad_accumulate(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                  const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets, at::TensorList outs,
                                  at::ArrayRef<int64_t> modes);

}  // namespace te_torch
