// normalization_quantized, binding: the norm's statistics, then its output in FP8 where it is made. No formula is here.
#include "normalization_quantized.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <transformer_engine/normalization.h>

#include "normalization.h"

namespace te_torch {

namespace {

constexpr const char* kOp = "normalization";

te_tensor maybe(const Tensor& t, const char* argument) { return t.defined() ? view_2d(t, kOp, argument) : absent(); }

OptionalTensor folded_rows(const OptionalTensor& t) {
  return t.has_value() && t->defined() ? OptionalTensor(rows_of(*t)) : OptionalTensor();
}

// What makes y of known statistics, as views; it keeps the tensors that had to be copied.
struct Known {
  te_normalization_plan plan;
  Tensor h, gamma;
  OptionalTensor beta;
  Tensor mean, rstd;

  Known(const Tensor& h, const Tensor& gamma, const OptionalTensor& beta, const Tensor& mean, const Tensor& rstd,
        bool rms, bool zero_centered_gamma)
      : plan{rms, zero_centered_gamma, 0.f},
        h(rows_of(h)),
        gamma(rows_of(gamma)),
        beta(folded_rows(beta)),
        mean(mean),
        rstd(rstd) {}

  // call(plan, h, mean, rstd, gamma, beta, more..., stream)
  template <class Call, class... More>
  void run(Call call, const More&... more) const {
    check(call(plan, view_2d(h, kOp, "h"), plan.rms ? absent() : view_2d(mean, kOp, "mean"), view_2d(rstd, kOp, "rstd"),
               view_2d(gamma, kOp, "gamma"), view_2d(beta, kOp, "beta"), more..., current_stream(h)));
  }

