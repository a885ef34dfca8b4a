// The binding of quantization: buffers for FP8 data, kernel wrappers, and schemas and Meta functions for quantizers
// without state. The engine computes scales and bytes. Quantizers written in Python are called from this file alone.
#include "quantize/quantize.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <bit>

#include "core/op_registration.h"

namespace te_torch {

namespace {

constexpr int64_t kBlock = 128, kRowBytes = 16;

template <class Int>
Int rounded_up(const Int& n, int64_t to) {
  return (n + (to - 1)) / to * to;
}

template <class Int>
Int folded_rows(c10::ArrayRef<Int> sizes) {
  Int rows = 1;
  for (size_t d = 0; d + 1 < sizes.size(); ++d) rows = rows * sizes[d];
  return rows;
}

// Views of a buffer at a distance of `step` elements.
std::vector<Tensor> parts_of(const Tensor& all, size_t count, at::IntArrayRef sizes, at::IntArrayRef strides,
                             int64_t step) {
  std::vector<Tensor> parts;
  parts.reserve(count);
  for (size_t i = 0; i < count; ++i) parts.push_back(at::as_strided(all, sizes, strides, int64_t(i) * step));
  return parts;
}

void check_input(const Tensor& x) {
  check_float(x, "quantize", "x");
  TORCH_CHECK_VALUE(x.dim() >= 1, "quantize: argument 'x' has no dimensions, wanted at least one.");
}

void check_input(const Tensor& x, const Quantizer& quantizer) {
  check_input(x);
  TORCH_CHECK_VALUE(quantizer.active(),
                    "quantize: argument 'quantizer' is of kind 'none', wanted a kind that quantizes.");
}

// The scales of `count` matrices in one buffer. All are aligned to 16 bytes.
std::vector<Tensor> empty_scales(size_t count, te_scaling scaling, int64_t rows, int64_t cols,
                                 const at::TensorOptions& like) {
  const bool per_tensor = scaling == TE_SCALING_TENSOR;
  const auto options = like.dtype(at::kFloat);
  if (count == 1 && per_tensor) return {at::empty({2}, options)};
  const auto [down, along] = te::scale_shape(scaling, rows, cols);
  if (count == 1) return {at::empty({down, along}, options)};
  const int64_t step = per_tensor ? 4 : down * along;
  return per_tensor ? parts_of(at::empty({int64_t(count), step}, options), count, {2}, {1}, step)
                    : parts_of(at::empty({int64_t(count), step}, options), count, {down, along},
                               {std::max<int64_t>(along, 1), 1}, step);
}

// The FP8 data of `count` matrices in one buffer: see empty_fp8_data.
std::vector<Tensor> empty_data(size_t count, int64_t rows, int64_t cols, const at::TensorOptions& like) {
  const int64_t pitch = rounded_up(cols, kRowBytes), all_rows = rounded_up(rows, kRowBytes), n = int64_t(count);
  const Tensor data = at::empty({n * all_rows, pitch}, like.dtype(at::kByte));
  if (all_rows > rows) data.view({n, all_rows, pitch}).narrow(1, rows, all_rows - rows).zero_();
  if (count == 1 && all_rows == rows && pitch == cols) return {data};
  return parts_of(data, count, {rows, cols}, {std::max<int64_t>(pitch, 1), 1}, all_rows * pitch);
}

te_tensor maybe(const Tensor& t, const char* op, const char* argument) {
  return t.defined() ? view_2d(t, op, argument) : absent();
}

void fill_parts(const Tensor& x, const Tensor& noop, te_tensor parts) {
  check(te_quantize_amax(view_2d(x, "quantize", "x"), parts, maybe(noop, "quantize", "noop"), current_stream(x)));
}

Tensor empty_parts(const at::TensorOptions& like) { return at::empty({1, TE_QUANTIZE_PARTS}, like.dtype(at::kFloat)); }

// The rows of `x` can be folded.
void run(OutputQuantization& plan, const Tensor& x, const Quantized& out, Tensor* dbias) {
  const te_tensor source = view_2d(x, "quantize", "x");
  if (dbias != nullptr) plan.want_column_sums(source.rows, source.cols, x.options());
  const te_quantized target = view_of(out, "quantize", "out");
  check(te_quantize(&plan.plan, source, &target, current_stream(x)));
  if (dbias != nullptr) *dbias = plan.bias_gradient(x.scalar_type());
}

void run(const Quantizer& quantizer, const Tensor& in, const Quantized& out, const Tensor& noop, const Tensor& amax,
         Tensor* dbias) {
  OutputQuantization plan(quantizer, in.options(), [&](te_tensor parts) {
    if (!amax.defined()) fill_parts(in, noop, parts);
  });
  if (amax.defined()) plan.plan.amax_parts = view_2d(amax, "quantize", "amax");
  plan.plan.noop = maybe(noop, "quantize", "noop");
  run(plan, in, out, dbias);
}

// Takes the GIL and calls the Python quantizer's `_quantize_native(x, rowwise, columnwise)`, which returns a
// _C.Quantized, or None to leave x as it is. dbias is computed here, by the same sums as for other quantizers.
Quantized quantize_in_python(const Quantizer& quantizer, const Tensor& x, QuantizeUsage usage, Tensor* dbias) {
  if (dbias != nullptr) {
    Quantized nothing;
    nothing.scaling = TE_SCALING_BLOCK_1D;  // needs no scale
    OutputQuantization sums(QuantizeSpec{QuantizeSpec::kBlock1d}, {});
    run(sums, rows_of(x), nothing, dbias);
  }
  const pybind11::gil_scoped_acquire gil;
  const auto object = pybind11::reinterpret_borrow<pybind11::object>(const_cast<PyObject*>(quantizer.python.get()));
  const pybind11::object result = object.attr("_quantize_native")(x, usage.rowwise, usage.columnwise);
  return result.is_none() ? Quantized{} : result.cast<Quantized>();
}

}  // namespace

te_scaling scaling_of(int64_t number) {
  TORCH_CHECK_VALUE(te::is_scaling(number), "quantize: argument 'scaling' is ", number,
                    ", wanted 0 (tensor), 1 (1x128 blocks) or 2 (128x128 blocks).");
  return static_cast<te_scaling>(number);
}

void QuantizeSpec::pack(std::vector<int64_t>& into) const {
  into.insert(into.end(),
              {int64_t(kind), int64_t(e5m2), int64_t(pow_2_scales), int64_t(std::bit_cast<uint32_t>(amax_epsilon))});
}

QuantizeSpec QuantizeSpec::unpack(at::ArrayRef<int64_t> values) {
  TORCH_CHECK_VALUE(values.size() == kPacked && values[0] >= kNone && values[0] <= kPython,
                    "quantize: argument 'spec' is ", values,
                    ", wanted 4 integers: kind, e5m2, pow_2_scales, the bits of amax_epsilon.");
  QuantizeSpec spec;
  spec.kind = static_cast<Kind>(values[0]);
  spec.e5m2 = values[1] != 0;
  spec.pow_2_scales = values[2] != 0;
  spec.amax_epsilon = std::bit_cast<float>(static_cast<uint32_t>(values[3]));
  return spec;
}

Quantizer stateless_quantizer(at::ArrayRef<int64_t> packed) {
  const QuantizeSpec spec = QuantizeSpec::unpack(packed);
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec.stateless(),
      "quantize: argument 'spec' is of a kind that a registered op does not take: wanted current, block1d or block2d; "
      "delayed scaling and quantizers written in Python run in eager mode alone.");
  return {spec, {}, {}, {}};
}

