// See grouped_quantize.h.
#include "quantize/grouped_quantize.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/bucketize.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/TensorOperators.h>
#include <transformer_engine/grouped_quantize.h>

#include "core/grouped_operands.h"
#include "core/op_registration.h"

namespace te_torch {

namespace {

using grouped::check_offsets;
using grouped::groups_of;

constexpr const char* kGrouped = "grouped_quantize";
constexpr int64_t kPanel = 128, kRowBytes = 16;
static_assert(kMostQuantizedGroups == TE_GROUPED_QUANTIZE_GROUPS);

template <class Int>
Int rounded_up(const Int& n, int64_t to) {
  return (n + (to - 1)) / to * to;
}

// The largest number of panels of any split of the rows: P of te_grouped_quantize.
c10::SymInt most_panels(const c10::SymInt& rows, size_t groups) {
  const c10::SymInt many = rows.min(c10::SymInt(int64_t(groups)));
  return (rows - many) / kPanel + many;
}

// x, and the map of its rows.
struct MappedRows {
  const Tensor& x;
  const OptionalTensor& row_map;

  c10::SymInt rows() const { return row_map.has_value() ? row_map->sym_size(0) : x.sym_size(0); }
  c10::SymInt cols() const { return x.sym_size(1); }
};

void check_input(const MappedRows& in, const Tensor& offsets, const QuantizeSpec& spec) {
  const Tensor& x = in.x;
  check_float(x, kGrouped, "x");
  TORCH_CHECK_VALUE(x.dim() == 2, kGrouped, ": argument 'x' has shape ", x.sym_sizes(), ", wanted a matrix.");
  check_offsets(offsets, x, groups_of(offsets));
  if (in.row_map.has_value()) {
    const Tensor& map = *in.row_map;
    const bool fits = map.dim() == 1 && map.scalar_type() == at::kInt && map.is_contiguous();
    TORCH_CHECK_VALUE(fits && map.device() == x.device(), kGrouped, ": argument 'row_map' is ", map.scalar_type(), " ",
                      map.sym_sizes(), " on ", map.device(), ", wanted int32 [rows], contiguous, on ", x.device(), ".");
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      spec.kind == QuantizeSpec::kDelayed || spec.kind == QuantizeSpec::kCurrent || spec.kind == QuantizeSpec::kBlock1d,
      kGrouped, ": argument 'quantizer' is of kind '", kQuantizerKinds[spec.kind].name,
      "', wanted delayed, current or block1d.");
}

// The shape of scales in a direction. panels: P, or 0 for rowwise.
std::array<c10::SymInt, 2> scales_of(te_scaling scaling, const MappedRows& in, size_t groups, bool panels) {
  if (scaling == TE_SCALING_TENSOR) return {1, int64_t(groups)};
  if (panels) return {most_panels(in.rows(), groups), rounded_up(in.cols(), 4)};
  return te::scale_shape(scaling, in.rows(), in.cols());
}

// Not initialized. apart: the scales of TENSOR are allocated twice, as the results of an op may not share memory.
Quantized empty_grouped(const QuantizeSpec& spec, const MappedRows& in, size_t groups, QuantizeUsage usage,
                        bool apart) {
  const auto bytes = in.x.options().dtype(at::kByte), floats = in.x.options().dtype(at::kFloat);
  Quantized q;
  q.scaling = spec.scaling();
  q.e5m2 = spec.e5m2;
  const c10::SymInt rows = in.rows(), cols = in.cols();
  if (usage.rowwise) {
    const c10::SymInt pitch = rounded_up(cols, kRowBytes);
    const Tensor data = at::empty_symint({rows, pitch}, bytes);
    q.rowwise = pitch == cols ? data : data.narrow_symint(1, 0, cols);
    q.rowwise_scale_inv = at::empty_symint(scales_of(q.scaling, in, groups, false), floats);
  }
  if (usage.columnwise) {
    q.columnwise = at::empty_symint({most_panels(rows, groups), cols, kPanel}, bytes);
    const bool shared = usage.rowwise && q.scaling == TE_SCALING_TENSOR && !apart;
    q.columnwise_scale_inv =
        shared ? q.rowwise_scale_inv : at::empty_symint(scales_of(q.scaling, in, groups, true), floats);
  }
  return q;
}

te_tensor bytes_of(const Tensor& t, int64_t rows, int64_t cols, int64_t pitch, te_dtype dtype) {
  if (!t.defined()) return absent();
  return {t.numel() == 0 ? nullptr : t.data_ptr(),
          rows,
          cols,
          pitch,
          dtype,
          t.is_cpu() ? TE_DEVICE_CPU : int32_t(t.get_device())};
}

te_tensor floats_of(const Tensor& t, const char* argument) {
  return t.defined() ? view_2d(t, kGrouped, argument) : absent();
}

// The state of delayed scaling, one address for each group; of current scaling only the amaxes, where requested.
struct States {
  std::vector<const float*> scales;
  std::vector<float*> amaxes;

