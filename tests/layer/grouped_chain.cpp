// A chain of two grouped layers for tests, with an activation between them or nothing: the gradient that the second one
// hands back is quantized group by group.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "layer/gemm_policy_grouped.h"
#include "layer/layer.h"

namespace {

using at::Tensor;
using namespace te_torch;

struct GroupedChain : layer::LayerChain {
  static constexpr const char* kName = "grouped_chain";
};

using Tensors = std::vector<Tensor>;
using Quantizations = std::vector<std::shared_ptr<ProductQuantization>>;

// weights, biases, quantizations: of each layer. activation: its kind, or "". recompute: the backward runs the first
// layer again.
Tensor run(const Tensor& x, const std::vector<Tensors>& weights, const std::vector<Tensors>& biases,
           const std::vector<int64_t>& splits, const OptionalTensor& offsets,
           const std::vector<Quantizations>& quantizations, const std::string& activation, bool recompute) {
  layer::LayerArgs call;
  call.layers.resize(2);
  call.own_weights.resize(2);
  call.arguments.add(layer::kX, x);
  for (size_t i = 0; i < 2; ++i) {
    layer::LayerConfig& config = call.layers[i];
    layer::Grouping grouping{splits, offsets.value_or(Tensor()), {}, {}, {}};
    grouping.quantizations.assign(quantizations[i].begin(), quantizations[i].end());
    if (!quantizations[i].empty()) config.quantization = quantizations[i][0];
    config.gemm_policy = layer::grouped_gemm_policy(std::move(grouping));
    for (const Tensor& weight : weights[i]) call.arguments.add(layer::weight_of(i), weight);
    for (const Tensor& bias : biases[i]) call.arguments.add(layer::bias_of(i), bias);
  }
  if (!activation.empty()) call.layers[1].prologue = layer::activation_prologue(activation, {});
  if (recompute) call.layers[1].input = SaveMode::kRecompute;
  return Node<GroupedChain, Direct>::run(at::TensorList(call.arguments.tensors()), call)[0];
}

}  // namespace

PYBIND11_MODULE(grouped_chain, m) {
  m.def("run", torch::wrap_pybind_function_no_gil(run));
  m.def("scale_input", [](const std::shared_ptr<ProductQuantization>& q, double factor) {
    q->x.scale.mul_(factor);  // as delayed scaling sets a new one between a forward and its backward
  });
}