Tensor empty_fp8_data(int64_t rows, int64_t cols, const at::TensorOptions& like) {
  return empty_data(1, rows, cols, like)[0];
}

std::vector<Quantized> empty_quantized_list(size_t count, const QuantizeSpec& spec, int64_t rows, int64_t cols,
                                            QuantizeUsage usage, const at::TensorOptions& like) {
  const te_scaling scaling = spec.scaling();
  std::vector<Quantized> list(count);
  for (Quantized& q : list) q.scaling = scaling, q.e5m2 = spec.e5m2;
  const auto take = [&](std::vector<Tensor> parts, Tensor Quantized::*field) {
    for (size_t i = 0; i < count; ++i) list[i].*field = std::move(parts[i]);
  };
  if (usage.rowwise) {
    take(empty_data(count, rows, cols, like), &Quantized::rowwise);
    take(empty_scales(count, scaling, rows, cols, like), &Quantized::rowwise_scale_inv);
  }
  if (usage.columnwise) {
    take(empty_data(count, cols, rows, like), &Quantized::columnwise);
    if (scaling == TE_SCALING_TENSOR && usage.rowwise) {
      for (Quantized& q : list) q.columnwise_scale_inv = q.rowwise_scale_inv;
    } else {
      take(empty_scales(count, scaling, cols, rows, like), &Quantized::columnwise_scale_inv);
    }
  }
  return list;
}

