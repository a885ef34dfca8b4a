// See grouped_call.h.
#include "layer/grouped_call.h"

#include <ATen/autocast_mode.h>

#include <utility>

#include "core/grouped_operands.h"
#include "gemm/gemm_list_fp8.h"
#include "gemm/gemm_path.h"
#include "gemm/grouped_gemm.h"
#include "layer/gemm_policy_device.h"
#include "layer/gemm_policy_grouped.h"

namespace te_torch::layer {

namespace {

void check_splits(const char* op, const c10::SymInt& rows, size_t groups, at::ArrayRef<int64_t> splits) {
  TORCH_CHECK_VALUE(splits.size() == groups, op, ": argument 'm_splits' has ", splits.size(), " numbers, wanted ",
                    groups, ", one for each weight.");
  int64_t sum = 0;
  for (const int64_t count : splits) {
    TORCH_CHECK_VALUE(count >= 0 && count <= INT64_MAX - sum, op, ": argument 'm_splits' is ", splits,
                      ", wanted numbers of rows, none of them negative.");
    sum += count;
  }
  TORCH_CHECK_VALUE(rows == sum, op, ": argument 'm_splits' is ", splits, ", which adds up to ", sum, ", wanted x's ",
                    rows, " rows.");
}

// The host can read offsets in CPU memory: groups of the device become groups of the host, split by the offsets. In FP8
// they stay, so that tests on a CPU run what a GPU runs, except with set_cpu_products("loop") or with quantizers that
// the device does not take.
bool by_host(at::ArrayRef<Quantization> quantizations, size_t groups) {
  return quantizations.empty() || device_refuses(quantizations, groups) != nullptr || cpu_products_by_loop();
}

// Gives a list of FP8 groups offsets if kernels over all groups may compute it: in blocks to the bits of one GEMM a
// group, with a scale for each group to those of sizes on the device.
void put_at_once(Grouping& grouping, const Tensor& x, size_t layer_idx, at::TensorList weights, bool bias,
                 const GroupedHandles& handles) {
  const size_t groups = grouped::weights_in(weights);
  if (grouping.quantizations.empty() || device_refuses(grouping.quantizations, groups) != nullptr) return;
  if (x.is_cpu() && cpu_products_by_loop()) return;  // they would be those of LibTorch
  if (must_dispatch({&x}) || x.dim() == 0 || !(grouping.stacked || weights[0].dim() == 2)) return;
  if (layer_idx == 0 && x.size(-1) != weights[0].size(-1)) return;  // refused by the product
  const QuantizeSpec& spec = grouping.quantizations[0]->x.spec;
  // One state for all groups: each adds its amax before the next one.
  if (spec.kind == QuantizeSpec::kDelayed && grouping.quantizations.size() != groups) return;
  const te_scaling of_weights = spec.scaling() == TE_SCALING_TENSOR ? TE_SCALING_TENSOR : TE_SCALING_BLOCK_2D;
  for (const Quantized& own : handles.own_weights) {
    if (own.scaling != of_weights || own.e5m2) return;
  }
  const auto device = x.device().type();
  const at::ScalarType dtype =
      at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
  ListGemms plan = fp8_by_list({x.device(), dtype, weights[0].size(-2), weights[0].size(-1), bias,
                                handles.grad_accumulator != nullptr, *grouping.quantizations[0], grouping.splits});
  if (!plan.at_once) return;
  grouping.offsets = grouped_offsets_of(grouping.splits, x);
  grouping.bits_of_loop = plan.bits_of_loop;
  grouping.fprop_each = std::move(plan.fprop);
  grouping.dgrad_each = std::move(plan.dgrad);
}

}  // namespace

c10::SymInt rows_in(const char* op, const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": argument 'x' has no dimensions, wanted [rows, in_features].");
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows = rows * x.sym_size(d);
  return rows;
}

void check_groups(const char* op, const c10::SymInt& rows, const char* weights_name, at::TensorList weights,
                  at::TensorList biases, const OptionalTensor& offsets, at::ArrayRef<int64_t> splits) {
  if (grouped::is_stacked(weights)) grouped::check_stacked(op, weights_name, weights[0]);
  const size_t groups = grouped::weights_in(weights);
  TORCH_CHECK_VALUE(groups > 0 && (biases.empty() || biases.size() == groups), op, ": argument '", weights_name,
                    "' has ", groups, " tensors, and there are ", biases.size(),
                    " biases, wanted one for each group, or no biases.");
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(weights[i].sym_sizes() == weights[0].sym_sizes(), op, ": weight number ", i, " has shape ",
                      weights[i].sym_sizes(), ", wanted that of the first, ", weights[0].sym_sizes(), ".");
  }
  if (!offsets.has_value()) check_splits(op, rows, groups, splits);
}

void add_grouped_layer(LayerArgs& call, size_t layer_idx, const char* op, at::TensorList weights, at::TensorList biases,
                       const OptionalTensor& offsets, at::ArrayRef<int64_t> splits,
                       at::ArrayRef<int64_t> quantization) {
  for (const Tensor& weight : weights) call.arguments.add(weight_of(layer_idx), weight);
  for (const Tensor& bias : biases) call.arguments.add(bias_of(layer_idx), bias);
  LayerConfig& config = call.layers[layer_idx];
  config.quantization = quantization_of(quantization, op);
  Grouping grouping{splits.vec(), offsets.value_or(Tensor()), {}, {}, {}};
  grouping.stacked = config.stacked = grouped::is_stacked(weights);
  if (config.quantization != nullptr) grouping.quantizations = {config.quantization};
  config.gemm_policy = grouped_gemm_policy(std::move(grouping));
}

bool GroupedHandles::add_to(LayerArgs& call, size_t layer_idx) const {
  LayerConfig& config = call.layers[layer_idx];
  const at::TensorList weights = call.arguments.list(weight_of(layer_idx));
  Grouping grouping{splits,      offsets.value_or(Tensor()), {}, out.value_or(Tensor()), dgrad_out.value_or(Tensor()),
                    tail_unread, dgrad_tail_unread};
  grouping.stacked = config.stacked;
  const size_t groups = grouped::weights_in(weights);
  TORCH_CHECK_TYPE(groups == 1 || grad_accumulator == nullptr || grad_accumulator->takes_groups(), grouped::kOp,
                   ": argument 'grad_accumulator' is a function, which returns one weight's gradient, with ", groups,
                   " weights; wanted None, or a module's accumulator of main_grads.");
  grouping.quantizations.assign(quantizations.begin(), quantizations.end());
  if (!quantizations.empty()) config.quantization = quantizations[0];
  if (offsets.has_value() && offsets->is_cpu() && !must_dispatch({&*offsets}) &&
      by_host(grouping.quantizations, groups)) {
    const int32_t* at = offsets->const_data_ptr<int32_t>();
    grouping.splits.resize(groups);
    for (size_t i = 0; i < groups; ++i) grouping.splits[i] = at[i + 1] - at[i];
    grouping.read_offsets = std::exchange(grouping.offsets, Tensor());
  }
  if (!offsets.has_value()) {
    put_at_once(grouping, call.x(), layer_idx, weights, !call.arguments.list(bias_of(layer_idx)).empty(), *this);
  }
  config.gemm_policy = grouped_gemm_policy(std::move(grouping));
  config.grad_accumulator = grad_accumulator;
  for (const Quantized& weight : own_weights) call.own_weights[layer_idx].push_back({{}, weight});
  return config.grad_accumulator != nullptr;
}

}  // namespace te_torch::layer
