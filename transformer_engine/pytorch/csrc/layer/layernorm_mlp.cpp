// layernorm_mlp is two layers as one node: a norm before the first GEMM, an activation before the second one. This file
// has its schema and the Python entry.
#include "core/op_registration.h"
#include "layer/op_registration.h"

namespace te_torch {

namespace layer {

namespace {

struct MlpChain : LayerChain {
  static constexpr const char* kName = "layernorm_mlp";
};

LayerArgs pack_mlp(const Tensor& x, const OptionalTensor& residual, const Tensor& gamma, const OptionalTensor& beta,
                   const Tensor& weight1, const OptionalTensor& bias1, const Tensor& weight2,
                   const OptionalTensor& bias2, double eps, bool rms, bool zero_centered_gamma, std::string_view kind,
                   at::ArrayRef<double> params, bool return_norm_output, bool recompute_norm_output, bool recompute,
                   bool fp8_pre_activation, at::ArrayRef<int64_t> fc1_quantization,
                   at::ArrayRef<int64_t> fc2_quantization, at::ArrayRef<int64_t> parallel, std::string_view group) {
  LayerArgs call;
  call.layers.resize(2);
  call.own_weights.resize(2);
  LayerConfig &fc1 = call.layers[0], &fc2 = call.layers[1];
  fc1.prologue = norm_prologue(eps, rms, zero_centered_gamma);
  fc1.quantization = quantization_of(fc1_quantization, MlpChain::kName);
  fc2.prologue = activation_prologue(kind, params);
  fc2.quantization = quantization_of(fc2_quantization, MlpChain::kName);
  fc1.tp_comm = tp_comm_of(parallel, group, MlpChain::kName);
  if (fc1.tp_comm != nullptr) {
    TORCH_CHECK_VALUE(parallel[0] == Parallel::kColumn, MlpChain::kName, ": argument 'parallel' is ", parallel,
                      ", wanted 1 (column) for fc1; fc2 gets 2 (row).");
    auto second = parallel.vec();
    second[0] = Parallel::kRow;
    fc2.tp_comm = tp_comm_of(second, group, MlpChain::kName);
  }
  if (recompute_norm_output) fc1.operand = SaveMode::kRecompute;
  if (recompute) fc2.input = SaveMode::kRecompute;
  fc2.input_in_fp8 = fp8_pre_activation;
  call.return_output = return_norm_output;
  NamedTensors& arguments = call.arguments;
  arguments.add(kX, x);
  arguments.add(prologue_of(0, norm::kResidual), residual);
  arguments.add(prologue_of(0, norm::kGamma), gamma);
  arguments.add(prologue_of(0, norm::kBeta), beta);
  arguments.add(weight_of(0), weight1);
  arguments.add(bias_of(0), bias1);
  arguments.add(weight_of(1), weight2);
  arguments.add(bias_of(1), bias2);
  return call;
}

using Mlp = Op<MlpChain, "te::layernorm_mlp", &pack_mlp, &three_outputs>;
using MlpMainGrad = MainGradOp<MlpChain, &pack_mlp, &three_outputs>::type;

}  // namespace

#define TE_MLP                                                                                                     \
  "(Tensor x, Tensor? residual, Tensor gamma, Tensor? beta, Tensor fc1_weight, Tensor? fc1_bias, "                 \
  "Tensor fc2_weight, Tensor? fc2_bias, float eps, bool rms, bool zero_centered_gamma, str kind, float[] params, " \
  "bool return_norm_output, bool recompute_norm_output, bool recompute, bool fp8_pre_activation, "                 \
  "int[] fc1_quantization, int[] fc2_quantization, "

}  // namespace layer

TE_OP_REGISTRATION(layernorm_mlp, ops) {
  using namespace layer;
  ops.op("layernorm_mlp" TE_MLP TE_PARALLEL_DEFAULT ") -> (Tensor, Tensor, Tensor)").chain<Mlp>().python(Mlp::python());
  ops.op("layernorm_mlp.main_grad" TE_MLP TE_PARALLEL TE_MAIN_GRADS ") -> (Tensor, Tensor, Tensor)")
      .chain<MlpMainGrad>();
}

}  // namespace te_torch
