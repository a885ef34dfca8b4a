// See products.h. The arithmetic is the gemm room's.
#include "products.h"

#include "gemm_fp8.h"
#include "linear_core.h"

namespace te_torch::layer {

namespace {

Tensor unfold_last(const Tensor& d, const Tensor& like, const c10::SymInt& last) {
  c10::SymDimVector shape(like.sym_sizes().begin(), like.sym_sizes().end());
  shape.back() = last;
  return d.sym_sizes() == c10::SymIntArrayRef(shape) ? d : d.view_symint(shape);
}

// An FP8 operand in plain form has its leading dimensions folded.
Tensor unfolded(const Route& route, const Operand& t, const Tensor& like) {
  const Tensor plain = plain_of(route, t, like.scalar_type());
  return unfold_last(plain, like, plain.sym_size(-1));
}

Tensor fp8_product(const Route& route, const Quantized& weight, bool columnwise, const Quantized& t, const Tensor& like,
                   const OptionalTensor& bias, bool split) {
  const bool fast = may_be_fast(weight, t, split);
  const Tensor d = route.direct() ? gemm_fp8<Direct>(weight, columnwise, t, false, like.scalar_type(), bias, fast)
                                  : gemm_fp8<Dispatched>(weight, columnwise, t, false, like.scalar_type(), bias, fast);
  return unfold_last(d, like, (columnwise ? weight.columnwise : weight.rowwise).sym_size(0));
}

}  // namespace

Tensor SingleProduct::fprop(const Route& route, const Operand& x, const Rows*, const WeightSet& w, const Tensor& like,
                            bool split) const {
  const Operand& weight = w.weights[0];
  const OptionalTensor bias = w.biases.empty() ? OptionalTensor() : OptionalTensor(w.biases[0]);
  if (x.quantized() && weight.quantized()) return fp8_product(route, weight.fp8, false, x.fp8, like, bias, split);
  const bool plain = !x.quantized() && !weight.quantized();
  return route.call<linear_fwd>("te::linear_fwd", plain ? x.plain : unfolded(route, x, like),
                                plain_of(route, weight, like.scalar_type()), bias);
}

Tensor SingleProduct::dgrad(const Route& route, const Operand& dy, const Rows*, const WeightSet& w, const Tensor& like,
                            bool split) const {
  const Operand& weight = w.weights[0];
  if (dy.quantized() && weight.quantized()) return fp8_product(route, weight.fp8, true, dy.fp8, like, {}, split);
  const bool plain = !dy.quantized() && !weight.quantized();
  return route.call<linear_dgrad>("te::linear_dgrad", plain ? dy.plain : unfolded(route, dy, like),
                                  plain_of(route, weight, like.scalar_type()));
}

std::shared_ptr<WeightProduct> SingleProduct::weight_product(const Route&, Gradient gradient, Operand x,
                                                             at::ScalarType dtype, bool split) const {
  return std::make_shared<MatrixProduct>(std::move(gradient.dy), std::move(x), std::move(gradient.dbias), dtype, split);
}

}  // namespace te_torch::layer