Quantized empty_quantized(const QuantizeSpec& spec, int64_t rows, int64_t cols, QuantizeUsage usage,
                          const at::TensorOptions& like) {
  return std::move(empty_quantized_list(1, spec, rows, cols, usage, like)[0]);
}

te_tensor bytes_view(const Tensor& t, te_dtype dtype, const char* op, const char* argument) {
  if (!t.defined()) return absent();
  TORCH_CHECK_VALUE(t.dim() == 2 && t.element_size() == 1 && (t.size(1) <= 1 || t.stride(1) == 1), op, ": argument '",
                    argument, "' has shape ", t.sizes(), ", strides ", t.strides(), " and dtype ", t.scalar_type(),
                    ", wanted a uint8 matrix whose rows are contiguous.");
  check_memory(t, op, argument);
  te_tensor view{};
  view.data = t.numel() == 0 ? nullptr : t.data_ptr();
  view.rows = t.size(0);
  view.cols = t.size(1);
  view.row_pitch = t.numel() == 0 ? view.cols : std::max(t.stride(0), view.cols);
  view.dtype = dtype;
  view.device = t.is_cpu() ? TE_DEVICE_CPU : t.device().index();
  return view;
}

te_quantized view_of(const Quantized& q, const char* op, const char* argument) {
  return {q.scaling, bytes_view(q.rowwise, q.dtype(), op, argument), bytes_view(q.columnwise, q.dtype(), op, argument),
          maybe(q.rowwise_scale_inv, op, argument), maybe(q.columnwise_scale_inv, op, argument)};
}

OutputQuantization::OutputQuantization(const Quantizer& quantizer, const at::TensorOptions& like,
                                       c10::function_ref<void(te_tensor parts)> fill_parts) {
  const QuantizeSpec& spec = quantizer.spec;
  TORCH_CHECK_VALUE(
      quantizer.active() && spec.kind != QuantizeSpec::kPython,
      "quantize: argument 'quantizer' is not a built-in quantizer, wanted one; quantize the output of the op instead.");
  plan.pow_2_scales = spec.pow_2_scales;
  plan.amax_epsilon = spec.amax_epsilon;
  if (spec.scaling() != TE_SCALING_TENSOR) return;
  plan.amax = maybe(quantizer.amax, "quantize", "quantizer.amax");
  if (spec.kind == QuantizeSpec::kDelayed) {
    plan.scale = maybe(quantizer.scale, "quantize", "quantizer.scale");
  } else {
    amax_parts = empty_parts(like);
    plan.amax_parts = view_2d(amax_parts, "quantize", "amax_parts");
    fill_parts(plan.amax_parts);
  }
}

OutputQuantization::OutputQuantization(const QuantizeSpec& spec, const Tensor& used_scales) {
  plan.pow_2_scales = spec.pow_2_scales;
  plan.amax_epsilon = spec.amax_epsilon;
  if (spec.scaling() != TE_SCALING_TENSOR) return;
  TORCH_CHECK_VALUE(used_scales.defined() && used_scales.numel() == 2 && used_scales.scalar_type() == at::kFloat,
                    "quantize: argument 'used_scales' holds no scale, wanted the scales of a quantized tensor.");
  plan.scale = view_2d(used_scales, "quantize", "used_scales");
  plan.scale.data = static_cast<float*>(plan.scale.data) + 1;  // after scale_inv
  plan.scale.cols = plan.scale.row_pitch = 1;
}

void OutputQuantization::want_column_sums(int64_t rows, int64_t cols, const at::TensorOptions& like) {
  column_sums = at::empty({rounded_up(rows, kBlock) / kBlock, cols}, like.dtype(at::kFloat));
  plan.column_sums = view_2d(column_sums, "quantize", "column_sums");
}

