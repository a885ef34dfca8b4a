// gemm_list: products of groups of rows that the host knows: one te_gemm behind the other, with operands and results by
// their addresses, no tensor for a group; or one grouped kernel for all of them, where groups are small (list_refuses)
// and te_gemm would add their elements up in one pass too, for those are the same bits; the others follow one by one.
// Bits are those of gemm_into(), gemm() and gemm_accumulate() of each group's rows. What is not as plain as this wants
// gets `false`, before anything is computed, and is theirs to compute, or to refuse by name; `why` is then why no
// grouped kernel does, if that is all.
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
