// The binding of range quantization: quantizes a part of a weight with the scales of the whole weight, into tensors of
// the caller.

#include "core/op_registration.h"
#include "quantize/quantize.h"

namespace te_torch {

namespace {

te_dtype float_dtype(at::ScalarType dtype, const char* op) {
  switch (dtype) {
    case at::kFloat:
      return TE_FLOAT32;
    case at::kHalf:
      return TE_FLOAT16;
    case at::kBFloat16:
      return TE_BFLOAT16;
    default:
      TORCH_CHECK_VALUE(false, op, ": argument 'rounded_to' is ", dtype, ", wanted float32, float16 or bfloat16.");
  }
}

te_quantize_range range_of(const Tensor& x, int64_t rows, int64_t cols, int64_t start, at::ScalarType rounded_to,
                           const char* op) {
  check_float(x, op, "x");
  TORCH_CHECK_VALUE(x.dim() == 1 && x.is_contiguous(), op, ": argument 'x' has shape ", x.sizes(), " and strides ",
                    x.strides(), ", wanted one dense dimension; pass .contiguous().view(-1).");
  return {rows, cols, start, view_2d(x, op, "x"), float_dtype(rounded_to, op)};
}

te_tensor maybe(const OptionalTensor& t, const char* op, const char* argument) {
  return t.has_value() && t->defined() ? view_2d(*t, op, argument) : absent();
}

void quantize_range_amax(const Tensor& x, const Tensor& amaxes, int64_t rows, int64_t cols, int64_t start,
                         at::ScalarType rounded_to, int64_t scaling) {
  const char* op = "quantize_range_amax";
  const te_quantize_range range = range_of(x, rows, cols, start, rounded_to, op);
  check(te_quantize_range_amax(&range, scaling_of(scaling), view_2d(amaxes, op, "amaxes"), current_stream(x)));
  note_written(amaxes);
}

void quantize_range_cast(const Tensor& x, const Tensor& data, const Tensor& scale_inv, const OptionalTensor& amaxes,
                         const OptionalTensor& scale, const OptionalTensor& amax, int64_t rows, int64_t cols,
                         int64_t start, at::ScalarType rounded_to, at::ArrayRef<int64_t> packed) {
  const char* op = "quantize_range_cast";
  const te_quantize_range range = range_of(x, rows, cols, start, rounded_to, op);
  const QuantizeSpec spec = QuantizeSpec::unpack(packed);
  TORCH_CHECK_NOT_IMPLEMENTED(spec.kind != QuantizeSpec::kNone && spec.kind != QuantizeSpec::kPython, op,
                              ": argument 'spec' is of a quantizer that is not built in, wanted delayed, current or "
                              "block2d.");
  TORCH_CHECK_VALUE((spec.kind == QuantizeSpec::kDelayed) == (scale.has_value() && scale->defined()), op,
                    ": argument 'scale' is ", scale.has_value() ? "given" : "missing",
                    ", wanted a scale for delayed scaling and None for other kinds.");
  const Tensor bytes = data.dim() == 1 ? data.unsqueeze(0) : data;
  const te_quantize_range_plan plan{spec.scaling(),          maybe(scale, op, "scale"), maybe(amaxes, op, "amaxes"),
                                    maybe(amax, op, "amax"), int(spec.pow_2_scales),    spec.amax_epsilon};
  check(te_quantize_range_cast(&range, &plan, bytes_view(bytes, spec.dtype(), op, "data"),
                               view_2d(scale_inv, op, "scale_inv"), current_stream(x)));
  note_written(data);
  note_written(scale_inv);
  if (amax.has_value()) note_written(*amax);
}

void amax_meta(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, at::ScalarType, int64_t) {}
void cast_meta(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
               const OptionalTensor&, c10::SymInt, c10::SymInt, c10::SymInt, at::ScalarType, at::ArrayRef<int64_t>) {}

}  // namespace

TE_OP_REGISTRATION(quantize_range, ops) {
  ops.op("quantize_range_amax(Tensor x, Tensor(a!) amaxes, SymInt rows, SymInt cols, SymInt start, ScalarType "
         "rounded_to, int scaling) -> ()")
      .kernel(quantize_range_amax)
      .meta(amax_meta)
      .python(quantize_range_amax);
  ops.op("quantize_range_cast(Tensor x, Tensor(a!) data, Tensor(b!) scale_inv, Tensor? amaxes, Tensor? scale, "
         "Tensor(c!)? amax, SymInt rows, SymInt cols, SymInt start, ScalarType rounded_to, int[] spec) -> ()")
      .kernel(quantize_range_cast)
      .meta(cast_meta)
      .python([](const Tensor& x, const Tensor& data, const Tensor& scale_inv, const OptionalTensor& amaxes,
                 const OptionalTensor& scale, const OptionalTensor& amax, int64_t rows, int64_t cols, int64_t start,
                 at::ScalarType rounded_to, const std::vector<int64_t>& spec) {
        quantize_range_cast(x, data, scale_inv, amaxes, scale, amax, rows, cols, start, rounded_to, spec);
      });
}

}  // namespace te_torch
