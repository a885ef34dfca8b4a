// grouped_linear is a layer with a weight for each group of rows. This file has its schemas and the Python entry.
#include <ATen/autocast_mode.h>

#include <utility>

#include "core/op_registration.h"
#include "gemm/gemm_list_fp8.h"
#include "gemm/gemm_path.h"
#include "gemm/grouped_gemm.h"
#include "layer/gemm_policy_device.h"
#include "layer/gemm_policy_grouped.h"
#include "layer/op_registration.h"

namespace te_torch {

namespace layer {

namespace {

struct GroupedChain : LayerChain {
  static constexpr const char* kName = "grouped_linear";
  static constexpr bool kManyLeaves = true;
};

c10::SymInt rows_in(const Tensor& x) {
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) rows = rows * x.sym_size(d);
  return rows;
}

void check_splits(const Tensor& x, size_t groups, at::ArrayRef<int64_t> splits) {
  TORCH_CHECK_VALUE(splits.size() == groups, "grouped_linear: argument 'm_splits' has ", splits.size(),
                    " numbers, wanted ", groups, ", one for each weight.");
  int64_t sum = 0;
  for (const int64_t count : splits) {
    TORCH_CHECK_VALUE(count >= 0 && count <= INT64_MAX - sum, "grouped_linear: argument 'm_splits' is ", splits,
                      ", wanted numbers of rows, none of them negative.");
    sum += count;
  }
  TORCH_CHECK_VALUE(rows_in(x) == sum, "grouped_linear: argument 'm_splits' is ", splits, ", which adds up to ", sum,
                    ", wanted x's ", rows_in(x), " rows.");
}

LayerArgs pack_grouped(const Tensor& x, at::TensorList weights, at::TensorList biases, const OptionalTensor& offsets,
                       at::ArrayRef<int64_t> splits, bool keep_input, at::ArrayRef<int64_t> quantization) {
  TORCH_CHECK_VALUE(!weights.empty() && (biases.empty() || biases.size() == weights.size()),
                    "grouped_linear: arguments 'weights' and 'biases' have ", weights.size(), " and ", biases.size(),
                    " tensors, wanted one for each group, or no biases.");
  TORCH_CHECK_VALUE(x.dim() > 0, "grouped_linear: argument 'x' has no dimensions, wanted [rows, in_features].");
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(weights[i].sym_sizes() == weights[0].sym_sizes(), "grouped_linear: weight number ", i,
                      " has shape ", weights[i].sym_sizes(), ", wanted that of the first, ", weights[0].sym_sizes(),
                      ".");
  }
  if (!offsets.has_value()) check_splits(x, weights.size(), splits);
  LayerArgs call;
  call.layers.emplace_back();
  call.own_weights.resize(1);
  call.arguments.reserve(1 + weights.size() + biases.size());
  call.arguments.add(kX, x);
  for (const Tensor& weight : weights) call.arguments.add(weight_of(0), weight);
  for (const Tensor& bias : biases) call.arguments.add(bias_of(0), bias);
  LayerConfig& config = call.layers[0];
  config.quantization = quantization_of(quantization, "grouped_linear");
  if (keep_input) config.operand = SaveMode::kRecompute;  // x is kept as it is, and quantized again
  Grouping grouping{splits.vec(), offsets.value_or(Tensor()), {}, {}, {}};
  if (config.quantization != nullptr) grouping.quantizations = {config.quantization};
  config.gemm_policy = grouped_gemm_policy(std::move(grouping));
  return call;
}

Tensor one(const variable_list& outputs, const LayerArgs&) { return outputs[0]; }

using Grouped = Op<GroupedChain, &pack_grouped, &one>;
using GroupedMainGrad = MainGradOp<GroupedChain, &pack_grouped, &one>::type;

// Arguments of the eager Python entry: in place of the schema's integers, and beside them.
struct GroupedHandles {
  GradAccumulatorPtr grad_accumulator;
  const std::vector<std::shared_ptr<ProductQuantization>>& quantizations;  // none, one for all, or one for each group
  const std::vector<Quantized>& own_weights;                               // none, or one for each group
  const OptionalTensor& out;
  const OptionalTensor& dgrad_out;

