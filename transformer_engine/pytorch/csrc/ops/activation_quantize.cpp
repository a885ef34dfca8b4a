// The binding of activations with an FP8 output. A quantizer written in Python gets the activation as a tensor.

#include "core/op_registration.h"
#include "ops/activation.h"

namespace te_torch {

namespace {

struct Sizes {
  int64_t rows, cols;
};

Sizes sizes_of(const te_tensor& x, bool gated) { return {x.rows, gated ? x.cols / 2 : x.cols}; }

bool any(QuantizeUsage d) { return d.rowwise || d.columnwise; }

bool in_python(const Quantizer& quantizer) { return quantizer.spec.kind == QuantizeSpec::kPython; }

std::pair<Quantized, Quantized> unfused_bwd(const Tensor& dy, const Tensor& x, std::string_view kind,
                                            at::ArrayRef<double> params, const Quantizer& dx_quantizer,
                                            QuantizeUsage dx_directions, Tensor* dbias, const QuantizeSpec& y_spec,
                                            const Tensor& y_used_scales, QuantizeUsage y_directions) {
  const auto [dx, y] = activation_bwd(dy, x, kind, params, any(y_directions));
  return {quantize(dx_quantizer, dx, dx_directions, dbias),
          any(y_directions) ? quantize_again(y_spec, y_used_scales, y, y_directions) : Quantized{}};
}

}  // namespace

Quantized activation_fwd_quantize(const Tensor& x, std::string_view kind, at::ArrayRef<double> params,
                                  const Quantizer& quantizer, QuantizeUsage usage) {
  if (in_python(quantizer)) return quantize(quantizer, activation_fwd(x, kind, params), usage);
  const ActivationKind k = activation_kind(kind);
  activation_shape(x, k.gated);  // checks the shape
  const te_activation_params p = activation_params(params);
  const Tensor in = rows_of(x);
  const te_tensor source = view_2d(in, "activation", "x");
  const auto [rows, cols] = sizes_of(source, k.gated);
  const te_stream stream = current_stream(in);
  OutputQuantization plan(quantizer, in.options(), [&](te_tensor parts) {
    check(te_activation_forward_amax(k.number, p, source, parts, absent(), stream));
  });
  const Quantized y = empty_quantized(quantizer.spec, rows, cols, usage, in.options());
  const te_quantized target = view_of(y, "activation", "y");
  check(te_activation_forward_quantize(k.number, p, source, &plan.plan, &target, stream));
  return y;
}

std::pair<Quantized, Quantized> activation_bwd_quantize(const Tensor& dy, const Tensor& x, std::string_view kind,
                                                        at::ArrayRef<double> params, const Quantizer& dx_quantizer,
                                                        QuantizeUsage dx_directions, Tensor* dbias,
                                                        const QuantizeSpec& y_spec, const Tensor& y_used_scales,
                                                        QuantizeUsage y_directions) {
  if (in_python(dx_quantizer)) {
    return unfused_bwd(dy, x, kind, params, dx_quantizer, dx_directions, dbias, y_spec, y_used_scales, y_directions);
  }
  const ActivationKind k = activation_kind(kind);
  check_activation_dy(dy, x, k.gated);
  const te_activation_params p = activation_params(params);
  const Tensor grad = rows_of(dy), in = rows_of(x);
  const te_tensor gradient = view_2d(grad, "activation", "dy"), source = view_2d(in, "activation", "x");
  const auto [rows, cols] = sizes_of(source, k.gated);
  const te_stream stream = current_stream(in);
  OutputQuantization dx_plan(dx_quantizer, in.options(), [&](te_tensor parts) {
    check(te_activation_backward_amax(k.number, p, gradient, source, parts, absent(), stream));
  });
  if (dbias != nullptr) dx_plan.want_column_sums(source.rows, source.cols, in.options());
  const Quantized dx = empty_quantized(dx_quantizer.spec, source.rows, source.cols, dx_directions, in.options());
  const te_quantized dx_target = view_of(dx, "activation", "dx");
  if (any(y_directions)) {
    const OutputQuantization y_plan(y_spec, y_used_scales);
    const Quantized y = empty_quantized(y_spec, rows, cols, y_directions, in.options());
    const te_quantized y_target = view_of(y, "activation", "y");
    check(te_activation_backward_quantize(k.number, p, gradient, source, &dx_plan.plan, &dx_target, &y_plan.plan,
                                          &y_target, stream));
    if (dbias != nullptr) *dbias = dx_plan.bias_gradient(in.scalar_type());
    return {dx, y};
  }
  check(te_activation_backward_quantize(k.number, p, gradient, source, &dx_plan.plan, &dx_target, nullptr, nullptr,
                                        stream));
  if (dbias != nullptr) *dbias = dx_plan.bias_gradient(in.scalar_type());
  return {dx, {}};
}

TE_OP_REGISTRATION(activation_quantize, ops) {
  ops.python("activation_fwd_quantize", [](const Tensor& x, const std::string& kind, const std::vector<double>& params,
                                           const Quantizer& quantizer, bool rowwise, bool columnwise) {
    return activation_fwd_quantize(x, kind, params, quantizer, {rowwise, columnwise});
  });
  // (dx, y or None, dbias or None). y: in y_quantizer's format with the scales of an earlier quantization.
  ops.python("activation_bwd_quantize",
             [](const Tensor& dy, const Tensor& x, const std::string& kind, const std::vector<double>& params,
                const Quantizer& dx_quantizer, std::pair<bool, bool> dx_directions, bool dbias,
                const Quantizer& y_quantizer, const OptionalTensor& y_used_scales, std::pair<bool, bool> y_directions) {
               Tensor bias;
               const auto [dx, y] = activation_bwd_quantize(
                   dy, x, kind, params, dx_quantizer, {dx_directions.first, dx_directions.second},
                   dbias ? &bias : nullptr, y_quantizer.spec, y_used_scales.value_or(Tensor()),
                   {y_directions.first, y_directions.second});
               return std::tuple(dx, y.defined() ? std::optional(y) : std::nullopt,
                                 bias.defined() ? OptionalTensor(bias) : OptionalTensor());
             });
}

}  // namespace te_torch
