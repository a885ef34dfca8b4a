// Rows of a matrix as tensors of their own, for who needs hundreds of them: what narrow() and select() give below
// autograd, in a fraction of their time. They are part of no graph, and have versions of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace te_torch {

// Of a dense matrix without subclass or mode around it (the direct dispatch mode): others take narrow().
at::Tensor rows_view(const at::Tensor& t, int64_t first, int64_t count);
// One of them, without its dimension.
at::Tensor row_view(const at::Tensor& t, int64_t row);

// New matrices [rows, cols], each beginning where memory of its own might. Small ones, which there may be hundreds of
// and whose making would take longer than the product that fills them, are pieces of one allocation.
std::vector<at::Tensor> new_matrices(size_t count, int64_t rows, int64_t cols, const at::TensorOptions& options);

}  // namespace te_torch
