// See grouped_gemm_fp8.h. This file adds biases that the engine does not add, and adds to targets, with the roundings
// of one GEMM a group.
#include "gemm/grouped_gemm_fp8.h"

#include <ATen/ops/empty.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <transformer_engine/scaling.h>

#include "core/grouped_operands.h"
#include "core/op_registration.h"
#include "core/rows_view.h"

namespace te_torch {

namespace {

using namespace grouped;  // NOLINT: the shared half of this file

constexpr int64_t kPanel = 128;

struct Code {
  te_scaling scaling;
  te_dtype dtype;

  Code(int64_t code, const char* argument)
      : scaling(te_scaling(code / 2)), dtype(code % 2 != 0 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3) {
    TORCH_CHECK_VALUE(code >= 0 && (scaling == TE_SCALING_TENSOR || scaling == TE_SCALING_BLOCK_1D), kOp,
                      ": argument '", argument, "_code' is ", code, ", wanted 2 * scaling + e5m2, scaling one of ",
                      int(TE_SCALING_TENSOR), " (a tensor's) and ", int(TE_SCALING_BLOCK_1D), " (1 x 128).");
  }
  te_scaling of_weights() const { return scaling == TE_SCALING_TENSOR ? TE_SCALING_TENSOR : TE_SCALING_BLOCK_2D; }
};

void check_bytes(const Tensor& t, int64_t dims, const char* argument) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kByte && t.dim() == dims && (dims == 2 || t.sym_size(2) == kPanel), kOp,
                    ": argument '", argument, "' is ", t.scalar_type(), " ", t.sym_sizes(), ", wanted Byte ",
                    dims == 2 ? "[rows, features]" : "panels [P, features, 128]", ".");
}

void check_scales(const Tensor& scales, const Tensor& data, const char* argument, const c10::SymInt& down,
                  const c10::SymInt& along) {
  TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.dim() == 2 && scales.device() == data.device() &&
                        scales.sym_size(0) == down && scales.sym_size(1) == along && scales.is_contiguous(),
                    kOp, ": argument '", argument, "_scale_inv' is ", scales.scalar_type(), " ", scales.sym_sizes(),
                    " on ", scales.device(), ", wanted contiguous Float [", down, ", ", along, "] on ", data.device(),
                    ".");
}

void check_out_dtype(at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, kOp,
                    ": argument 'out_dtype' is ", dtype, ", wanted Float, Half or BFloat16.");
}

// FPROP and DGRAD: what they read.
struct RowsCall {
  te_grouped_product product;
  const Tensor& rows;
  const Tensor& scale_inv;
  Code code;
  at::TensorList weights, weights_scale_inv, biases;
  const Tensor& offsets;

  const char* argument() const { return product == TE_GROUPED_FPROP ? "x" : "dy"; }

  void check() const {
    check_bytes(rows, 2, argument());
    TORCH_CHECK_VALUE(!weights.empty() && weights_scale_inv.size() == weights.size(), kOp,
                      ": arguments 'weights' and 'weights_scale_inv' have ", weights.size(), " and ",
                      weights_scale_inv.size(), " tensors, wanted one for each group.");
    check_offsets(offsets, rows, weights.size());
    const bool per_tensor = code.scaling == TE_SCALING_TENSOR;
    const auto [down, along] = te::scale_shape(code.scaling, rows.sym_size(0), rows.sym_size(1));
    check_scales(scale_inv, rows, argument(), per_tensor ? c10::SymInt(1) : down,
                 per_tensor ? c10::SymInt(int64_t(weights.size())) : along);
    for (size_t g = 0; g < weights.size(); ++g) check_weight(weights[g], weights_scale_inv[g]);
    check_biases();
  }

