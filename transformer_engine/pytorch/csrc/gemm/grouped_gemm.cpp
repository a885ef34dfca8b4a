// See grouped_gemm.h. The CPU computes group by group with linear_core; CUDA launches one kernel a GEMM.
#include "gemm/grouped_gemm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <map>
#include <mutex>

#include "core/grouped_operands.h"
#include "core/op_registration.h"
#include "core/rows_view.h"
#include "gemm/gemm.h"
#include "gemm/linear_core.h"
#include "quantize/quantize.h"

namespace te_torch {

namespace {

using namespace grouped;  // NOLINT: the shared half of this file

void check_matrix(const Tensor& t, const char* argument) {
  check_float(t, kOp, argument);
  TORCH_CHECK_VALUE(t.dim() == 2, kOp, ": argument '", argument, "' has shape ", t.sym_sizes(), ", wanted a matrix.");
}

// width: of the weights' dimension that is reduced. argument: what `rows` is called.
void check_weights(const Tensor& rows, const char* argument, at::TensorList weights, int64_t width,
                   const Tensor& offsets) {
  check_matrix(rows, argument);
  TORCH_CHECK_VALUE(!weights.empty(), kOp, ": argument 'weights' is empty, wanted one for each group.");
  const bool stacked = is_stacked(weights);
  if (stacked) check_stacked(kOp, "weights", weights[0]);
  check_offsets(offsets, rows, weights_in(weights));
  for (const Tensor& weight : weights) {
    check_same(weight, rows, kOp, "weight");
    TORCH_CHECK_VALUE(stacked || (weight.dim() == 2 && weight.sym_sizes() == weights[0].sym_sizes()), kOp,
                      ": argument 'weight' has shape ", weight.sym_sizes(), ", wanted that of the first, ",
                      weights[0].sym_sizes(), ".");
  }
  TORCH_CHECK_VALUE(rows.sym_size(1) == weights[0].sym_size(width - 2), kOp, ": argument '", argument, "' has shape ",
                    rows.sym_sizes(), ", wanted a last dimension of ", weights[0].sym_size(width - 2), ".");
}

void check_biases(const Tensor& x, at::TensorList weights, at::TensorList biases) {
  TORCH_CHECK_VALUE(biases.empty() || biases.size() == weights_in(weights), kOp, ": argument 'biases' has ",
                    biases.size(), " tensors, wanted none, or ", weights_in(weights), ".");
  for (const Tensor& bias : biases) {
    check_same(bias, x, kOp, "bias");
    TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_size(0) == weights[0].sym_size(-2), kOp,
                      ": argument 'bias' has shape ", bias.sym_sizes(), ", wanted [", weights[0].sym_size(-2), "].");
  }
}

void check_gradient(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_matrix(dy, "dy");
  check_matrix(x, "x");
  check_same(x, dy, kOp, "x");
  TORCH_CHECK_VALUE(dy.sym_size(0) == x.sym_size(0), kOp, ": argument 'dy' has ", dy.sym_size(0), " rows, wanted ",
                    x.sym_size(0), ", x's.");
  check_offsets(offsets, x, groups_of(offsets));
}

struct HostOffsets {
  const int32_t* at;
  size_t groups;

