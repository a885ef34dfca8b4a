// The products of a linear layer on operands that are plain or FP8, and how a product is quantized. Written once for
// both routes and for every family; which format an operand has is nobody else's business.
#pragma once

#include "gemm_fp8.h"
#include "linear_core.h"
#include "quantize.h"

namespace te_torch {

// quantize() by way of the dispatcher.
Quantized quantize_dispatched(const QuantizeSpec& spec, const Tensor& x, Directions directions, Tensor* dbias);

// quantize_again() likewise.
Quantized quantize_again_dispatched(const QuantizeSpec& spec, const Tensor& used_scales, const Tensor& x,
                                    Directions directions);

// How the three products of one weight are quantized: its input, itself, the gradient of its output.
struct ProductQuantization {
  Quantizer x, weight, dy;
  // float32 accumulation throughout; without it the products of TENSOR scaling may accumulate faster.
  bool split_fprop = false;
  bool split_dgrad = true;
  bool split_wgrad = true;

  static constexpr size_t kPacked = 3 * QuantizeSpec::kPacked + 3;
  std::vector<int64_t> pack() const;  // what a schema carries: the quantizers' specs, then the three flags
};

using Quantization = std::shared_ptr<const ProductQuantization>;  // none: plain operands

// None for no integers.
Quantization quantization_of(at::ArrayRef<int64_t> packed, const char* op);

// A matrix that a product reads.
struct Operand {
  Tensor plain;  // undefined where it is FP8
  Quantized fp8;

  bool quantized() const { return fp8.defined(); }
};

// Quantizers whose state no schema carries; named where such a route meets one.
void refuse_state(const Quantizer& quantizer);

// The quantization again, its input by the scales that were used before: same bits, and no state touched.
Quantization with_scales(const ProductQuantization& q, const Tensor& used_scales);

// Of the gradient of a product's output, read in these directions; null where it is plain. In neither (the bias alone
// wants a gradient) one that makes column sums, to the same bits as any other, and no data.
const Quantizer* gradient_quantizer(const ProductQuantization* q, Directions directions);

// x by the quantizer, or as it is where there is none, or where it leaves x alone. dbias: the sums of x's columns,
// where they are wanted and x was quantized.
template <class Route>
Operand operand_of(const Quantizer* quantizer, const Tensor& x, Directions directions, Tensor* dbias = nullptr) {
  if (quantizer == nullptr || !quantizer->active()) return {x, {}};
  if constexpr (std::is_same_v<Route, Direct>) {
    const Quantized q = Direct::call<quantize>("te::quantize", *quantizer, x, directions, dbias);
    return q.defined() ? Operand{{}, q} : Operand{x, {}};
  } else {
    refuse_state(*quantizer);
    return {{}, quantize_dispatched(quantizer->spec, x, directions, dbias)};
  }
}

// The same bits again, by the scales that were used before.
template <class Route>
Operand operand_again(const Quantizer* quantizer, const Tensor& used_scales, const Tensor& x, Directions directions) {
  if (quantizer == nullptr || !quantizer->active()) return {x, {}};
  if constexpr (std::is_same_v<Route, Direct>) {
    if (quantizer->python != nullptr) return operand_of<Direct>(quantizer, x, directions);
    return {{}, Direct::call<quantize_again>("te::quantize", quantizer->spec, used_scales, x, directions)};
  } else {
    return {{}, quantize_again_dispatched(quantizer->spec, used_scales, x, directions)};
  }
}

template <class Route>
Tensor plain_of(const Operand& t, at::ScalarType dtype) {
  if (!t.quantized()) return t.plain;
  const Quantized& q = t.fp8;
  const bool columnwise = !q.rowwise.defined();
  return Route::template call<dequantize_op>("te::dequantize", columnwise ? q.columnwise : q.rowwise,
                                             columnwise ? q.columnwise_scale_inv : q.rowwise_scale_inv,
                                             int64_t(q.scaling), q.e5m2, columnwise, dtype);
}

namespace detail {

inline Tensor unfold_last(const Tensor& d, const Tensor& like, const c10::SymInt& last) {
  c10::SymDimVector shape(like.sym_sizes().begin(), like.sym_sizes().end());
  shape.back() = last;
  return d.sym_sizes() == c10::SymIntArrayRef(shape) ? d : d.view_symint(shape);
}

inline bool may_be_fast(const Quantized& a, const Quantized& b, bool split) {
  return !split && a.scaling == TE_SCALING_TENSOR && b.scaling == TE_SCALING_TENSOR;
}

}  // namespace detail

// y[..., N] of x[..., K]; `like` has its leading dimensions and its dtype.
template <class Route>
Tensor fprop(const Operand& x, const Operand& weight, const OptionalTensor& bias, const Tensor& like, bool split) {
  if (!x.quantized() && !weight.quantized()) {
    return Route::template call<linear_fwd>("te::linear_fwd", x.plain, weight.plain, bias);
  }
  const auto dtype = like.scalar_type();
  if (!x.quantized() || !weight.quantized()) {
    const Tensor plain = plain_of<Route>(x, dtype);
    return Route::template call<linear_fwd>("te::linear_fwd", detail::unfold_last(plain, like, plain.sym_size(-1)),
                                            plain_of<Route>(weight, dtype), bias);
  }
  const Tensor y =
      gemm_fp8<Route>(weight.fp8, false, x.fp8, false, dtype, bias, detail::may_be_fast(weight.fp8, x.fp8, split));
  return detail::unfold_last(y, like, weight.fp8.rowwise.sym_size(0));
}

// dx[..., K] of dy[..., N]; `like` has its leading dimensions and its dtype.
template <class Route>
Tensor dgrad(const Operand& dy, const Operand& weight, const Tensor& like, bool split) {
  if (!dy.quantized() && !weight.quantized()) {
    return Route::template call<linear_dgrad>("te::linear_dgrad", dy.plain, weight.plain);
  }
  const auto dtype = like.scalar_type();
  if (!dy.quantized() || !weight.quantized()) {
    const Tensor plain = plain_of<Route>(dy, dtype);
    return Route::template call<linear_dgrad>("te::linear_dgrad", detail::unfold_last(plain, like, plain.sym_size(-1)),
                                              plain_of<Route>(weight, dtype));
  }
  const Tensor dx =
      gemm_fp8<Route>(weight.fp8, true, dy.fp8, false, dtype, {}, detail::may_be_fast(weight.fp8, dy.fp8, split));
  return detail::unfold_last(dx, like, weight.fp8.columnwise.sym_size(0));
}

}  // namespace te_torch
