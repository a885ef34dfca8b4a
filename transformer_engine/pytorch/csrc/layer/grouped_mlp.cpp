// grouped_mlp is two layers with a weight for each group of rows as one node: before the second GEMM an activation,
// whose rows may be multiplied by a scale each. This file has its schema and the Python entry.
// - Of rows that belong to no group nothing is read; the node's output and x's gradient are zero there, and so is
//   the scale's gradient where zero_scale_tail is true.
// - Rows of no group hold anything in results inside of the node that the next step does not read there.
// - With a map x has tokens, of which each group's rows are gathered: in the forward, and again in the backward. With
//   sum_rows the output has the sums of each token's rows.
#include "core/grouped_operands.h"
#include "core/op_registration.h"
#include "layer/grouped_call.h"
#include "layer/op_registration.h"
#include "ops/activation.h"

namespace te_torch {

namespace layer {

namespace {

struct GroupedMlpChain : LayerChain {
  static constexpr const char* kName = "grouped_mlp";
  static constexpr bool kManyLeaves = true;
};

void check_map(const Tensor& x, const OptionalTensor& token_of_row, const OptionalTensor& row_of_pair, bool sum_rows) {
  constexpr const char* op = GroupedMlpChain::kName;
  TORCH_CHECK_VALUE(token_of_row.has_value() == row_of_pair.has_value(), op,
                    ": arguments 'token_of_row' and "
                    "'row_of_pair': one is missing, wanted both parts of a map, or none.");
  TORCH_CHECK_VALUE(token_of_row.has_value() || !sum_rows, op,
                    ": argument 'sum_rows' is True without a map, wanted a "
                    "map of x's tokens; pass 'token_of_row' and 'row_of_pair'.");
  if (!token_of_row.has_value()) return;
  const bool fits = token_of_row->dim() == 1 && row_of_pair->dim() == 2 && row_of_pair->sym_size(0) == x.sym_size(0) &&
                    token_of_row->scalar_type() == at::kInt && row_of_pair->scalar_type() == at::kInt &&
                    token_of_row->device() == x.device() && row_of_pair->device() == x.device();
  TORCH_CHECK_VALUE(fits, op, ": arguments 'token_of_row' and 'row_of_pair' are ", token_of_row->scalar_type(), " ",
                    token_of_row->sym_sizes(), " on ", token_of_row->device(), " and ", row_of_pair->scalar_type(), " ",
                    row_of_pair->sym_sizes(), " on ", row_of_pair->device(), ", wanted int32 [rows] and int32 [",
                    x.sym_size(0), ", k] on ", x.device(), ", the map of x's tokens (functional.permute_row_map).");
}

void check_mlp(const Tensor& x, at::TensorList weights1, at::TensorList weights2, const OptionalTensor& offsets,
               bool gated) {
  constexpr const char* op = GroupedMlpChain::kName;
  TORCH_CHECK_VALUE(x.dim() == 2, op, ": argument 'x' has shape ", x.sym_sizes(), ", wanted [rows, in_features].");
  const size_t groups = grouped::weights_in(weights1);
  TORCH_CHECK_VALUE(groups == grouped::weights_in(weights2), op, ": arguments 'weights1' and 'weights2' have ", groups,
                    " and ", grouped::weights_in(weights2), " tensors, wanted one each for each group.");
  const Tensor &first = weights1[0], &second = weights2[0];
  const bool matrices = (first.dim() == 2 || grouped::is_stacked(weights1)) &&  // of a stacked tensor, the last two
                        (second.dim() == 2 || grouped::is_stacked(weights2));
  TORCH_CHECK_VALUE(
      matrices && first.sym_size(-1) == x.sym_size(1) && first.sym_size(-2) == second.sym_size(-1) * (gated ? 2 : 1),
      op, ": arguments 'weights1' and 'weights2' have tensors of shapes ", first.sym_sizes(), " and ",
      second.sym_sizes(), ", wanted [", gated ? "2 * " : "", "hidden, ", x.sym_size(1),
      "], x's features last, and [out_features, hidden].");
  if (!offsets.has_value()) return;
  TORCH_CHECK_VALUE(
      offsets->dim() == 1 && offsets->sym_size(0) == int64_t(groups) + 1 && offsets->scalar_type() == at::kInt, op,
      ": argument 'offsets' is ", offsets->scalar_type(), " ", offsets->sym_sizes(), ", wanted int32 [", groups + 1,
      "], the result of grouped_offsets().");
}

LayerArgs pack_grouped_mlp(const Tensor& x, at::TensorList weights1, at::TensorList weights2,
                           const OptionalTensor& row_scale, const OptionalTensor& offsets, at::ArrayRef<int64_t> splits,
                           const OptionalTensor& token_of_row, const OptionalTensor& row_of_pair, bool sum_rows,
                           std::string_view kind, at::ArrayRef<double> params, bool keep_input, bool fp8_pre_activation,
                           at::ArrayRef<int64_t> fc1_quantization, at::ArrayRef<int64_t> fc2_quantization) {
  constexpr const char* op = GroupedMlpChain::kName;
  const c10::SymInt rows = token_of_row.has_value() ? token_of_row->sym_numel() : rows_in(op, x);
  check_groups(op, rows, "weights1", weights1, {}, offsets, splits);
  check_groups(op, rows, "weights2", weights2, {}, offsets, splits);
  check_mlp(x, weights1, weights2, offsets, activation_kind(kind).gated);
  check_map(x, token_of_row, row_of_pair, sum_rows);
  LayerArgs call;
  call.layers.resize(2);
  call.own_weights.resize(2);
  call.arguments.reserve(6 + 2 * weights1.size());
  call.arguments.add(kX, x);
  add_grouped_layer(call, 0, op, weights1, {}, offsets, splits, fc1_quantization);
  if (token_of_row.has_value()) {
    call.layers[0].prologue = rows_prologue();
    call.arguments.add(prologue_of(0, row_map::kTokenOfRow), *token_of_row);
    call.arguments.add(prologue_of(0, row_map::kRowOfPair), *row_of_pair);
  }
  LayerConfig& fc2 = call.layers[1];
  if (row_scale.has_value()) {
    OptionalTensor live;
    if (offsets.has_value()) live = last_offset(*offsets);
    fc2.prologue = scaled_activation_prologue(kind, params, std::move(live), true);
    call.arguments.add(prologue_of(1, row_scale::kScale), *row_scale);
  } else {
    fc2.prologue = activation_prologue(kind, params);
  }
  add_grouped_layer(call, 1, op, weights2, {}, offsets, splits, fc2_quantization);
  if (sum_rows) {
    fc2.epilogues.push_back(row_sum_epilogue());
    call.arguments.add(epilogue_of(1, row_sum::kTokenOfRow), *token_of_row);
    call.arguments.add(epilogue_of(1, row_sum::kRowOfPair), *row_of_pair);
  }
  if (keep_input) call.layers[0].operand = SaveMode::kRecompute;  // x is kept as it is: gathered and quantized again
  fc2.input_in_fp8 = fp8_pre_activation;
  return call;
}

Tensor one(const variable_list& outputs, const LayerArgs&) { return outputs[0]; }

using GroupedMlp = Op<GroupedMlpChain, "te::grouped_mlp", &pack_grouped_mlp, &one>;
using GroupedMlpMainGrad = MainGradOp<GroupedMlpChain, &pack_grouped_mlp, &one>::type;

// Of both layers, as Python hands them over.
using Accumulators = std::array<GradAccumulatorPtr, 2>;
using Quantizations = std::array<GroupQuantizations, 2>;
using OwnWeights = std::array<std::vector<Quantized>, 2>;

// Of the second layer. keeps_scale_tail: the rows of no group in the gradient of row_scale are not written.
struct ScaledHandles : GroupedHandles {
  std::string_view kind;
  at::ArrayRef<double> params;
  bool keeps_scale_tail;