  explicit HostOffsets(const Tensor& offsets)
      : at(offsets.const_data_ptr<int32_t>()), groups(size_t(offsets.numel() - 1)) {}
  Tensor rows(const Tensor& t, size_t g) const { return t.narrow(0, at[g], at[g + 1] - at[g]); }
};

// Of group g.
Tensor weight_at(at::TensorList weights, size_t g) {
  return is_stacked(weights) ? matrix_at(weights[0], int64_t(g)) : weights[g];
}

// FPROP and DGRAD on a CPU.
void rows_by_group(te_grouped_product product, const Tensor& rows, at::TensorList weights, at::TensorList biases,
                   const Tensor& offsets, const Tensor& out, bool zero_tail) {
  const HostOffsets host(offsets);
  for (size_t g = 0; g < host.groups; ++g) {
    if (product == TE_GROUPED_FPROP) {
      const OptionalTensor bias = biases.empty() ? OptionalTensor() : OptionalTensor(biases[g]);
      linear_fwd_into(host.rows(rows, g), weight_at(weights, g), bias, host.rows(out, g));
    } else {
      linear_dgrad_into(host.rows(rows, g), weight_at(weights, g), host.rows(out, g));
    }
  }
  if (zero_tail) out.narrow(0, host.at[host.groups], out.size(0) - host.at[host.groups]).zero_();
}

// The bytes from each weight to the next where this distance is the same for all, in one storage, as for the weights of
// a GroupedLinear; else 0.
int64_t spacing_of(at::TensorList weights) {
  if (weights.size() < 2) return 0;
  const Tensor& first = weights[0];
  const int64_t step = weights[1].storage_offset() - first.storage_offset();
  for (size_t g = 1; g < weights.size(); ++g) {
    const Tensor& weight = weights[g];
    const bool fits = weight.storage().unsafeGetStorageImpl() == first.storage().unsafeGetStorageImpl() &&
                      weight.storage_offset() == first.storage_offset() + int64_t(g) * step &&
                      weight.strides() == first.strides() && weight.is_neg() == first.is_neg();
    if (!fits) return 0;
  }
  return step * int64_t(first.element_size());
}

// The views of weights of one shape and dtype. With one distance between them all follow from the first view: those of
// a stacked tensor are to the bit those of a list of its matrices.
std::vector<te_tensor> add_weights(Operands& operands, at::TensorList weights) {
  std::vector<te_tensor> views;
  const size_t groups = weights_in(weights);
  views.reserve(groups);
  const Tensor first = weight_at(weights, 0);
  const int64_t spacing = is_stacked(weights) ? int64_t(first.nbytes()) : spacing_of(weights);
  views.push_back(operands.add(first, "weight"));
  const bool read_there = spacing % 16 == 0 && spacing != 0 && views[0].data == first.const_data_ptr();
  for (size_t g = 1; g < groups; ++g) {
    if (read_there) {
      views.push_back(views[0]);
      views[g].data = static_cast<char*>(views[0].data) + int64_t(g) * spacing;
    } else {
      views.push_back(operands.add(weight_at(weights, g), "weight"));
    }
  }
  return views;
}

// results: one for each group; absent ones are not wanted.
void weights_by_kernel(const Tensor& dy, const Tensor& x, const Tensor& offsets, const std::vector<te_tensor>& results,
                       const std::vector<uint8_t>& accumulate) {
  Operands operands;
  te_grouped_gemm_problem problem{};
  problem.product = TE_GROUPED_WGRAD;
  problem.groups = int32_t(results.size());
  problem.offsets = offsets.const_data_ptr<int32_t>();
  problem.rows = operands.add(dy, "dy");
  problem.depth_rows = operands.add(x, "x");
  problem.result = absent();
  problem.results = results.data();
  problem.accumulate = accumulate.empty() ? nullptr : accumulate.data();
  check(te_grouped_gemm(&problem, current_stream(x)));
  operands.note();
}

// dy^T times a column of ones: the sums come from the product's one accumulator an element, in the order of the rows.
Tensor sums_by_kernel(const Tensor& dy, const Tensor& offsets) {
  const int64_t width = 16 / int64_t(dy.element_size());  // rows on 16 bytes
  const Tensor ones = at::full({dy.size(0), width}, 1, dy.options()).narrow(1, 0, 1);
  const Tensor sums = at::empty({offsets.size(0) - 1, dy.size(1)}, dy.options());
  te_tensor column = view_2d(sums.view({-1, 1}), kOp, "sums");
  column.rows = dy.size(1);
  std::vector<te_tensor> results(size_t(sums.size(0)), column);
  for (size_t g = 0; g < results.size() && column.data != nullptr; ++g) {
    results[g].data = static_cast<char*>(column.data) + int64_t(g) * column.rows * int64_t(sums.element_size());
  }
  weights_by_kernel(dy, ones, offsets, results, {});
  return sums;
}

void check_fprop(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets) {
  check_weights(x, "x", weights, 1, offsets);
  check_biases(x, weights, biases);
}

Tensor grouped_offsets_meta(const Tensor& splits, const Tensor&, bool) {
  return at::empty_symint({splits.sym_size(0) + 1}, splits.options().dtype(at::kInt));
}
Tensor grouped_fprop_meta(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets) {
  check_fprop(x, weights, biases, offsets);
  return x.new_empty_symint({x.sym_size(0), weights[0].sym_size(-2)});
}
Tensor grouped_dgrad_meta(const Tensor& dy, at::TensorList weights, const Tensor& offsets) {
  check_weights(dy, "dy", weights, 0, offsets);
  return dy.new_empty_symint({dy.sym_size(0), weights[0].sym_size(-1)});
}
std::vector<Tensor> grouped_wgrad_meta(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_gradient(dy, x, offsets);
  std::vector<Tensor> all;
  for (int64_t g = 1; g < offsets.size(0); ++g) all.push_back(x.new_empty_symint({dy.sym_size(1), x.sym_size(1)}));
  return all;
}
Tensor grouped_wgrad_stacked_meta(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_gradient(dy, x, offsets);
  return x.new_empty_symint({int64_t(groups_of(offsets)), dy.sym_size(1), x.sym_size(1)});
}
Tensor grouped_sums_meta(const Tensor& dy, const Tensor& offsets, bool) {
  check_gradient(dy, dy, offsets);
  return dy.new_empty_symint({offsets.sym_size(0) - 1, dy.sym_size(1)});
}
void grouped_wgrad_accumulate_meta(const Tensor& dy, const Tensor& x, const Tensor& offsets, at::TensorList outs,
                                   at::ArrayRef<int64_t> modes) {
  check_gradient(dy, x, offsets);
  check_targets(x, dy.sym_size(1), x.sym_size(1), outs, modes, groups_of(offsets));
}

}  // namespace