Tensor OutputQuantization::bias_gradient(at::ScalarType dtype) const {
  const Tensor dbias = at::empty({column_sums.size(1)}, column_sums.options().dtype(dtype));
  check(te_quantize_sum_columns(view_2d(column_sums, "quantize", "column_sums"), view_2d(dbias, "quantize", "dbias"),
                                current_stream(dbias)));
  return dbias;
}

Quantized quantize(const Quantizer& quantizer, const Tensor& x, QuantizeUsage usage, Tensor* dbias) {
  check_input(x, quantizer);
  if (quantizer.spec.kind == QuantizeSpec::kPython) return quantize_in_python(quantizer, x, usage, dbias);
  const Tensor in = rows_of(x);
  const Quantized out = empty_quantized(quantizer.spec, folded_rows(in.sizes()), in.size(-1), usage, in.options());
  run(quantizer, in, out, {}, {}, dbias);
  return out;
}

Quantized quantize_into(const Quantizer& quantizer, const Tensor& x, const Quantized& out, const Tensor& noop,
                        const Tensor& amax) {
  check_input(x, quantizer);
  TORCH_CHECK_VALUE(
      quantizer.spec.kind != QuantizeSpec::kPython,
      "quantize: arguments 'out', 'noop' and 'amax' are for built-in quantizers, wanted None for one that "
      "is written in Python.");
  run(quantizer, rows_of(x), out, noop, amax, nullptr);
  for (const Tensor* t : {&out.rowwise, &out.rowwise_scale_inv, &out.columnwise, &out.columnwise_scale_inv}) {
    note_written(*t);
  }
  return out;
}

Quantized quantize_again(const QuantizeSpec& spec, const Tensor& used_scales, const Tensor& x, QuantizeUsage usage) {
  check_input(x);
  const Tensor in = rows_of(x);
  const Quantized out = empty_quantized(spec, folded_rows(in.sizes()), in.size(-1), usage, in.options());
  OutputQuantization plan(spec, used_scales);
  run(plan, in, out, nullptr);
  return out;
}

Tensor dequantize(const Quantized& q, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(q.defined(), "dequantize: argument 'x' has no data, wanted a rowwise or a columnwise direction.");
  const Tensor& data = q.rowwise.defined() ? q.rowwise : q.columnwise;
  const bool rowwise = q.rowwise.defined();
  const Tensor y = at::empty({data.size(rowwise ? 0 : 1), data.size(rowwise ? 1 : 0)}, data.options().dtype(dtype));
  check_float(y, "dequantize", "dtype");
  const te_quantized view = view_of(q, "dequantize", "x");
  check(te_dequantize(&view, view_2d(y, "dequantize", "y"), current_stream(y)));
  return y;
}

Tensor fp8_transpose(const Tensor& data, const OptionalTensor& out) {
  const Tensor transposed = out.has_value() ? *out : empty_fp8_data(data.size(1), data.size(0), data.options());
  check(te_quantize_transpose(bytes_view(data, TE_UINT8, "fp8_transpose", "data"),
                              bytes_view(transposed, TE_UINT8, "fp8_transpose", "out"), current_stream(data)));
  if (out.has_value()) note_written(transposed);
  return transposed;
}

Tensor quantize_amax(const Tensor& x) {
  check_input(x);
  const Tensor parts = empty_parts(x.options());
  fill_parts(rows_of(x), {}, view_2d(parts, "quantize", "parts"));
  return at::amax(parts, {1});
}

namespace {

// The results of an op may not share memory: the scales that both directions of TENSOR share are copied.
FiveTensors results_of(const Quantized& q, const Tensor& dbias, const at::TensorOptions& like) {
  const auto or_empty = [](const Tensor& t, const at::TensorOptions& options) {
    return t.defined() ? t : at::empty({0}, options);
  };
  const auto bytes = like.dtype(at::kByte), floats = like.dtype(at::kFloat);
  const bool shared = q.rowwise.defined() && q.columnwise.defined() && q.scaling == TE_SCALING_TENSOR;
  return {or_empty(q.rowwise, bytes), or_empty(q.rowwise_scale_inv, floats), or_empty(q.columnwise, bytes),
          shared ? q.columnwise_scale_inv.clone() : or_empty(q.columnwise_scale_inv, floats), or_empty(dbias, like)};
}

}  // namespace

