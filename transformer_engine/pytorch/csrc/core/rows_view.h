// Rows of a matrix as tensors, for callers with hundreds of them: like narrow() and select() below autograd, in a
// fraction of their time. The tensors belong to no graph and have version counters of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace te_torch {

// For a dense matrix in the direct dispatch mode; other callers use narrow().
at::Tensor rows_view(const at::Tensor& t, int64_t first, int64_t count);
// A contiguous tensor as a matrix: its leading dimensions folded.
at::Tensor matrix_view(const at::Tensor& t);
// One element of a vector, as a vector.
at::Tensor element_view(const at::Tensor& t, int64_t index);
// One row, without its dimension.
at::Tensor row_view(const at::Tensor& t, int64_t row);
// One matrix of a contiguous tensor [count, rows, cols], and all of them.
at::Tensor matrix_at(const at::Tensor& stacked, int64_t index);
std::vector<at::Tensor> matrices_of(const at::Tensor& stacked);

// New matrices [rows, cols], aligned like separate allocations. Small ones are parts of one allocation, as hundreds of
// allocations would take longer than the GEMMs that fill them.
std::vector<at::Tensor> new_matrices(size_t count, int64_t rows, int64_t cols, const at::TensorOptions& options);

}  // namespace te_torch