// The counters between two numbers of a step, by which a reader sees whether a copy of all is complete.
constexpr int64_t kRecord = 5;

Tensor split_counters(const at::Device& given) {
  const at::Device device = indexed(given);
  static auto* mutex = new std::mutex;
  static auto* all = new std::map<std::pair<at::DeviceType, int>, Tensor>;
  const std::lock_guard<std::mutex> lock(*mutex);
  Tensor& counters = (*all)[{device.type(), device.index()}];
  if (!counters.defined()) {
    const c10::InferenceMode normal(false);  // a tensor made there would be an inference tensor for good
    counters = at::zeros({kRecord}, at::TensorOptions(device).dtype(at::kUInt32)).narrow(0, 1, kRecord - 2);
  }
  return counters;
}

Tensor grouped_offsets(const Tensor& splits, const Tensor& x, bool count) {
  const bool wide = splits.scalar_type() == at::kLong;
  TORCH_CHECK_VALUE((wide || splits.scalar_type() == at::kInt) && splits.dim() == 1 && splits.numel() > 0, kOp,
                    ": argument 'm_splits' is ", splits.scalar_type(), " ", splits.sizes(),
                    ", wanted Int or Long, one for each group.");
  TORCH_CHECK_VALUE(splits.device() == x.device(), kOp, ": argument 'm_splits' is on ", splits.device(), ", wanted ",
                    x.device(), ".");
  const int64_t rows = x.dim() < 2 ? 1 : x.size(-1) == 0 ? x.flatten(0, -2).size(0) : x.numel() / x.size(-1);
  const Tensor dense = splits.contiguous(), offsets = at::empty({splits.numel() + 1}, splits.options().dtype(at::kInt));
  void* const counters = count ? split_counters(x.device()).mutable_data_ptr() : nullptr;
  check(te_grouped_offsets(dense.const_data_ptr(), wide ? 1 : 0, int32_t(dense.numel()), rows,
                           x.is_cpu() ? TE_DEVICE_CPU : int32_t(x.get_device()), offsets.mutable_data_ptr<int32_t>(),
                           static_cast<uint32_t*>(counters), current_stream(x)));
  return offsets;
}

