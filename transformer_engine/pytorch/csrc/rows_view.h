// Rows of a matrix as tensors of their own, for who needs hundreds of them: what narrow() and select() give below
// autograd, in a fraction of their time. They are part of no graph, and have versions of their own.
#pragma once

#include <ATen/core/Tensor.h>

namespace te_torch {

// Of a dense matrix without subclass or mode around it (the direct route): others take narrow().
at::Tensor rows_view(const at::Tensor& t, int64_t first, int64_t count);
// One of them, without its dimension.
at::Tensor row_view(const at::Tensor& t, int64_t row);

}  // namespace te_torch
