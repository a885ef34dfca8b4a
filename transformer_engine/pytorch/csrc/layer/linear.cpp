// linear, normalization_linear and activation_linear are one layer each, with different prologues. This file has their
// schemas and Python entries.
#include "core/op_registration.h"
#include "layer/op_registration.h"

namespace te_torch {

namespace layer {

namespace {

struct LinearChain : LayerChain {
  static constexpr const char* kName = "linear";
};

LayerArgs one_layer(ProloguePtr prologue, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                    at::ArrayRef<int64_t> quantization, at::ArrayRef<int64_t> parallel, std::string_view group,
                    const char* op) {
  LayerArgs call;
  call.layers.emplace_back();
  call.layers[0].prologue = std::move(prologue);
  call.layers[0].quantization = quantization_of(quantization, op);
  call.layers[0].tp_comm = tp_comm_of(parallel, group, op);
  call.own_weights.resize(1);
  call.arguments.add(kX, x);
  call.arguments.add(weight_of(0), weight);
  call.arguments.add(bias_of(0), bias);
  return call;
}

LayerArgs pack_linear(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, bool keep_input,
                      at::ArrayRef<int64_t> quantization, at::ArrayRef<int64_t> parallel, std::string_view group) {
  LayerArgs call = one_layer(plain_prologue(), x, weight, bias, quantization, parallel, group, "linear");
  if (keep_input) call.layers[0].operand = SaveMode::kRecompute;  // x is kept as it is, and quantized again
  return call;
}

LayerArgs pack_norm(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                    const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma,
                    bool return_output, bool recompute_output, at::ArrayRef<int64_t> quantization,
                    at::ArrayRef<int64_t> parallel, std::string_view group) {
  LayerArgs call = one_layer(norm_prologue(eps, rms, zero_centered_gamma), x, weight, bias, quantization, parallel,
                             group, "normalization_linear");
  call.arguments.add(prologue_of(0, norm::kResidual), residual);
  call.arguments.add(prologue_of(0, norm::kGamma), gamma);
  call.arguments.add(prologue_of(0, norm::kBeta), beta);
  call.return_output = return_output;
  if (recompute_output) call.layers[0].operand = SaveMode::kRecompute;
  return call;
}

LayerArgs pack_activation(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, std::string_view kind,
                          at::ArrayRef<double> params, at::ArrayRef<int64_t> quantization,
                          at::ArrayRef<int64_t> parallel, std::string_view group) {
  return one_layer(activation_prologue(kind, params), x, weight, bias, quantization, parallel, group,
                   "activation_linear");
}

Tensor one(const variable_list& outputs, const LayerArgs&) { return outputs[0]; }

using Linear = Op<LinearChain, "te::linear", &pack_linear, &one>;
using NormLinear = Op<LinearChain, "te::normalization_linear", &pack_norm, &three_outputs>;
using ActivationLinear = Op<LinearChain, "te::activation_linear", &pack_activation, &one>;

// With an argument that the schema does not have.
struct NormHandles {
  const EagerHandles& layer;
  bool return_input;
  const GivenTPComm& tp_comm;

  std::vector<int64_t> spec() const { return layer.spec(); }
  bool add_to(LayerArgs& call, size_t layer_idx) const {
    call.return_input = return_input;
    return layer.add_to(call, layer_idx);
  }
};

using LinearMainGrad = MainGradOp<LinearChain, &pack_linear, &one>::type;
using NormLinearMainGrad = MainGradOp<LinearChain, &pack_norm, &three_outputs>::type;
using ActivationLinearMainGrad = MainGradOp<LinearChain, &pack_activation, &one>::type;

}  // namespace

#define TE_LINEAR "(Tensor x, Tensor weight, Tensor? bias, bool keep_input, int[] quantization, "
#define TE_NORM_LINEAR                                                                                               \
  "(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor weight, Tensor? bias, float eps, bool rms, bool " \
  "zero_centered_gamma, bool return_output, bool recompute_output, int[] quantization, "
#define TE_ACTIVATION_LINEAR "(Tensor x, Tensor weight, Tensor? bias, str kind, float[] params, int[] quantization, "

}  // namespace layer

TE_OP_REGISTRATION(linear, ops) {
  using namespace layer;
  ops.op("linear" TE_LINEAR TE_PARALLEL_DEFAULT ") -> Tensor").chain<Linear>().python(Linear::python());
  ops.op("linear.main_grad" TE_LINEAR TE_PARALLEL TE_MAIN_GRADS ") -> Tensor").chain<LinearMainGrad>();
  ops.op("normalization_linear" TE_NORM_LINEAR TE_PARALLEL_DEFAULT ") -> (Tensor, Tensor, Tensor)")
      .chain<NormLinear>()
      .python([](const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                 const Tensor& weight, const OptionalTensor& bias, double eps, bool rms, bool zero_centered_gamma,
                 bool return_output, bool recompute_output, bool return_input, const EagerHandles& handles) {
        auto results =
            NormLinear::eager(x, residual, gamma, beta, weight, bias, eps, rms, zero_centered_gamma, return_output,
                              recompute_output, NormHandles{handles, return_input, handles.tp_comm});
        // The schema has no alias of x among its results, so the dispatcher leaves this one empty.
        Tensor& h = std::get<2>(results);
        if (return_input && !residual.has_value() && h.sym_sizes() != x.sym_sizes()) h = x;
        return results;
      });
  ops.op("normalization_linear.main_grad" TE_NORM_LINEAR TE_PARALLEL TE_MAIN_GRADS ") -> (Tensor, Tensor, Tensor)")
      .chain<NormLinearMainGrad>();
  ops.op("activation_linear" TE_ACTIVATION_LINEAR TE_PARALLEL_DEFAULT ") -> Tensor")
      .chain<ActivationLinear>()
      .python(ActivationLinear::python());
  ops.op("activation_linear.main_grad" TE_ACTIVATION_LINEAR TE_PARALLEL TE_MAIN_GRADS ") -> Tensor")
      .chain<ActivationLinearMainGrad>();
}

}  // namespace te_torch