FiveTensors quantize_op(const Tensor& x, at::ArrayRef<int64_t> spec, bool rowwise, bool columnwise, bool dbias) {
  Tensor bias;
  const Quantized q = quantize(stateless_quantizer(spec), x, {rowwise, columnwise}, dbias ? &bias : nullptr);
  return results_of(q, bias, x.options());
}

FourTensors quantize_again_op(const Tensor& x, at::ArrayRef<int64_t> spec, const Tensor& used_scales, bool rowwise,
                              bool columnwise) {
  const Quantized q = quantize_again(stateless_quantizer(spec).spec, used_scales, x, {rowwise, columnwise});
  const auto [row, row_scale, column, column_scale, none] = results_of(q, {}, x.options());
  return {row, row_scale, column, column_scale};
}

Tensor dequantize_op(const Tensor& data, const Tensor& scale_inv, int64_t scaling, bool e5m2, bool columnwise,
                     at::ScalarType dtype) {
  Quantized q;
  q.scaling = scaling_of(scaling);
  q.e5m2 = e5m2;
  (columnwise ? q.columnwise : q.rowwise) = data;
  (columnwise ? q.columnwise_scale_inv : q.rowwise_scale_inv) = scale_inv;
  return dequantize(q, dtype);
}

namespace {

FiveTensors quantize_meta(const Tensor& x, at::ArrayRef<int64_t> packed, bool rowwise, bool columnwise, bool dbias) {
  const QuantizeSpec spec = stateless_quantizer(packed).spec;
  check_input(x);
  const c10::SymInt rows = folded_rows(x.sym_sizes()), cols = x.sym_size(-1);
  const auto bytes = x.options().dtype(at::kByte), floats = x.options().dtype(at::kFloat);
  const auto data = [&](bool wanted, const c10::SymInt& r, const c10::SymInt& c) {
    if (!wanted) return at::empty({0}, bytes);
    return at::empty_strided_symint({r, c}, {rounded_up(c, kRowBytes).max(1), 1}, bytes);
  };
  const auto scales = [&](bool wanted, const c10::SymInt& r, const c10::SymInt& c) {
    if (!wanted) return at::empty({0}, floats);
    if (spec.scaling() == TE_SCALING_TENSOR) return at::empty({2}, floats);
    return at::empty_symint(te::scale_shape(spec.scaling(), r, c), floats);
  };
  return {data(rowwise, rows, cols), scales(rowwise, rows, cols), data(columnwise, cols, rows),
          scales(columnwise, cols, rows), dbias ? at::empty_symint({cols}, x.options()) : at::empty({0}, x.options())};
}

FourTensors quantize_again_meta(const Tensor& x, at::ArrayRef<int64_t> spec, const Tensor&, bool rowwise,
                                bool columnwise) {
  const auto [row, row_scale, column, column_scale, none] = quantize_meta(x, spec, rowwise, columnwise, false);
  return {row, row_scale, column, column_scale};
}

Tensor dequantize_meta(const Tensor& data, const Tensor&, int64_t, bool, bool columnwise, at::ScalarType dtype) {
  return at::empty_symint({data.sym_size(columnwise ? 1 : 0), data.sym_size(columnwise ? 0 : 1)},
                          data.options().dtype(dtype));
}

}  // namespace

TE_OP_REGISTRATION(quantize, ops) {
  ops.op("quantize(Tensor x, int[] spec, bool rowwise, bool columnwise, bool dbias) -> (Tensor, Tensor, Tensor, "
         "Tensor, Tensor)")
      .kernel(quantize_op)
      .meta(quantize_meta);
  ops.op("quantize_again(Tensor x, int[] spec, Tensor used_scales, bool rowwise, bool columnwise) -> (Tensor, Tensor, "
         "Tensor, Tensor)")
      .kernel(quantize_again_op)
      .meta(quantize_again_meta);
  ops.op("dequantize(Tensor data, Tensor scale_inv, int scaling, bool e5m2, bool columnwise, ScalarType dtype) -> "
         "Tensor")
      .kernel(dequantize_op)
      .meta(dequantize_meta);
}

}  // namespace te_torch