 private:
  void check_weight(const Tensor& weight, const Tensor& scales) const {
    check_bytes(weight, 2, "weights");
    TORCH_CHECK_VALUE(weight.sym_sizes() == weights[0].sym_sizes() && weight.sym_size(1) == rows.sym_size(1) &&
                          weight.device() == rows.device(),
                      kOp, ": argument 'weights' has a tensor of shape ", weight.sym_sizes(), " on ", weight.device(),
                      ", wanted ", weights[0].sym_sizes(), ", as the first weight, with ", rows.sym_size(1),
                      " columns on ", rows.device(), ".");
    if (code.scaling != TE_SCALING_TENSOR) {
      const auto [down, along] = te::scale_shape(code.of_weights(), weight.sym_size(0), weight.sym_size(1));
      return check_scales(scales, rows, "weights", down, along);
    }
    TORCH_CHECK_VALUE(scales.scalar_type() == at::kFloat && scales.device() == rows.device() &&
                          (scales.sym_numel() == 1 || scales.sym_numel() == 2),
                      kOp, ": argument 'weights_scale_inv' has ", scales.scalar_type(), " ", scales.sym_sizes(), " on ",
                      scales.device(), ", wanted Float, one scale, or it and its inverse, on ", rows.device(), ".");
  }

  void check_biases() const {
    TORCH_CHECK_VALUE(biases.empty() || biases.size() == weights.size(), kOp, ": argument 'biases' has ", biases.size(),
                      " tensors, wanted none, or ", weights.size(), ".");
    for (const Tensor& bias : biases) {
      check_float(bias, kOp, "bias");
      TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_size(0) == weights[0].sym_size(0) &&
                            bias.device() == rows.device() && bias.scalar_type() == biases[0].scalar_type(),
                        kOp, ": argument 'bias' is ", bias.scalar_type(), " ", bias.sym_sizes(), " on ", bias.device(),
                        ", wanted ", biases[0].scalar_type(), " [", weights[0].sym_size(0), "] on ", rows.device(),
                        ".");
    }
  }
};

void add_biases(const Tensor& d, at::TensorList biases, const Tensor& offsets) {
  const int32_t* at = offsets.const_data_ptr<int32_t>();
  for (size_t g = 0; g < biases.size(); ++g) d.narrow(0, at[g], at[g + 1] - at[g]).add_(biases[g]);
}

void run_rows(const RowsCall& call, const Tensor& out, bool zero_tail) {
  const c10::NoGradGuard no_graph;
  // The engine adds biases of bfloat16, of float16 beside float16; the CPU adds others after the GEMM.
  const at::ScalarType added = out.scalar_type() == at::kHalf ? at::kHalf : at::kBFloat16;
  const bool apart = out.is_cpu() && !call.biases.empty() && call.biases[0].scalar_type() != added;
  const Tensor d = apart ? at::empty(out.sizes(), out.options().dtype(at::kFloat)) : out;
  Operands operands;
  te_grouped_gemm_problem problem{};
  problem.product = call.product;
  problem.groups = int32_t(call.weights.size());
  problem.offsets = call.offsets.const_data_ptr<int32_t>();
  problem.rows = operands.add_bytes(call.rows, call.code.dtype, call.argument());
  problem.depth_rows = problem.depth_rows_scale_inv = absent();
  problem.scaling = call.code.scaling;
  problem.rows_scale_inv = view_2d(call.scale_inv, kOp, "rows_scale_inv");
  std::vector<te_tensor> weights, scales;
  weights.reserve(call.weights.size());
  scales.reserve(call.weights.size());
  for (size_t g = 0; g < call.weights.size(); ++g) {
    weights.push_back(operands.add_bytes(call.weights[g], TE_FLOAT8_E4M3, "weights"));
    scales.push_back(view_2d(call.weights_scale_inv[g], kOp, "weights_scale_inv"));
  }
  const std::vector<te_tensor> biases = operands.add_biases(apart ? at::TensorList() : call.biases);
  problem.weights = weights.data();
  problem.weights_scale_inv = scales.data();
  problem.biases = biases.empty() ? nullptr : biases.data();
  problem.result = view_2d(d, kOp, "out");
  problem.zero_tail = zero_tail ? 1 : 0;
  check(te_grouped_gemm(&problem, current_stream(call.rows)));
  operands.note();
  if (!apart) return;
  add_biases(d, call.biases, call.offsets);
  const int64_t live = zero_tail ? out.size(0) : call.offsets.const_data_ptr<int32_t>()[problem.groups];
  out.narrow(0, 0, live).copy_(d.narrow(0, 0, live));
}