  int64_t rows() const { return view_2d(h, kOp, "h").rows; }
};

te_quantize_plan plan_of(const QuantizeSpec& spec) {
  te_quantize_plan plan{};
  plan.pow_2_scales = spec.pow_2_scales;
  plan.amax_epsilon = spec.amax_epsilon;
  return plan;
}

void quantize_into(const Known& known, te_quantize_plan plan, const Quantized& out) {
  const te_quantized target = view_of(out, kOp, "out");
  known.run(te_normalization_quantize, &plan, &target);
}

void quantize_known(const Known& known, const Quantizer& quantizer, const Quantized& out) {
  te_quantize_plan plan = plan_of(quantizer.spec);
  Tensor parts;
  if (quantizer.spec.kind == QuantizeSpec::kDelayed) {
    plan.scale = maybe(quantizer.scale, "quantizer.scale");
  } else if (quantizer.spec.kind == QuantizeSpec::kCurrent) {
    parts = at::empty({1, TE_QUANTIZE_PARTS}, known.h.options().dtype(at::kFloat));
    plan.amax_parts = view_2d(parts, kOp, "amax");
    known.run(te_normalization_amax, plan.amax_parts, absent());
  }
  if (out.scaling == TE_SCALING_TENSOR) plan.amax = maybe(quantizer.amax, "quantizer.amax");
  quantize_into(known, plan, out);
}

Quantized empty_like(const Known& known, const QuantizeSpec& spec, Directions directions) {
  return empty_quantized(spec, known.rows(), known.h.size(-1), directions, known.h.options());
}

bool has_residual(const OptionalTensor& residual) { return residual.has_value() && residual->defined(); }

// The outputs of an op, which do not alias.
std::tuple<Tensor, Tensor, Tensor, Tensor> parts_of(Quantized q, const Tensor& like) {
  const bool shared = q.rowwise.defined() && q.columnwise.defined() && q.scaling == TE_SCALING_TENSOR;
  if (shared) q.columnwise_scale_inv = q.rowwise_scale_inv.clone();
  const auto or_empty = [&](const Tensor& t, at::ScalarType dtype) {
    return t.defined() ? t : at::empty({0}, like.options().dtype(dtype));
  };
  return {or_empty(q.rowwise, at::kByte), or_empty(q.rowwise_scale_inv, at::kFloat), or_empty(q.columnwise, at::kByte),
          or_empty(q.columnwise_scale_inv, at::kFloat)};
}

QuantizeSpec stateless(at::ArrayRef<int64_t> packed) {
  const QuantizeSpec spec = QuantizeSpec::unpack(packed);
  TORCH_CHECK_VALUE(
      spec.kind == QuantizeSpec::kCurrent || spec.kind == QuantizeSpec::kBlock1d || spec.kind == QuantizeSpec::kBlock2d,
      "normalization: argument 'spec' is of a kind that a registered op does not take, wanted current, block1d or "
      "block2d.");
  return spec;
}

EightTensors fwd_meta(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                      double eps, bool rms, bool zero_centered_gamma, at::ArrayRef<int64_t> spec, bool rowwise,
                      bool columnwise, bool with_output) {
  const auto [y, h, mean, rstd] = Dispatched::call<normalization_fwd>("te::normalization_fwd", x, residual, gamma, beta,
                                                                      eps, rms, zero_centered_gamma);
  const auto [row, row_scale, column, column_scale, sums] =
      Dispatched::call<quantize_op>("te::quantize", y, spec, rowwise, columnwise, false);
  return {row, row_scale, column, column_scale, with_output ? y : x.new_empty({0}), h, mean, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> again_meta(const Tensor& h, const Tensor& gamma, const OptionalTensor& beta,
                                                      const Tensor&, const Tensor&, bool rms, bool zero_centered_gamma,
                                                      at::ArrayRef<int64_t> spec, const Tensor&, bool rowwise,
                                                      bool columnwise) {
  const auto made = fwd_meta(h, {}, gamma, beta, 0., rms, zero_centered_gamma, spec, rowwise, columnwise, false);
  return {std::get<0>(made), std::get<1>(made), std::get<2>(made), std::get<3>(made)};
}

}  // namespace

QuantizedNorm normalization_fwd_quantized(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                          const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma,
                                          const Quantizer& quantizer, Directions directions, bool with_output) {
  QuantizedNorm out;
  if (with_output || quantizer.spec.kind == QuantizeSpec::kPython) {
    std::tie(out.y, out.h, out.mean, out.rstd) =
        normalization_fwd(x, residual, gamma, beta, eps, rms, zero_centered_gamma);
    out.quantized = quantize(quantizer, out.y, directions);
    if (!with_output) out.y = Tensor();
    return out;
  }
  TORCH_CHECK_VALUE(quantizer.active(),
                    "normalization: argument 'quantizer' is of kind 'none', which quantizes nothing.");
  std::tie(out.h, out.mean, out.rstd) =
      normalization_statistics(x, residual, gamma, beta, eps, rms, zero_centered_gamma);
  const Known known(has_residual(residual) ? out.h : x, gamma, beta, out.mean, out.rstd, rms, zero_centered_gamma);
  out.quantized = empty_like(known, quantizer.spec, directions);
  quantize_known(known, quantizer, out.quantized);
  return out;
}

Quantized normalization_again_quantized(const Tensor& h, const Tensor& gamma, const OptionalTensor& beta,
                                        const Tensor& mean, const Tensor& rstd, bool rms, bool zero_centered_gamma,
                                        const QuantizeSpec& spec, const Tensor& used_scales, Directions directions) {
  const Known known(h, gamma, beta, mean, rstd, rms, zero_centered_gamma);
  const Quantized out = empty_like(known, spec, directions);
  te_quantize_plan plan = plan_of(spec);
  if (out.scaling == TE_SCALING_TENSOR) {
    TORCH_CHECK_VALUE(used_scales.defined() && used_scales.numel() == 2,
                      "normalization: argument 'used_scales' holds no scale, wanted the scales of a quantized tensor.");
    plan.scale = view_2d(used_scales, kOp, "used_scales");
    plan.scale.data = static_cast<float*>(plan.scale.data) + 1;
    plan.scale.rows = plan.scale.cols = plan.scale.row_pitch = 1;
  }
  quantize_into(known, plan, out);
  return out;
}

EightTensors normalization_quantize_fwd(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                        const OptionalTensor& beta, double eps, bool rms, bool zero_centered_gamma,
                                        at::ArrayRef<int64_t> spec, bool rowwise, bool columnwise, bool with_output) {
  const Quantizer quantizer{stateless(spec), {}, {}, {}};
  const QuantizedNorm made = normalization_fwd_quantized(x, residual, gamma, beta, eps, rms, zero_centered_gamma,
                                                         quantizer, {rowwise, columnwise}, with_output);
  const auto [row, row_scale, column, column_scale] = parts_of(made.quantized, x);
  return {row,    row_scale, column,   column_scale, with_output ? made.y : at::empty({0}, x.options()),
          made.h, made.mean, made.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> normalization_quantize(
    const Tensor& h, const Tensor& gamma, const OptionalTensor& beta, const Tensor& mean, const Tensor& rstd, bool rms,
    bool zero_centered_gamma, at::ArrayRef<int64_t> spec, const Tensor& used_scales, bool rowwise, bool columnwise) {
  return parts_of(normalization_again_quantized(h, gamma, beta, mean, rstd, rms, zero_centered_gamma, stateless(spec),
                                                used_scales, {rowwise, columnwise}),
                  h);
}

TORCH_LIBRARY_FRAGMENT(te, m) {
  m.def(
      "normalization_quantize_fwd(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, float eps, bool rms, bool "
      "zero_centered_gamma, int[] spec, bool rowwise, bool columnwise, bool with_output) -> (Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "normalization_quantize(Tensor h, Tensor gamma, Tensor? beta, Tensor mean, Tensor rstd, bool rms, bool "
      "zero_centered_gamma, int[] spec, Tensor used_scales, bool rowwise, bool columnwise) -> (Tensor, Tensor, Tensor, "
      "Tensor)");
}
TORCH_LIBRARY_IMPL(te, CPU, m) {
  m.impl("normalization_quantize_fwd", normalization_quantize_fwd);
  m.impl("normalization_quantize", normalization_quantize);
}
TORCH_LIBRARY_IMPL(te, CUDA, m) {
  m.impl("normalization_quantize_fwd", normalization_quantize_fwd);
  m.impl("normalization_quantize", normalization_quantize);
}
TORCH_LIBRARY_IMPL(te, Meta, m) {
  m.impl("normalization_quantize_fwd", fwd_meta);
  m.impl("normalization_quantize", again_meta);
}

void register_normalization_quantized(pybind11::module_& m) {
  m.def("normalization_fwd_quantized",
        torch::wrap_pybind_function_no_gil([](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                                              const OptionalTensor& beta, double eps, bool rms,
                                              bool zero_centered_gamma, const Quantizer& quantizer, bool rowwise,
                                              bool columnwise, bool with_output) {
          QuantizedNorm made = normalization_fwd_quantized(x, residual, gamma, beta, eps, rms, zero_centered_gamma,
                                                           quantizer, {rowwise, columnwise}, with_output);
          return std::tuple(made.quantized, made.y, made.h, made.mean, made.rstd);
        }));
  m.def("normalization_again_quantized",
        torch::wrap_pybind_function_no_gil([](const Tensor& h, const Tensor& gamma, const OptionalTensor& beta,
                                              const Tensor& mean, const Tensor& rstd, bool rms,
                                              bool zero_centered_gamma, const std::vector<int64_t>& spec,
                                              const OptionalTensor& used_scales, bool rowwise, bool columnwise) {
          return normalization_again_quantized(
              h, gamma, beta, mean, rstd, rms, zero_centered_gamma, QuantizeSpec::unpack(spec),
              used_scales.has_value() ? *used_scales : Tensor(), {rowwise, columnwise});
        }));
}

}  // namespace te_torch