  std::vector<int64_t> spec() const {
    return quantizations.empty() ? std::vector<int64_t>() : quantizations[0]->pack();
  }
  bool fits_schema() const { return quantizations.size() < 2 && !out.has_value() && !dgrad_out.has_value(); }
};

// The host can read offsets in CPU memory: groups of the device become groups of the host, split by the offsets. In FP8
// they stay, so that tests on a CPU run what a GPU runs, except with set_cpu_products("loop") or with quantizers that
// the device does not take.
bool by_host(at::ArrayRef<Quantization> quantizations, size_t groups) {
  return quantizations.empty() || device_refuses(quantizations, groups) != nullptr || cpu_products_by_loop();
}

// Gives a list of FP8 groups offsets if kernels over all groups may compute it, to the bits of one GEMM a group.
void put_at_once(Grouping& grouping, const Tensor& x, const std::vector<Tensor>& weights,
                 const std::vector<Tensor>& biases, const GroupedHandles& handles) {
  if (grouping.quantizations.empty() || device_refuses(grouping.quantizations, weights.size()) != nullptr) return;
  if (x.is_cpu() && cpu_products_by_loop()) return;  // they would be those of LibTorch
  if (must_dispatch({&x}) || x.dim() == 0 || weights[0].dim() != 2 || x.size(-1) != weights[0].size(1)) return;
  for (const Quantized& own : handles.own_weights) {
    if (own.scaling != TE_SCALING_BLOCK_2D || own.e5m2) return;
  }
  const auto device = x.device().type();
  const at::ScalarType dtype =
      at::autocast::is_autocast_enabled(device) ? at::autocast::get_autocast_dtype(device) : x.scalar_type();
  ListGemms plan = blocks_by_list({x.device(), dtype, weights[0].size(0), weights[0].size(1), !biases.empty(),
                                   handles.grad_accumulator != nullptr, *grouping.quantizations[0], grouping.splits});
  if (!plan.at_once) return;
  grouping.offsets = grouped_offsets_of(grouping.splits, x);
  grouping.fprop_each = std::move(plan.fprop);
  grouping.dgrad_each = std::move(plan.dgrad);
}

Tensor grouped_linear(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                      const OptionalTensor& offsets, const std::vector<int64_t>& splits, bool keep_input,
                      const GroupedHandles& handles) {
  const bool own = !handles.own_weights.empty();  // the weights serve autograd alone
  const bool fits = handles.fits_schema() || weights.empty() || !must_dispatch({&x, own ? &x : &weights[0]});
  TORCH_CHECK_NOT_IMPLEMENTED(fits,
                              "grouped_linear: arguments 'out' and 'dgrad_out', and quantizers that differ from group "
                              "to group, work on plain tensors in eager mode, not under FakeTensorMode, functorch or "
                              "with tensor subclasses; leave them out there.");
  const auto extra = [&](LayerArgs& call) {
    LayerConfig& config = call.layers[0];
    Grouping grouping{
        splits, offsets.value_or(Tensor()), {}, handles.out.value_or(Tensor()), handles.dgrad_out.value_or(Tensor())};
    grouping.quantizations.assign(handles.quantizations.begin(), handles.quantizations.end());
    if (!handles.quantizations.empty()) config.quantization = handles.quantizations[0];
    if (offsets.has_value() && offsets->is_cpu() && !must_dispatch({&*offsets}) &&
        by_host(grouping.quantizations, weights.size())) {
      const int32_t* at = offsets->const_data_ptr<int32_t>();
      grouping.splits.resize(weights.size());
      for (size_t i = 0; i < weights.size(); ++i) grouping.splits[i] = at[i + 1] - at[i];
      grouping.read_offsets = std::exchange(grouping.offsets, Tensor());
    }
    if (!offsets.has_value()) put_at_once(grouping, x, weights, biases, handles);
    config.gemm_policy = grouped_gemm_policy(std::move(grouping));
    config.grad_accumulator = handles.grad_accumulator;
    for (const Quantized& weight : handles.own_weights) call.own_weights[0].push_back({{}, weight});
    return config.grad_accumulator != nullptr;
  };
  return Grouped::eager("te::grouped_linear", extra, x, at::TensorList(weights), at::TensorList(biases), offsets,
                        at::ArrayRef<int64_t>(splits), keep_input, handles);
}

}  // namespace

#define TE_GROUPED_LINEAR                                                                                \
  "(Tensor x, Tensor[] weights, Tensor[] biases, Tensor? offsets, int[] splits, bool keep_input, int[] " \
  "quantization"

}  // namespace layer

TE_OP_REGISTRATION(grouped_linear, ops) {
  using namespace layer;
  ops.op("grouped_linear" TE_GROUPED_LINEAR ") -> Tensor")
      .chain<Grouped>()
      .python([](const Tensor& x, const std::vector<Tensor>& weights, const std::vector<Tensor>& biases,
                 const OptionalTensor& offsets, const std::vector<int64_t>& splits, bool keep_input,
                 const GradAccumulatorPtr& grad_accumulator,
                 const std::vector<std::shared_ptr<ProductQuantization>>& quantizations,
                 const std::vector<Quantized>& own_weights, const OptionalTensor& out,
                 const OptionalTensor& dgrad_out) {
        return layer::grouped_linear(x, weights, biases, offsets, splits, keep_input,
                                     {grad_accumulator, quantizations, own_weights, out, dgrad_out});
      });
  ops.op("grouped_linear.main_grad" TE_GROUPED_LINEAR TE_MAIN_GRADS ") -> Tensor").chain<GroupedMainGrad>();
}

}  // namespace te_torch