Tensor rows_product(const RowsCall& call, at::ScalarType out_dtype) {
  call.check();
  check_out_dtype(out_dtype);
  const Tensor d = at::empty({call.rows.size(0), call.weights[0].size(0)}, call.rows.options().dtype(out_dtype));
  run_rows(call, d, true);
  return d;
}

Tensor rows_meta(const RowsCall& call, at::ScalarType out_dtype) {
  call.check();
  check_out_dtype(out_dtype);
  return at::empty_symint({call.rows.sym_size(0), call.weights[0].sym_size(0)}, call.rows.options().dtype(out_dtype));
}

void rows_into(const RowsCall& call, const Tensor& out) {
  call.check();
  check_float(out, kOp, "out");
  run_rows(call, out, false);
}

// WGRAD: what it reads.
struct PanelsCall {
  const Tensor& dy;
  const Tensor& dy_scale_inv;
  Code dy_code;
  const Tensor& x;
  const Tensor& x_scale_inv;
  Code x_code;
  const Tensor& offsets;

  size_t groups() const { return groups_of(offsets); }

  void check() const {
    check_offsets(offsets, x, groups());
    check_panels(dy, dy_scale_inv, "dy");
    check_panels(x, x_scale_inv, "x");
    TORCH_CHECK_VALUE(dy.sym_size(0) == x.sym_size(0) && dy.device() == x.device() && dy_code.scaling == x_code.scaling,
                      kOp, ": argument 'dy' has ", dy.sym_size(0), " panels on ", dy.device(), ", wanted ",
                      x.sym_size(0), " on ", x.device(), " in x's scaling.");
  }

 private:
  void check_panels(const Tensor& panels, const Tensor& scales, const char* argument) const {
    check_bytes(panels, 3, argument);
    const bool per_tensor = x_code.scaling == TE_SCALING_TENSOR;
    check_scales(scales, panels, argument, per_tensor ? c10::SymInt(1) : panels.sym_size(0),
                 per_tensor ? c10::SymInt(int64_t(groups())) : (panels.sym_size(1) + 3) / 4 * 4);
  }
};

PanelsCall panels(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                  const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets) {
  const PanelsCall call{dy, dy_scale_inv, Code(dy_code, "dy"), x, x_scale_inv, Code(x_code, "x"), offsets};
  call.check();
  return call;
}

// results: one for each group; absent ones are not wanted.
void run_panels(const PanelsCall& call, const std::vector<te_tensor>& results, const uint8_t* accumulate) {
  const c10::NoGradGuard no_graph;
  Operands operands;
  te_grouped_gemm_problem problem{};
  problem.product = TE_GROUPED_WGRAD;
  problem.groups = int32_t(results.size());
  problem.offsets = call.offsets.const_data_ptr<int32_t>();
  problem.rows = operands.add_bytes(call.dy.flatten(0, 1), call.dy_code.dtype, "dy");
  problem.depth_rows = operands.add_bytes(call.x.flatten(0, 1), call.x_code.dtype, "x");
  problem.scaling = call.x_code.scaling;
  problem.rows_scale_inv = view_2d(call.dy_scale_inv, kOp, "dy_scale_inv");
  problem.depth_rows_scale_inv = view_2d(call.x_scale_inv, kOp, "x_scale_inv");
  problem.result = absent();
  problem.results = results.data();
  problem.accumulate = accumulate;
  check(te_grouped_gemm(&problem, current_stream(call.x)));
  operands.note();
}

std::vector<Tensor> new_results(const PanelsCall& call, at::ScalarType dtype) {
  std::vector<Tensor> all(call.groups());
  for (Tensor& one : all) {
    one = at::empty_symint({call.dy.sym_size(1), call.x.sym_size(1)}, call.x.options().dtype(dtype));
  }
  return all;
}

std::vector<Tensor> filled(const PanelsCall& call, std::vector<Tensor> results) {
  run_panels(call, views_of_results(results), nullptr);
  return results;
}