  States(at::ArrayRef<const Quantizer*> quantizers, size_t groups) {
    const QuantizeSpec& spec = quantizers[0]->spec;
    if (spec.scaling() != TE_SCALING_TENSOR || quantizers.size() != groups) {
      TORCH_CHECK_VALUE(spec.kind != QuantizeSpec::kDelayed, kGrouped, ": argument 'quantizers' has ",
                        quantizers.size(), " delayed ones, wanted ", groups, ", one for each group.");
      return;
    }
    bool any = false;
    for (const Quantizer* one : quantizers) {
      if (spec.kind == QuantizeSpec::kDelayed) scales.push_back(one->scale.const_data_ptr<float>());
      any = any || one->amax.defined();
      amaxes.push_back(one->amax.defined() ? one->amax.mutable_data_ptr<float>() : nullptr);
    }
    if (!any) amaxes.clear();
  }
};

void run(at::ArrayRef<const Quantizer*> quantizers, const MappedRows& in, const Tensor& offsets, const Quantized& out) {
  const QuantizeSpec& spec = quantizers[0]->spec;
  const size_t groups = groups_of(offsets);
  const Tensor x = rows_of(in.x);
  const States states(quantizers, groups);
  te_grouped_quantize_problem problem{};
  problem.x = view_2d(x, kGrouped, "x");
  problem.row_map = in.row_map.has_value() ? view_2d(in.row_map->unsqueeze(0), kGrouped, "row_map") : absent();
  problem.groups = int32_t(groups);
  problem.offsets = offsets.const_data_ptr<int32_t>();
  problem.scaling = spec.scaling();
  const int64_t rows = in.rows().expect_int(), cols = x.size(1);
  problem.rowwise = bytes_of(out.rowwise, rows, cols, rounded_up(cols, kRowBytes), spec.dtype());
  problem.rowwise_scale_inv = floats_of(out.rowwise_scale_inv, "rowwise_scale_inv");
  const int64_t panels = out.columnwise.defined() ? out.columnwise.size(0) : 0;
  problem.panels = bytes_of(out.columnwise, panels * cols, kPanel, kPanel, spec.dtype());
  problem.panels_scale_inv = floats_of(out.columnwise_scale_inv, "panels_scale_inv");
  problem.pow_2_scales = spec.pow_2_scales;
  problem.amax_epsilon = spec.amax_epsilon;
  problem.amax_parts = absent();
  Tensor parts;
  if (spec.kind == QuantizeSpec::kCurrent) {
    parts = at::empty({1, TE_GROUPED_QUANTIZE_PARTS + int64_t(groups)}, x.options().dtype(at::kFloat));
    problem.amax_parts = view_2d(parts, kGrouped, "amax_parts");
  }
  problem.scales = states.scales.empty() ? nullptr : states.scales.data();
  problem.amaxes = states.amaxes.empty() ? nullptr : states.amaxes.data();
  check(te_grouped_quantize(&problem, current_stream(x)));
}

}  // namespace

Quantized grouped_quantize(at::ArrayRef<const Quantizer*> quantizers, const Tensor& x, const Tensor& offsets,
                           QuantizeUsage usage, const OptionalTensor& row_map) {
  const MappedRows in{x, row_map};
  check_input(in, offsets, quantizers[0]->spec);
  const Quantized out = empty_grouped(quantizers[0]->spec, in, groups_of(offsets), usage, false);
  if (out.defined()) run(quantizers, in, offsets, out);
  return out;
}

Tensor grouped_panels(const Tensor& offsets) {
  const Tensor panels = at::empty({1}, offsets.options());
  check(te_grouped_panels(offsets.const_data_ptr<int32_t>(), int32_t(groups_of(offsets)),
                          offsets.is_cpu() ? TE_DEVICE_CPU : int32_t(offsets.get_device()),
                          panels.mutable_data_ptr<int32_t>(), current_stream(offsets)));
  return panels;
}

namespace {

FourTensors parts_of(const Quantized& q, const Tensor& x) {
  const auto or_empty = [&](const Tensor& t, at::ScalarType dtype) {
    return t.defined() ? t : at::empty({0}, x.options().dtype(dtype));
  };
  return {or_empty(q.rowwise, at::kByte), or_empty(q.rowwise_scale_inv, at::kFloat), or_empty(q.columnwise, at::kByte),
          or_empty(q.columnwise_scale_inv, at::kFloat)};
}

FourTensors grouped_quantize_meta(const Tensor& x, const Tensor& offsets, at::ArrayRef<int64_t> packed, bool rowwise,
                                  bool panels, const OptionalTensor& row_map) {
  const QuantizeSpec spec = stateless_quantizer(packed).spec;
  const MappedRows in{x, row_map};
  check_input(in, offsets, spec);
  return parts_of(empty_grouped(spec, in, groups_of(offsets), {rowwise, panels}, true), x);
}

}  // namespace

FourTensors grouped_quantize_op(const Tensor& x, const Tensor& offsets, at::ArrayRef<int64_t> packed, bool rowwise,
                                bool panels, const OptionalTensor& row_map) {
  const Quantizer quantizer = stateless_quantizer(packed);
  const Quantizer* one = &quantizer;
  const MappedRows in{x, row_map};
  check_input(in, offsets, quantizer.spec);
  const Quantized out = empty_grouped(quantizer.spec, in, groups_of(offsets), {rowwise, panels}, true);
  if (out.defined()) run(one, in, offsets, out);
  return parts_of(out, x);
}

Tensor grouped_dequantize(const Tensor& data, const Tensor& scale_inv, const Tensor& offsets, bool e5m2,
                          at::ScalarType dtype) {
  const c10::SymInt groups = offsets.sym_size(0) - 1;
  const Tensor rows = at::arange(data.sym_size(0), offsets.options());
  const Tensor group = at::bucketize(rows, offsets.slice_symint(0, 1), true, true).clamp_max(groups - 1);
  const Tensor values = data.contiguous().view(e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn).to(at::kFloat);
  return (values * scale_inv.flatten().index_select(0, group).unsqueeze(1)).to(dtype);
}

TE_OP_REGISTRATION(grouped_quantize, ops) {
  ops.op("grouped_quantize(Tensor x, Tensor offsets, int[] spec, bool rowwise, bool panels, Tensor? row_map=None) -> "
         "(Tensor, Tensor, Tensor, Tensor)")
      .kernel(grouped_quantize_op)
      .meta(grouped_quantize_meta);
}

}  // namespace te_torch
