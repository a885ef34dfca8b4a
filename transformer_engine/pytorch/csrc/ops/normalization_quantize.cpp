// The binding of norms with an FP8 output: the statistics first, then the quantized output. The engine has the
// formulas.
#include "ops/normalization_quantize.h"

#include <ATen/ops/empty.h>
#include <transformer_engine/normalization.h>

#include "core/op_registration.h"
#include "ops/normalization.h"

namespace te_torch {

namespace {

constexpr const char* kFusedOp = "normalization";

OptionalTensor folded(const OptionalTensor& t) {
  return t.has_value() && t->defined() ? OptionalTensor(rows_of(*t)) : OptionalTensor();
}

OptionalTensor parameter_beside(const Tensor& x, const OptionalTensor& t) {
  return t.has_value() && t->defined() ? OptionalTensor(te_torch::parameter_beside(x, *t)) : OptionalTensor();
}

}  // namespace

QuantizedNorm normalization_fwd_quantize(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                         const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma,
                                         const Quantizer& quantizer, QuantizeUsage usage, bool with_output) {
  QuantizedNorm out;
  if (with_output || quantizer.spec.kind == QuantizeSpec::kPython) {
    std::tie(out.y, out.h, out.mean, out.rstd) =
        normalization_fwd(x, residual, gamma, beta, eps, rms, zero_centered_gamma);
    out.quantized = quantize(quantizer, out.y, usage);
    if (!with_output) out.y = Tensor();
    return out;
  }
  check_normalization(x, residual, gamma, beta);
  const Tensor in = rows_of(x), scale = te_torch::parameter_beside(x, gamma);
  const OptionalTensor other = folded(residual), shift = parameter_beside(x, beta);
  const te_tensor source = view_2d(in, kFusedOp, "x");
  const auto floats = in.options().dtype(at::kFloat);
  out.h = at::empty(other.has_value() ? in.sizes() : at::IntArrayRef{0}, in.options());
  out.mean = at::empty({rms ? 0 : source.rows}, floats);
  out.rstd = at::empty({source.rows}, floats);
  out.quantized = empty_quantized(quantizer.spec, source.rows, source.cols, usage, in.options());
  // The forward kernel fills the parts together with the statistics.
  const OutputQuantization plan(quantizer, in.options(), [](te_tensor) {});
  te_tensor scratch = absent();
  Tensor workspace;
  if (in.is_cuda()) {
    const auto bytes = static_cast<int64_t>(te_normalization_forward_quantize_workspace(source.rows));
    workspace = at::empty({bytes}, in.options().dtype(at::kByte));
    scratch = view_2d(workspace, kFusedOp, "workspace");
  }
  const te_quantized target = view_of(out.quantized, kFusedOp, "out");
  check(te_normalization_forward_quantize(
      {rms, zero_centered_gamma, static_cast<float>(eps)}, source, view_2d(other, kFusedOp, "residual"),
      view_2d(scale, kFusedOp, "gamma"), view_2d(shift, kFusedOp, "beta"),
      other.has_value() ? view_2d(out.h, kFusedOp, "h") : absent(),
      rms ? absent() : view_2d(out.mean, kFusedOp, "mean"), view_2d(out.rstd, kFusedOp, "rstd"), &plan.plan, &target,
      scratch, current_stream(in)));
  return out;
}

Quantized normalization_again_quantize(const Tensor& h, const Tensor& gamma, const OptionalTensor& beta,
                                       const Tensor& mean, const Tensor& rstd, bool rms, bool zero_centered_gamma,
                                       const QuantizeSpec& spec, const Tensor& used_scales, QuantizeUsage usage) {
  const Tensor in = rows_of(h), scale = te_torch::parameter_beside(h, gamma);
  const OptionalTensor shift = parameter_beside(h, beta);
  const te_tensor source = view_2d(in, kFusedOp, "h");
  const Quantized out = empty_quantized(spec, source.rows, source.cols, usage, in.options());
  const OutputQuantization plan(spec, used_scales);
  const te_quantized target = view_of(out, kFusedOp, "out");
  check(te_normalization_quantize({rms, zero_centered_gamma, 0.f}, source,
                                  rms ? absent() : view_2d(mean, kFusedOp, "mean"), view_2d(rstd, kFusedOp, "rstd"),
                                  view_2d(scale, kFusedOp, "gamma"), view_2d(shift, kFusedOp, "beta"), &plan.plan,
                                  &target, current_stream(in)));
  return out;
}

TE_OP_REGISTRATION(normalization_quantize, ops) {
  ops.python(
      "normalization_fwd_quantize", [](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                       const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma,
                                       const Quantizer& quantizer, bool rowwise, bool columnwise, bool with_output) {
        QuantizedNorm result = normalization_fwd_quantize(x, residual, gamma, beta, eps, rms, zero_centered_gamma,
                                                          quantizer, {rowwise, columnwise}, with_output);
        return std::tuple(result.quantized, result.y, result.h, result.mean, result.rstd);
      });
  ops.python("normalization_again_quantize", [](const Tensor& h, const Tensor& gamma, const OptionalTensor& beta,
                                                const Tensor& mean, const Tensor& rstd, bool rms,
                                                bool zero_centered_gamma, const std::vector<int64_t>& spec,
                                                const OptionalTensor& used_scales, bool rowwise, bool columnwise) {
    return normalization_again_quantize(h, gamma, beta, mean, rstd, rms, zero_centered_gamma,
                                        QuantizeSpec::unpack(spec), used_scales.has_value() ? *used_scales : Tensor(),
                                        {rowwise, columnwise});
  });
}

}  // namespace te_torch
