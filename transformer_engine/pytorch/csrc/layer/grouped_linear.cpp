// grouped_linear is a layer with a weight for each group of rows. This file has its schemas and the Python entry.
#include "core/op_registration.h"
#include "layer/grouped_call.h"
#include "layer/op_registration.h"

namespace te_torch {

namespace layer {

namespace {

struct GroupedChain : LayerChain {
  static constexpr const char* kName = "grouped_linear";
  static constexpr bool kManyLeaves = true;
};

LayerArgs pack_grouped(const Tensor& x, at::TensorList weights, at::TensorList biases, const OptionalTensor& offsets,
                       at::ArrayRef<int64_t> splits, bool keep_input, at::ArrayRef<int64_t> quantization) {
  check_groups(GroupedChain::kName, rows_in(GroupedChain::kName, x), "weights", weights, biases, offsets, splits);
  LayerArgs call;
  call.layers.emplace_back();
  call.own_weights.resize(1);
  call.arguments.reserve(1 + weights.size() + biases.size());
  call.arguments.add(kX, x);
  add_grouped_layer(call, 0, GroupedChain::kName, weights, biases, offsets, splits, quantization);
  if (keep_input) call.layers[0].operand = SaveMode::kRecompute;  // x is kept as it is, and quantized again
  return call;
}

Tensor one(const variable_list& outputs, const LayerArgs&) { return outputs[0]; }

using Grouped = Op<GroupedChain, "te::grouped_linear", &pack_grouped, &one>;
using GroupedMainGrad = MainGradOp<GroupedChain, &pack_grouped, &one>::type;

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
                 const GradAccumulatorPtr& grad_accumulator, const GroupQuantizations& quantizations,
                 const std::vector<Quantized>& own_weights, const OptionalTensor& out,
                 const OptionalTensor& dgrad_out) {
        const GroupedHandles handles{offsets, splits, grad_accumulator, quantizations, own_weights, out, dgrad_out};
        const bool own = !own_weights.empty();  // the weights serve autograd alone
        const bool fits = handles.fits_schema() || weights.empty() || !must_dispatch({&x, own ? &x : &weights[0]});
        TORCH_CHECK_NOT_IMPLEMENTED(
            fits,
            "grouped_linear: arguments 'out' and 'dgrad_out', and quantizers that differ from group to group, work on "
            "plain tensors in eager mode, not under FakeTensorMode, functorch or with tensor subclasses; leave them "
            "out there.");
        return Grouped::eager(x, at::TensorList(weights), at::TensorList(biases), offsets,
                              at::ArrayRef<int64_t>(splits), keep_input, handles);
      });
  ops.op("grouped_linear.main_grad" TE_GROUPED_LINEAR TE_MAIN_GRADS ") -> Tensor").chain<GroupedMainGrad>();
}

}  // namespace te_torch
