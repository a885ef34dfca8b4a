// See linear_core.h. This file has shapes, checks and schemas; gemm.h computes.
#include "gemm/linear_core.h"

#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>

#include "core/op_registration.h"
#include "gemm/gemm.h"

namespace te_torch {

namespace {

c10::SymDimVector with_last(const Tensor& t, const c10::SymInt& last) {
  c10::SymDimVector shape(t.sym_sizes().begin(), t.sym_sizes().end());
  shape.back() = last;
  return shape;
}

void check_operands(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_product(x, x.dim() > 0 ? x.sym_size(-1) : c10::SymInt(-1), weight, bias, false);
}

// The only reference to d's memory: a view would keep d, too.
Tensor unfold(const Tensor& d, const Tensor& like, int64_t last) {
  auto shape = like.sizes().vec();
  shape.back() = last;
  return at::_unsafe_view(d, shape);
}

Tensor linear_fwd_meta(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_operands(x, weight, bias);
  return x.new_empty_symint(with_last(x, weight.sym_size(0)));
}

Tensor linear_dgrad_meta(const Tensor& dy, const Tensor& weight) {
  return dy.new_empty_symint(with_last(dy, weight.sym_size(1)));
}

std::tuple<Tensor, Tensor> linear_wgrad_meta(const Tensor& dy, const Tensor& x, bool with_bias) {
  const Tensor dbias = with_bias ? dy.new_empty_symint({dy.sym_size(-1)}) : dy.new_empty({0});
  return {dy.new_empty_symint({dy.sym_size(-1), x.sym_size(-1)}), dbias};
}

}  // namespace

void check_product(const Tensor& x, const c10::SymInt& depth, const Tensor& weight, const OptionalTensor& bias,
                   bool own_copy) {
  check_float(x, "linear", "x");
  TORCH_CHECK_VALUE(weight.dim() == 2, "linear: argument 'weight' has shape ", weight.sym_sizes(),
                    ", wanted [out_features, in_features].");
  if (x.dim() == 0) check_last_dim(x, weight.sym_size(1), "linear", "x");
  TORCH_CHECK_VALUE(depth == weight.sym_size(1), "linear: argument 'x' has shape ", x.sym_sizes(),
                    ", wanted a last dimension of ", weight.sym_size(1), ".");
  if (!own_copy) check_same(weight, x, "linear", "weight");
  if (bias.has_value()) {
    TORCH_CHECK_VALUE(bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0), "linear: argument 'bias' has shape ",
                      bias->sym_sizes(), ", wanted [", weight.sym_size(0), "].");
    check_same(*bias, x, "linear", "bias");
  }
}

namespace {

// Undefined if another implementation than LibTorch computes the GEMM.
Tensor linear_by_torch(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  check_operands(x, weight, bias);
  check_memory(x, "linear", "x");
  check_memory(weight, "linear", "weight");
  const GemmPath path = gemm_path({x.is_cpu(), x.scalar_type(), x.scalar_type(), x.numel() == 0 || weight.numel() == 0,
                                   bias.has_value() ? TE_GEMM_BIAS : TE_GEMM_NONE, x.scalar_type()});
  if (path.by != GemmBy::kLibTorch) return {};
  path.note();
  return at::linear(x, weight, bias);
}

}  // namespace

Tensor linear_fwd(const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  if (Tensor y = linear_by_torch(x, weight, bias); y.defined()) return y;
  const auto d =
      std::get<0>(gemm(weight, x, "TN", bias.has_value() ? "bias" : "none", bias, std::nullopt, std::nullopt));
  return unfold(d, x, weight.size(0));
}

Tensor linear_dgrad(const Tensor& dy, const Tensor& weight) {
  return unfold(std::get<0>(gemm(weight, dy, "NN", "none", std::nullopt, std::nullopt, std::nullopt)), dy,
                weight.size(1));
}

void linear_fwd_into(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Tensor& d) {
  if (const Tensor y = linear_by_torch(x, weight, bias); y.defined()) {
    d.copy_(y);
  } else {
    gemm_into(weight, x, "TN", bias.has_value() ? "bias" : "none", bias, d);
  }
}

void linear_dgrad_into(const Tensor& dy, const Tensor& weight, const Tensor& d) {
  gemm_into(weight, dy, "NN", "none", std::nullopt, d);
}

std::tuple<Tensor, Tensor> linear_wgrad(const Tensor& dy, const Tensor& x, bool with_bias) {
  return gemm(x, dy, "NT", with_bias ? "bgrad" : "none", std::nullopt, std::nullopt, std::nullopt);
}

Tensor linear_wgrad_into(const Tensor& dy, const Tensor& x, bool with_bias, const Tensor& d) {
  return gemm_into(x, dy, "NT", with_bias ? "bgrad" : "none", std::nullopt, d);
}

TE_OP_REGISTRATION(linear_core, ops) {
  ops.op("linear_fwd(Tensor x, Tensor weight, Tensor? bias) -> Tensor").kernel(linear_fwd).meta(linear_fwd_meta);
  ops.op("linear_dgrad(Tensor dy, Tensor weight) -> Tensor").kernel(linear_dgrad).meta(linear_dgrad_meta);
  ops.op("linear_wgrad(Tensor dy, Tensor x, bool with_bias) -> (Tensor, Tensor)")
      .kernel(linear_wgrad)
      .meta(linear_wgrad_meta);
}

}  // namespace te_torch
