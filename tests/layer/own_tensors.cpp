// A prologue and an epilogue with tensors of their own for tests, in a chain of two linear layers: the second prologue
// multiplies each row by a scale; an epilogue of each layer adds a tensor. And a GEMM that does not add the bias.
#include <ATen/TensorOperators.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "layer/layer.h"

namespace {

using at::Tensor;
using namespace te_torch;
using namespace te_torch::layer;

constexpr SavedInfo kUnscaled{"unscaled rows", "the gradient of the scale reads them", "the layer before"};
constexpr SavedInfo kScaled{"scaled rows", "the weight's gradient is taken with them", "one product a row"};
constexpr SavedInfo kScale{"row scale", "the gradient of the rows reads it", "an argument: kept in any case"};

class RowScale final : public Prologue {
 public:
  enum Own : int { kRowScale };

  const SavedInfo& input_info() const override { return kUnscaled; }
  const SavedInfo& operand_info() const override { return kScaled; }
  bool reads_input() const override { return true; }

  PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                         QuantizeUsage usage, bool) const override {
    const Tensor& scale = in.tensors[kRowScale];
    return {operand_of(dispatch, quantizer, in.x * scale, usage), in.x, {}, {{kRowScale, scale, &kScale, true}}};
  }
  Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                    const Quantizer* quantizer) const override {
    return recomputed_operand(dispatch, quantizer, saved.used_scales, saved.input * saved.tensors[kRowScale],
                              {false, true});
  }
  PrologueBackward backward(const DispatchMode& dispatch, const PrologueSaved& saved,
                            const PrologueGradient& g) const override {
    PrologueBackward back;
    if (g.needs_input) {
      back.dx = operand_of(dispatch, g.next_quantizer, g.d_operand * saved.tensors[kRowScale], g.usage,
                           g.needs_next_sums ? &back.dx_sums : nullptr);
    }
    if (g.wanted[kRowScale]) back.gradients.emplace_back(kRowScale, (g.d_operand * saved.input).sum({-1}, true));
    return back;
  }
};

class AddedTensor final : public Epilogue {
 public:
  enum Own : int { kAdded = kBias + 1 };

  EpilogueOutput forward(const DispatchMode&, const Tensor& y, const OwnTensors& tensors) const override {
    return {y + tensors[kAdded], {{kAdded, tensors[kAdded], &kParameter, true}}};
  }
  EpilogueBackward backward(const DispatchMode&, const Tensor& dy, const OwnTensors& saved,
                            OwnWanted wanted) const override {
    TORCH_CHECK(saved[kAdded].defined());
    EpilogueBackward back{dy, {}};
    if (wanted[kAdded]) back.gradients.emplace_back(kAdded, dy);
    return back;
  }
};

class WithoutBias final : public SingleProduct {
 public:
  bool adds_bias() const override { return false; }
};

struct OwnChain : LayerChain {
  static constexpr const char* kName = "own_tensors";
};

// Of each layer: weight, bias and the tensor that is added, each or none; scale: of the second layer's rows, or none.
Tensor run(const Tensor& x, const std::vector<Tensor>& weights, const std::vector<OptionalTensor>& biases,
           const std::vector<OptionalTensor>& added, const OptionalTensor& scale,
           const std::shared_ptr<ProductQuantization>& quantization, bool gemm_adds_bias, bool recompute) {
  LayerArgs call;
  call.layers.resize(2);
  call.own_weights.resize(2);
  call.arguments.add(kX, x);
  for (size_t i = 0; i < 2; ++i) {
    LayerConfig& config = call.layers[i];
    config.quantization = quantization;
    if (!gemm_adds_bias) config.gemm_policy = std::make_shared<WithoutBias>();
    if (added[i].has_value()) config.epilogues.push_back(std::make_shared<AddedTensor>());
    call.arguments.add(weight_of(i), weights[i]);
    call.arguments.add(bias_of(i), biases[i]);
    call.arguments.add(epilogue_of(i, AddedTensor::kAdded), added[i]);
  }
  if (scale.has_value()) {
    call.layers[1].prologue = std::make_shared<RowScale>();
    call.arguments.add(prologue_of(1, RowScale::kRowScale), *scale);
  }
  if (recompute) call.layers[1].input = SaveMode::kRecompute;
  return Node<OwnChain, Direct>::run(at::TensorList(call.arguments.tensors()), call)[0];
}

}  // namespace

PYBIND11_MODULE(own_tensors, m) { m.def("run", torch::wrap_pybind_function_no_gil(run)); }