Tensor grouped_offsets_of(at::ArrayRef<int64_t> splits, const Tensor& like) {
  const Tensor offsets = at::empty({int64_t(splits.size()) + 1}, like.options().dtype(at::kInt));
  check(te_grouped_offsets_of(splits.data(), int32_t(splits.size()),
                              like.is_cpu() ? TE_DEVICE_CPU : int32_t(like.get_device()),
                              offsets.mutable_data_ptr<int32_t>(), current_stream(like)));
  return offsets;
}

Tensor grouped_rows(te_grouped_product product, const Tensor& rows, at::TensorList weights, at::TensorList biases,
                    const Tensor& offsets, const Tensor& out) {
  const bool fprop = product == TE_GROUPED_FPROP;
  fprop ? check_fprop(rows, weights, biases, offsets) : check_weights(rows, "dy", weights, 0, offsets);
  const c10::NoGradGuard no_graph;
  const Tensor y = out.defined() ? out : at::empty({rows.size(0), weights[0].size(fprop ? -2 : -1)}, rows.options());
  const bool zero_tail = !out.defined();
  if (rows.is_cpu()) {
    rows_by_group(product, rows, weights, biases, offsets, y, zero_tail);
    return y;
  }
  Operands operands;
  te_grouped_gemm_problem problem{};
  problem.product = product;
  problem.groups = int32_t(weights_in(weights));
  problem.offsets = offsets.const_data_ptr<int32_t>();
  problem.rows = operands.add(rows, fprop ? "x" : "dy");
  problem.depth_rows = absent();
  const std::vector<te_tensor> of_weights = add_weights(operands, weights);
  const std::vector<te_tensor> of_biases = operands.add_biases(biases);
  problem.weights = of_weights.data();
  problem.biases = biases.empty() ? nullptr : of_biases.data();
  problem.result = view_2d(y, kOp, "out");
  problem.zero_tail = zero_tail ? 1 : 0;
  check(te_grouped_gemm(&problem, current_stream(rows)));
  operands.note();
  return y;
}

Tensor grouped_fprop(const Tensor& x, at::TensorList weights, at::TensorList biases, const Tensor& offsets) {
  return grouped_rows(TE_GROUPED_FPROP, x, weights, biases, offsets, {});
}

Tensor grouped_dgrad(const Tensor& dy, at::TensorList weights, const Tensor& offsets) {
  return grouped_rows(TE_GROUPED_DGRAD, dy, weights, {}, offsets, {});
}

std::vector<Tensor> grouped_wgrad(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_gradient(dy, x, offsets);
  const c10::NoGradGuard no_graph;
  std::vector<Tensor> all;
  if (!x.is_cpu()) {
    all.resize(groups_of(offsets));
    for (Tensor& one : all) one = at::empty({dy.size(1), x.size(1)}, x.options());
    weights_by_kernel(dy, x, offsets, views_of_results(all), {});
    return all;
  }
  const HostOffsets host(offsets);
  for (size_t g = 0; g < host.groups; ++g) {
    all.push_back(std::get<0>(linear_wgrad(host.rows(dy, g), host.rows(x, g), false)));
  }
  return all;
}

std::vector<Tensor> grouped_wgrad_together(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  if (x.is_cpu()) return grouped_wgrad(dy, x, offsets);
  check_gradient(dy, x, offsets);
  const c10::NoGradGuard no_graph;
  std::vector<Tensor> all = new_matrices(groups_of(offsets), dy.size(1), x.size(1), x.options());
  weights_by_kernel(dy, x, offsets, views_of_results(all), {});
  return all;
}

Tensor grouped_wgrad_stacked(const Tensor& dy, const Tensor& x, const Tensor& offsets) {
  check_gradient(dy, x, offsets);
  const c10::NoGradGuard no_graph;
  const Tensor all = at::empty({int64_t(groups_of(offsets)), dy.size(1), x.size(1)}, x.options());
  if (!x.is_cpu()) {
    weights_by_kernel(dy, x, offsets, views_of_stacked(all), {});
    return all;
  }
  const HostOffsets host(offsets);
  for (size_t g = 0; g < host.groups; ++g) {
    linear_wgrad_into(host.rows(dy, g), host.rows(x, g), false, matrix_at(all, int64_t(g)));
  }
  return all;
}

