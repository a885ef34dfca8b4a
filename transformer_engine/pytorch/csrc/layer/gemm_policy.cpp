// See gemm_policy.h. gemm/ computes.
#include "layer/gemm_policy.h"

#include <ATen/ExpandUtils.h>

#include "core/rows_view.h"
#include "gemm/gemm.h"
#include "gemm/gemm_fp8.h"
#include "gemm/linear_core.h"
#include "ops/permute.h"

namespace te_torch::layer {

namespace {

// An FP8 operand in plain form has its leading dimensions folded.
Tensor unfolded(const DispatchMode& dispatch, const Operand& t, const Tensor& like) {
  const Tensor plain = plain_of(dispatch, t, like.scalar_type());
  return with_rows_of(plain, like);
}

Tensor fp8_product(const DispatchMode& dispatch, const Quantized& weight, bool columnwise, const Quantized& t,
                   const Tensor& like, const OptionalTensor& bias, bool split, const Tensor& into) {
  const bool fast = may_be_fast(weight, t, split);
  if (into.defined()) {
    gemm_fp8_into(weight, columnwise, t, false, into, bias, fast);
    return into;
  }
  const Tensor d = dispatch.direct()
                       ? gemm_fp8<Direct>(weight, columnwise, t, false, like.scalar_type(), bias, fast)
                       : gemm_fp8<Dispatched>(weight, columnwise, t, false, like.scalar_type(), bias, fast);
  return with_rows_of(d, like);
}

}  // namespace

Tensor fprop_of(const DispatchMode& dispatch, const Operand& x, const Operand& weight, const OptionalTensor& bias,
                const Tensor& like, bool split, const Tensor& into) {
  if (x.quantized() && weight.quantized()) {
    return fp8_product(dispatch, weight.fp8, false, x.fp8, like, bias, split, into);
  }
  const bool plain = !x.quantized() && !weight.quantized();
  const Tensor t = plain ? x.plain : unfolded(dispatch, x, like), w = plain_of(dispatch, weight, like.scalar_type());
  if (!into.defined()) return dispatch.call<linear_fwd>("te::linear_fwd", t, w, bias);
  Direct::call<linear_fwd_into>("te::linear_fwd", t, w, bias, into);
  return into;
}

Tensor dgrad_of(const DispatchMode& dispatch, const Operand& dy, const Operand& weight, const Tensor& like, bool split,
                const Tensor& into) {
  if (dy.quantized() && weight.quantized()) {
    return fp8_product(dispatch, weight.fp8, true, dy.fp8, like, {}, split, into);
  }
  const bool plain = !dy.quantized() && !weight.quantized();
  const Tensor t = plain ? dy.plain : unfolded(dispatch, dy, like), w = plain_of(dispatch, weight, like.scalar_type());
  if (!into.defined()) return dispatch.call<linear_dgrad>("te::linear_dgrad", t, w);
  Direct::call<linear_dgrad_into>("te::linear_dgrad", t, w, into);
  return into;
}

Tensor gathered_rows(const DispatchMode& dispatch, const Operand& operand) {
  if (!operand.row_map.defined()) return operand.plain;
  return dispatch.call<permute_gather_fwd>("te::permute_gather_fwd", operand.plain, operand.row_map);
}

Tensor matrix_of(const Tensor& t) {
  if (t.dim() == 2) return t;
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows = rows * t.sym_size(d);
  return t.reshape_symint({rows, t.sym_size(-1)});
}

Tensor with_rows_of(const Tensor& matrix, const Tensor& like) {
  c10::SymDimVector shape(like.sym_sizes().begin(), like.sym_sizes().end());
  shape.back() = matrix.sym_size(-1);
  return matrix.sym_sizes() == c10::SymIntArrayRef(shape) ? matrix : matrix.view_symint(shape);
}

Tensor rows_of_matrix(const DispatchMode& dispatch, const Tensor& matrix, const Rows& rows) {
  return dispatch.direct() ? rows_view(matrix, rows.first, rows.count) : matrix.narrow(0, rows.first, rows.count);
}

Sums each_row(const DispatchMode& dispatch, const Tensor& matrix) {
  Sums rows;
  if (!dispatch.direct()) {
    const std::vector<Tensor> all = matrix.unbind(0);
    rows.assign(all.begin(), all.end());
    return rows;
  }
  rows.reserve(size_t(matrix.size(0)));
  for (int64_t i = 0; i < matrix.size(0); ++i) rows.push_back(row_view(matrix, i));
  return rows;
}

std::vector<Tensor> matrices_in(const DispatchMode& dispatch, const Tensor& stacked) {
  return dispatch.direct() ? te_torch::matrices_of(stacked) : stacked.unbind(0);
}

std::vector<Tensor> GemmPolicy::used_scales(const Operand& operand) const {
  if (!operand.quantized() || operand.fp8.scaling != TE_SCALING_TENSOR) return {};
  return {operand.fp8.rowwise_scale_inv};
}

Sums GemmPolicy::bias_gradients(const DispatchMode&, const Tensor& dy, const Tensor& sums) const {
  return {sums.defined() ? sums : column_sums(dy)};
}

Tensor column_sums(const Tensor& dy) {
  const c10::SymInt features = dy.sym_size(-1);
  return at::sum_to(dy, c10::SymIntArrayRef(&features, 1));
}

Tensor SingleProduct::fprop(const DispatchMode& dispatch, const Operand& x, const Rows*, const WeightSet& w,
                            const Tensor& like, bool split) const {
  return fprop_of(dispatch, x, w.weights[0], w.bias(0), like, split, {});
}

Tensor SingleProduct::dgrad(const DispatchMode& dispatch, const Operand& dy, const Rows*, const WeightSet& w,
                            const Tensor& like, bool split) const {
  return dgrad_of(dispatch, dy, w.weights[0], like, split, {});
}

Tensor SingleProduct::fprop_into(const DispatchMode& dispatch, const Operand& x, const Rows*, const WeightSet& w,
                                 const Tensor& like, bool split, int64_t total_rows, const Tensor& into) const {
  const RunsOf runs(total_rows);
  return fprop_of(dispatch, x, w.weights[0], w.bias(0), like, split, into);
}

Tensor SingleProduct::dgrad_into(const DispatchMode& dispatch, const Operand& dy, const Rows*, const WeightSet& w,
                                 const Tensor& like, bool split, int64_t total_rows, const Tensor& into) const {
  const RunsOf runs(total_rows);
  return dgrad_of(dispatch, dy, w.weights[0], like, split, into);
}

std::optional<te_gemm_tile> SingleProduct::takes_runs(Pass pass, const Operand& some, int64_t total_rows,
                                                      const WeightSet& w, const Tensor& like, bool split) const {
  const Operand& weight = w.weights[0];
  if (some.quantized() != weight.quantized()) return std::nullopt;
  if (like.is_cpu()) return cpu_products_by_loop() ? std::optional(te_gemm_tile{}) : std::nullopt;
  const OptionalTensor bias = pass == Pass::kFprop ? w.bias(0) : OptionalTensor();
  if (!some.quantized()) {
    return runs_match_full(weight.plain, some.plain, pass == Pass::kFprop ? "TN" : "NN", bias, total_rows);
  }
  const bool fast = may_be_fast(weight.fp8, some.fp8, split);
  return fp8_runs_match_full(weight.fp8, pass == Pass::kDgrad, some.fp8, like.scalar_type(), bias, fast, total_rows);
}

std::shared_ptr<WgradTask> SingleProduct::wgrad_task(const DispatchMode&, Gradient gradient, Operand x,
                                                     at::ScalarType dtype, bool split) const {
  return std::make_shared<MatrixWgrad>(std::move(gradient.dy), std::move(x), std::move(gradient.dbias), dtype, split);
}

}  // namespace te_torch::layer