std::vector<Tensor> grouped_fp8_wgrad_meta(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code,
                                           const Tensor& x, const Tensor& x_scale_inv, int64_t x_code,
                                           const Tensor& offsets, at::ScalarType out_dtype) {
  const PanelsCall call = panels(dy, dy_scale_inv, dy_code, x, x_scale_inv, x_code, offsets);
  check_out_dtype(out_dtype);
  return new_results(call, out_dtype);
}

Tensor new_stacked(const PanelsCall& call, at::ScalarType dtype) {
  return at::empty_symint({int64_t(call.groups()), call.dy.sym_size(1), call.x.sym_size(1)},
                          call.x.options().dtype(dtype));
}

Tensor grouped_fp8_wgrad_stacked_meta(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                      const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets,
                                      at::ScalarType out_dtype) {
  check_out_dtype(out_dtype);
  return new_stacked(panels(dy, dy_scale_inv, dy_code, x, x_scale_inv, x_code, offsets), out_dtype);
}

void grouped_fp8_wgrad_accumulate_meta(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                       const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets,
                                       at::TensorList outs, at::ArrayRef<int64_t> modes) {
  const PanelsCall call = panels(dy, dy_scale_inv, dy_code, x, x_scale_inv, x_code, offsets);
  check_targets(x, dy.sym_size(1), x.sym_size(1), outs, modes, call.groups());
}

Tensor grouped_fp8_fprop_meta(const Tensor& x, const Tensor& x_scale_inv, int64_t x_code, at::TensorList weights,
                              at::TensorList weights_scale_inv, at::TensorList biases, const Tensor& offsets,
                              at::ScalarType out_dtype) {
  return rows_meta({TE_GROUPED_FPROP, x, x_scale_inv, Code(x_code, "x"), weights, weights_scale_inv, biases, offsets},
                   out_dtype);
}

Tensor grouped_fp8_dgrad_meta(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, at::TensorList weights,
                              at::TensorList weights_scale_inv, const Tensor& offsets, at::ScalarType out_dtype) {
  return rows_meta({TE_GROUPED_DGRAD, dy, dy_scale_inv, Code(dy_code, "dy"), weights, weights_scale_inv, {}, offsets},
                   out_dtype);
}

}  // namespace

Tensor grouped_fp8_fprop(const Tensor& x, const Tensor& x_scale_inv, int64_t x_code, at::TensorList weights,
                         at::TensorList weights_scale_inv, at::TensorList biases, const Tensor& offsets,
                         at::ScalarType out_dtype) {
  return rows_product(
      {TE_GROUPED_FPROP, x, x_scale_inv, Code(x_code, "x"), weights, weights_scale_inv, biases, offsets}, out_dtype);
}

Tensor grouped_fp8_dgrad(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, at::TensorList weights,
                         at::TensorList weights_scale_inv, const Tensor& offsets, at::ScalarType out_dtype) {
  return rows_product(
      {TE_GROUPED_DGRAD, dy, dy_scale_inv, Code(dy_code, "dy"), weights, weights_scale_inv, {}, offsets}, out_dtype);
}

void grouped_fp8_fprop_into(const Tensor& x, const Tensor& x_scale_inv, int64_t x_code, at::TensorList weights,
                            at::TensorList weights_scale_inv, at::TensorList biases, const Tensor& offsets,
                            const Tensor& out) {
  rows_into({TE_GROUPED_FPROP, x, x_scale_inv, Code(x_code, "x"), weights, weights_scale_inv, biases, offsets}, out);
}

void grouped_fp8_dgrad_into(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, at::TensorList weights,
                            at::TensorList weights_scale_inv, const Tensor& offsets, const Tensor& out) {
  rows_into({TE_GROUPED_DGRAD, dy, dy_scale_inv, Code(dy_code, "dy"), weights, weights_scale_inv, {}, offsets}, out);
}

std::vector<Tensor> grouped_fp8_wgrad(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                      const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets,
                                      at::ScalarType out_dtype) {
  const PanelsCall call = panels(dy, dy_scale_inv, dy_code, x, x_scale_inv, x_code, offsets);
  check_out_dtype(out_dtype);
  return filled(call, new_results(call, out_dtype));
}