Tensor grouped_sums(const Tensor& dy, const Tensor& offsets, bool as_quantized) {
  check_gradient(dy, dy, offsets);
  const c10::NoGradGuard no_graph;
  if (!dy.is_cpu()) return sums_by_kernel(dy, offsets);
  const HostOffsets host(offsets);
  const Tensor sums = at::empty({int64_t(host.groups), dy.size(1)}, dy.options());
  static const Quantizer summing{{QuantizeSpec::kBlock1d, false, false, 0.f}, {}, {}, {}};
  for (size_t g = 0; g < host.groups; ++g) {
    Tensor sum;
    as_quantized ? void(quantize(summing, host.rows(dy, g), {}, &sum)) : void(sum = host.rows(dy, g).sum(0));
    sums.select(0, int64_t(g)).copy_(sum);
  }
  return sums;
}

void grouped_wgrad_accumulate(const Tensor& dy, const Tensor& x, const Tensor& offsets, at::TensorList outs,
                              at::ArrayRef<int64_t> modes) {
  check_gradient(dy, x, offsets);
  check_targets(x, dy.sym_size(1), x.sym_size(1), outs, modes, groups_of(offsets));
  const c10::NoGradGuard no_graph;
  const Targets targets(outs, modes);
  if (!x.is_cpu()) {
    check_apart(outs);
    weights_by_kernel(dy, x, offsets, views_of_results(targets.results), targets.accumulate);
    for (const Tensor& out : outs) note_written(out);
    return;
  }
  const HostOffsets host(offsets);
  for (size_t g = 0; g < modes.size(); ++g) {
    Tensor out = targets.results[g];
    if (out.defined()) gemm_accumulate(host.rows(x, g), host.rows(dy, g), "NT", out, false, modes[g] == 1);
  }
}

TE_OP_REGISTRATION(grouped_gemm, ops) {
  ops.op("grouped_offsets(Tensor splits, Tensor x, bool count=True) -> Tensor")
      .kernel(grouped_offsets)
      .meta(grouped_offsets_meta)
      .python([](const Tensor& splits, const Tensor& x, bool count) {
        if (!must_dispatch({&splits, &x})) return grouped_offsets(splits, x, count);
        return Dispatched::call<grouped_offsets>("te::grouped_offsets", splits, x, count);
      });
  ops.op("grouped_fprop(Tensor x, Tensor[] weights, Tensor[] biases, Tensor offsets) -> Tensor")
      .kernel(grouped_fprop)
      .meta(grouped_fprop_meta);
  ops.op("grouped_dgrad(Tensor dy, Tensor[] weights, Tensor offsets) -> Tensor")
      .kernel(grouped_dgrad)
      .meta(grouped_dgrad_meta);
  ops.op("grouped_wgrad(Tensor dy, Tensor x, Tensor offsets) -> Tensor[]")
      .kernel(grouped_wgrad)
      .meta(grouped_wgrad_meta);
  ops.op("grouped_wgrad_stacked(Tensor dy, Tensor x, Tensor offsets) -> Tensor")
      .kernel(grouped_wgrad_stacked)
      .meta(grouped_wgrad_stacked_meta);
  ops.op("grouped_sums(Tensor dy, Tensor offsets, bool as_quantized) -> Tensor")
      .kernel(grouped_sums)
      .meta(grouped_sums_meta);
  ops.op("grouped_wgrad_accumulate(Tensor dy, Tensor x, Tensor offsets, Tensor(a!)[] outs, int[] how) -> ()")
      .kernel(grouped_wgrad_accumulate)
      .meta(grouped_wgrad_accumulate_meta);
  ops.python("split_counters", split_counters);
  ops.python("split_record", [](const at::Device& device) {
    return split_counters(device).view(at::kInt).as_strided({kRecord}, {1}, 0);
  });
}

}  // namespace te_torch