  bool add_to(LayerArgs& call, size_t layer_idx) const {
    if (keeps_scale_tail) {
      call.layers[layer_idx].prologue = scaled_activation_prologue(kind, params, last_offset(*offsets), false);
    }
    return GroupedHandles::add_to(call, layer_idx);
  }
};

// zero_scale_tail: the gradient of row_scale is 0 in rows of no group; else the caller reads none of them.
Tensor grouped_mlp(const Tensor& x, const std::vector<Tensor>& weights1, const std::vector<Tensor>& weights2,
                   const OptionalTensor& row_scale, const OptionalTensor& offsets, const std::vector<int64_t>& splits,
                   const OptionalTensor& token_of_row, const OptionalTensor& row_of_pair, bool sum_rows,
                   const std::string& kind, const std::vector<double>& params, bool keep_input, bool fp8_pre_activation,
                   const Accumulators& accumulators, const Quantizations& quantizations, const OwnWeights& own_weights,
                   bool zero_scale_tail) {
  const OptionalTensor none;
  // The activation of scaled rows and its gradient read rows of groups alone, as do sums by a map.
  const bool live_alone = row_scale.has_value() && offsets.has_value();
  const GroupedHandles fc1{offsets, splits, accumulators[0], quantizations[0],        own_weights[0],
                           none,    none,   live_alone,      token_of_row.has_value()};
  const ScaledHandles fc2{
      {offsets, splits, accumulators[1], quantizations[1], own_weights[1], none, none, sum_rows, live_alone},
      kind,
      params,
      live_alone && !zero_scale_tail};
  TORCH_CHECK_NOT_IMPLEMENTED((fc1.fits_schema() && fc2.fits_schema()) || !must_dispatch({&x}),
                              "grouped_mlp: quantizers that differ from group to group work on plain tensors in eager "
                              "mode, not under FakeTensorMode, functorch or with tensor subclasses; leave them out "
                              "there.");
  return GroupedMlp::eager(x, at::TensorList(weights1), at::TensorList(weights2), row_scale, offsets,
                           at::ArrayRef<int64_t>(splits), token_of_row, row_of_pair, sum_rows, std::string_view(kind),
                           at::ArrayRef<double>(params), keep_input, fp8_pre_activation, fc1, fc2);
}

}  // namespace

#define TE_GROUPED_MLP                                                                                         \
  "(Tensor x, Tensor[] weights1, Tensor[] weights2, Tensor? row_scale, Tensor? offsets, int[] splits, "        \
  "Tensor? token_of_row, Tensor? row_of_pair, bool sum_rows, str kind, float[] params, bool keep_input, bool " \
  "fp8_pre_activation, "                                                                                       \
  "int[] fc1_quantization, "                                                                                   \
  "int[] fc2_quantization"

}  // namespace layer

TE_OP_REGISTRATION(grouped_mlp, ops) {
  using namespace layer;
  ops.op("grouped_mlp" TE_GROUPED_MLP ") -> Tensor").chain<GroupedMlp>().python(layer::grouped_mlp);
  ops.op("grouped_mlp.main_grad" TE_GROUPED_MLP TE_MAIN_GRADS ") -> Tensor").chain<GroupedMlpMainGrad>();
}

}  // namespace te_torch
