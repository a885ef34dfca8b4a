// GEMMs of groups of rows whose sizes are on the host.
// - Groups are passed by address, without a tensor for each, to one te_gemm after the other. If groups are small
//   (list_refuses) and te_gemm would sum their elements in one pass, one grouped kernel computes them to the same bits.
// - The bits are those of gemm_into(), gemm() and gemm_accumulate() of the rows of each group.
// - Both functions return false before anything is computed if a tensor does not fit; the caller uses those functions
//   then, and `why` is the reason why no grouped kernel runs.
#pragma once

#include "gemm/product.h"

namespace te_torch {

// d[rows of g] = rows[rows of g] weights[g]^T (+ biases[g]), or times weights[g] where `across`. Groups are rows of
// both.
bool rows_by_list(const Tensor& rows, at::ArrayRef<const Tensor*> weights, bool across, at::TensorList biases,
                  at::ArrayRef<Rows> groups, const Tensor& d, const char*& why);

// outs[g] = dy[rows of g]^T x[rows of g], or += where `add[g]`; an undefined one is not wanted. sums: none, or where
// each group's column sums of dy go.
bool weights_by_list(const Tensor& dy, const Tensor& x, at::ArrayRef<Rows> groups, at::ArrayRef<Tensor> outs,
                     const std::vector<bool>& add, at::ArrayRef<Tensor> sums, const char*& why);

}  // namespace te_torch