std::vector<Tensor> grouped_fp8_wgrad_together(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code,
                                               const Tensor& x, const Tensor& x_scale_inv, int64_t x_code,
                                               const Tensor& offsets, at::ScalarType out_dtype) {
  const PanelsCall call = panels(dy, dy_scale_inv, dy_code, x, x_scale_inv, x_code, offsets);
  check_out_dtype(out_dtype);
  return filled(call, new_matrices(call.groups(), dy.size(1), x.size(1), x.options().dtype(out_dtype)));
}

Tensor grouped_fp8_wgrad_stacked(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                 const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets,
                                 at::ScalarType out_dtype) {
  const PanelsCall call = panels(dy, dy_scale_inv, dy_code, x, x_scale_inv, x_code, offsets);
  check_out_dtype(out_dtype);
  Tensor all = new_stacked(call, out_dtype);
  run_panels(call, views_of_stacked(all), nullptr);
  return all;
}

void grouped_fp8_wgrad_accumulate(const Tensor& dy, const Tensor& dy_scale_inv, int64_t dy_code, const Tensor& x,
                                  const Tensor& x_scale_inv, int64_t x_code, const Tensor& offsets, at::TensorList outs,
                                  at::ArrayRef<int64_t> modes) {
  const PanelsCall call = panels(dy, dy_scale_inv, dy_code, x, x_scale_inv, x_code, offsets);
  check_targets(x, dy.sym_size(1), x.sym_size(1), outs, modes, call.groups());
  const Targets targets(outs, modes);
  if (!x.is_cpu()) {
    check_apart(outs);
    run_panels(call, views_of_results(targets.results), targets.accumulate.data());
    for (const Tensor& out : outs) note_written(out);
    return;
  }
  const c10::NoGradGuard no_graph;
  // A sum of its own, as a product of each group adds it.
  const std::vector<Tensor> all = filled(call, new_results(call, at::kFloat));
  for (size_t g = 0; g < modes.size(); ++g) {
    if (modes[g] == 0) targets.results[g].add_(all[g]);
    if (modes[g] > 0) targets.results[g].copy_(all[g]);
  }
}

TE_OP_REGISTRATION(grouped_gemm_fp8, ops) {
  ops.op("grouped_fp8_fprop(Tensor x, Tensor x_scale_inv, int x_code, Tensor[] weights, Tensor[] weights_scale_inv, "
         "Tensor[] biases, Tensor offsets, ScalarType out_dtype) -> Tensor")
      .kernel(grouped_fp8_fprop)
      .meta(grouped_fp8_fprop_meta);
  ops.op("grouped_fp8_dgrad(Tensor dy, Tensor dy_scale_inv, int dy_code, Tensor[] weights, Tensor[] "
         "weights_scale_inv, Tensor offsets, ScalarType out_dtype) -> Tensor")
      .kernel(grouped_fp8_dgrad)
      .meta(grouped_fp8_dgrad_meta);
  ops.op("grouped_fp8_wgrad(Tensor dy, Tensor dy_scale_inv, int dy_code, Tensor x, Tensor x_scale_inv, int x_code, "
         "Tensor offsets, ScalarType out_dtype) -> Tensor[]")
      .kernel(grouped_fp8_wgrad)
      .meta(grouped_fp8_wgrad_meta);
  ops.op("grouped_fp8_wgrad_stacked(Tensor dy, Tensor dy_scale_inv, int dy_code, Tensor x, Tensor x_scale_inv, int "
         "x_code, Tensor offsets, ScalarType out_dtype) -> Tensor")
      .kernel(grouped_fp8_wgrad_stacked)
      .meta(grouped_fp8_wgrad_stacked_meta);
  ops.op("grouped_fp8_wgrad_accumulate(Tensor dy, Tensor dy_scale_inv, int dy_code, Tensor x, Tensor x_scale_inv, int "
         "x_code, Tensor offsets, Tensor(a!)[] outs, int[] how) -> ()")
      .kernel(grouped_fp8_wgrad_accumulate)
      .meta(grouped_fp8_wgrad_accumulate_meta);
}

}  // namespace te_torch
