// The forward of a layer and of a chain (layer.h). What is kept for the backward is decided and kept here alone.
#include <algorithm>

#include "autograd/rows_behind.h"
#include "distributed/agreement.h"
#include "gemm/linear_core.h"
#include "layer/layer.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kQuantizedWeight{"quantized weight", "the input's gradient is taken with it",
                                     "a copy of a parameter: quantizing it again"};
constexpr SavedInfo kMlpInput{"MLP input", "norm, first product and activation are recomputed from it",
                              "the sum or product that made it: te.checkpoint around the layer", true};
constexpr SavedInfo kGatheredInput{"gathered input", "the weight's gradient is taken with all ranks' rows",
                                   "gathering it again; tp_recompute_allgather=False keeps it"};
constexpr SavedInfo kPackedPreActivation{"pre-activation, FP8", "the activation's backward reads it",
                                         "norm and first product: LayerNormMLP(checkpoint=True)"};

// Words of what is kept, with the reason where it is a recipe's backward_override.
SavedInfo saved_info(SavedInfo what, const ProductQuantization* q) {
  if (const char* why = why_override(q)) what.why = why;
  return what;
}

SavedInfo weight_info(const Operand& weight, const ProductQuantization* q) {
  return saved_info(weight.quantized() ? kQuantizedWeight : kParameter, q);
}

bool unquantized(const ProductQuantization* q) { return backward_reads(q) == BackwardReads::kHighPrecision; }

// A weight as a backward in high precision reads it: the parameter; where that is held in FP8 alone, what it means.
// Such a parameter is a subclass in eager mode; in a layer that is run again it is FP8 data.
Operand weight_values(const DispatchMode& dispatch, const Tensor& parameter, const Operand& read, bool own) {
  const bool subclass = dispatch.direct() && parameter.key_set().has(c10::DispatchKey::Python);
  const bool values = !own || (parameter.is_floating_point() && !subclass);
  return read.quantized() && values ? Operand{parameter, {}} : read;
}

// Of the same shape and size as what is not kept: FP8 data, of which the backward makes 16-bit values, are half of it.
Tensor unkept(const Operand& operand, const ProductQuantization* q, const Tensor& like) {
  if (!operand.quantized()) return operand.plain;
  if (!unquantized(q) || !probe::active()) return operand.fp8.rowwise;
  return like.new_empty({1}).expand_symint(operand.fp8.rowwise.sym_sizes());
}

// What a product reads of an operand that is recomputed: its scale, where that is of the whole tensor.
Tensor used_scales(const Operand& operand) {
  const bool whole = operand.quantized() && operand.fp8.scaling == TE_SCALING_TENSOR;
  return whole ? operand.fp8.rowwise_scale_inv : Tensor();
}

// Where nothing is made of x, the operand is kept as x in any case.
bool may_be_recomputed(const LayerConfig& config) {
  const ProductQuantization* q = config.quantization.get();
  return !config.prologue->is_identity() || (q != nullptr && !unquantized(q));
}

// Of what is kept in place of an operand, rows behind the live ones that quantizing it again reads: those of the last
// one's block; all, where a quantizer written in Python does it.
int64_t rows_behind_of(const ProductQuantization* q) {
  if (q == nullptr || !q->x.active() || unquantized(q)) return 0;
  if (q->x.spec.kind == QuantizeSpec::kPython) return kAllRows;
  return q->x.spec.scaling() == TE_SCALING_TENSOR ? 0 : 127;
}

int64_t rows_behind_of(const LayerConfigs& layers, const NamedTensors& arguments) {
  int64_t rows = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool run_again = i + 1 < layers.size() && layers[i + 1].input == SaveMode::kRecompute;
    if (layers[i].operand != SaveMode::kRecompute && !run_again) continue;
    for (size_t w = 0; w < arguments.list(weight_of(i)).size(); ++w) {
      rows = std::max(rows, rows_behind_of(layers[i].gemm_policy->quantization(layers[i].quantization.get(), w)));
    }
  }
  return rows;
}

// For a backward that goes on through the layer with what it has. gathered: the operand with all ranks' rows, where
// that is kept in its place.
void keep(SaveContext& save, const LayerConfig& config, size_t layer_idx, const LayerInput& in, const LayerOutput& out,
          at::ArrayRef<Operand> weights, const Operand& gathered, Needs needs) {
  const Prologue& prologue = *config.prologue;
  const ProductQuantization* q = config.quantization.get();
  const QuantizeUsage read = kept_usage(q);
  const PrologueOutput& made = out.made;
  const bool again = needs.weight && config.operand == SaveMode::kRecompute;
  const bool input = (needs.prologue && prologue.reads_input()) || again;
  const bool elsewhere = layer_idx > 0 && (config.input == SaveMode::kRecompute || config.input_in_fp8);
  const auto name = [&](SavedName n) { return saved_name(layer_idx, n); };
  if (input && !elsewhere) save.keep(name(kInput), made.input, prologue.input_info());
  for (const Operand& weight : weights) {
    if (needs.prologue) keep_operand(save, name(kWeight), weight, read, weight_info(weight, q));
  }
  if (again) {
    const Operand& operand = made.operand;
    if (layer_idx == 0 || config.input == SaveMode::kSave) {  // else it goes with the input, which is named
      for (const Operand& group : operand.groups) {
        save.recomputed(unkept(group, q, made.input), saved_info(prologue.operand_info(), q));
      }
      if (operand.groups.empty()) {
        save.recomputed(unkept(operand, q, made.input), saved_info(prologue.operand_info(), q));
      }
    }
    if (!unquantized(q) && config.gemm_policy->quantizes_groups(q)) {
      for (const Tensor& used : config.gemm_policy->used_scales(operand)) save.keep(name(kUsedScales), used, kScales);
    } else if (!unquantized(q)) {
      save.keep(name(kUsedScales), used_scales(operand), kScales);
    }
  } else if (gathered.defined()) {
    keep_operand(save, name(kWholeOperand), gathered, read, saved_info(kGatheredInput, q));
  } else if (needs.weight) {
    keep_operand(save, name(kOperand), made.operand, read, saved_info(prologue.operand_info(), q));
  }
  if (!prologue.reads_input() || !(needs.prologue || again)) return;
  save.keep(name(kSavedGamma), in.prologue.gamma, kParameter);
  if (again) save.keep(name(kSavedBeta), in.prologue.beta, kParameter);
  save.keep(name(kMean), made.mean, kStatistic);
  save.keep(name(kRstd), made.rstd, kStatistic);
}

// For a backward that runs prologue and product again first.
void keep_for_recompute(const DispatchMode& dispatch, SaveContext& save, const ProductQuantization* q, size_t layer_idx,
                        const LayerInput& in, const LayerOutput& out, at::ArrayRef<Operand> weights) {
  const auto name = [&](SavedName n) { return saved_name(layer_idx, n); };
  save.keep(name(kInput), out.made.input, kMlpInput);
  save.keep(name(kSavedGamma), in.prologue.gamma, kParameter);
  save.keep(name(kSavedBeta), in.prologue.beta, kParameter);
  for (const Tensor& bias : in.biases) save.keep(name(kBias), bias, kParameter);
  save.keep(name(kUsedScales), used_scales(out.made.operand), kScales);
  for (const Operand& weight : weights) {
    keep_operand(save, name(kWeight), weight, {true, kept_usage(q).columnwise}, weight_info(weight, q));
  }
  for (size_t i = 0; unquantized(q) && i < weights.size(); ++i) {
    if (!weights[i].quantized()) continue;
    const Operand values = weight_values(dispatch, in.weights[i], weights[i], !in.own.empty());
    save.keep(name(kWeightValues), values.plain, saved_info(kParameter, q));
  }
}

void keep_for_backward(const DispatchMode& dispatch, SaveContext& save, const LayerConfig& config, size_t layer_idx,
                       const LayerInput& in, const LayerOutput& out, at::ArrayRef<Operand> weights,
                       const Operand& gathered, Needs needs, SaveFor keeping) {
  const ProductQuantization* q = config.quantization.get();
  if (keeping == SaveFor::kRecompute) {
    keep_for_recompute(dispatch, save, q, layer_idx, in, out, weights);
  } else if (unquantized(q)) {
    c10::SmallVector<Operand, 1> values;
    for (size_t i = 0; i < weights.size(); ++i) {
      values.push_back(weight_values(dispatch, in.weights[i], weights[i], !in.own.empty()));
    }
    keep(save, config, layer_idx, in, out, values, gathered, needs);
  } else {
    keep(save, config, layer_idx, in, out, weights, gathered, needs);
  }
}

}  // namespace

Defaults& defaults() {
  static Defaults policies{nullptr, std::make_shared<SingleProduct>(), std::make_shared<SavedPolicy>()};
  return policies;
}

Operand packed_input(const DispatchMode& dispatch, const Tensor& input) {
  static const Quantizer packer{{QuantizeSpec::kBlock1d, false, true, 0.f}, {}, {}, {}};
  return operand_of(dispatch, &packer, input, {true, false});
}

LayerOutput layer_forward(const DispatchMode& dispatch, const LayerConfig& config, size_t layer_idx, SaveContext& save,
                          const LayerInput& in, Needs needs, SaveFor keeping, bool want_output) {
  const ProductQuantization* q = config.quantization.get();
  const Prologue& prologue = *config.prologue;
  const Tensor& x = in.prologue.x;
  const bool own = !in.own.empty();
  TORCH_INTERNAL_ASSERT(!own || in.own.size() == in.weights.size());
  const auto check = [&](const Tensor& shown, const c10::SymInt& depth) {
    if (q == nullptr && !config.tp_comm) return;  // the product does, and of a TPComm it sees some rows
    for (size_t i = 0; i < in.weights.size(); ++i) {
      check_product(shown, depth, in.weights[i], in.biases.empty() ? OptionalTensor() : OptionalTensor(in.biases[i]),
                    own);
    }
  };
  // Before a quantizer notes the amax of an x that is refused. A norm looks at x itself; what an activation makes of it
  // is known behind it.
  if (prologue.is_identity()) check(x, x.dim() > 0 ? x.sym_size(-1) : c10::SymInt(-1));
  const TPComm* tp_comm = config.tp_comm.get();
  if (tp_comm != nullptr) tp_comm->check(x);
  const Quantizer* quantizer = q != nullptr ? &q->x : nullptr;
  const QuantizeAt how =
      tp_comm != nullptr ? tp_comm->quantize_at(dispatch, Pass::kFprop, quantizer, x) : QuantizeAt::kBeforeGather;
  const bool keep_operand = needs.weight && config.operand == SaveMode::kSave && keeping == SaveFor::kBackward;
  const QuantizeUsage read = kept_usage(q);
  const QuantizeUsage usage{true, keep_operand && read.columnwise};
  const bool both = keep_operand && unquantized(q);  // the backward reads the operand as it is
  const bool by_groups = config.gemm_policy->quantizes_groups(q);
  const Quantizer* before = how == QuantizeAt::kBeforeGather && !both && !by_groups ? quantizer : nullptr;
  LayerOutput out;
  out.made = prologue.forward(dispatch, in.prologue, before, usage, want_output);
  Operand& operand = out.made.operand;
  if (!prologue.is_identity() && operand.quantized()) check(x, operand.fp8.rowwise.sym_size(-1));
  if (!prologue.is_identity() && !operand.quantized())
    check(q == nullptr ? operand.plain : x, operand.plain.sym_size(-1));
  const Operand values = both ? operand : Operand();
  if (both && how == QuantizeAt::kBeforeGather && !by_groups) {
    operand = operand_of(dispatch, quantizer, operand.plain, usage);
  }
  if (how == QuantizeAt::kWithSharedAmax) operand = tp_comm->quantized(*quantizer, operand.plain, usage);
  if (by_groups) {
    operand = config.gemm_policy->quantized_groups(dispatch, Pass::kFprop, Tensor(operand.plain), usage, nullptr);
  }

  const bool columnwise = read.columnwise && (needs.prologue || keeping == SaveFor::kRecompute);
  const bool adds_up = tp_comm != nullptr && tp_comm->adds_up(Pass::kFprop);
  WeightSet w{{}, adds_up ? at::TensorList() : in.biases};
  if (own) {
    w.weights.assign(in.own.begin(), in.own.end());
  } else {
    c10::SmallVector<const Quantizer*, 1> quantizers;
    for (size_t i = 0; i < in.weights.size(); ++i) {
      const ProductQuantization* its = config.gemm_policy->quantization(q, i);
      quantizers.push_back(its != nullptr ? &its->weight : nullptr);
    }
    w.weights = operands_of(dispatch, quantizers, in.weights, {true, columnwise});
  }
  const bool split = q == nullptr || q->split_fprop;
  if (tp_comm == nullptr) {
    out.y = config.gemm_policy->fprop(dispatch, operand, nullptr, w, x, split);
    if (both) operand = values;
    keep_for_backward(dispatch, save, config, layer_idx, in, out, w.weights, {}, needs, keeping);
    return out;
  }
  const Quantizer* behind = how == QuantizeAt::kAfterGather ? quantizer : nullptr;
  const OptionalTensor bias = adds_up && !in.biases.empty() ? OptionalTensor(in.biases[0]) : OptionalTensor();
  // The backward reads what the product has read, and nothing else would be gathered to be kept.
  const bool as_it_came = backward_reads(q) == BackwardReads::kDequantized;
  const bool quantized = !as_it_came && (operand.quantized() || (both && behind != nullptr));
  const bool reads_gathered = keep_operand && tp_comm->gathers(Pass::kFprop);
  // What a backward keeps for itself alone is kept as it came.
  const bool keeps = reads_gathered && (tp_comm->keeps_gathered(quantized) || !save.serves_a_graph());
  ScopedBuffers buffers;  // until the product is there
  int64_t whole = 0;
  const auto product = [&](const Operand& part, const Rows* rows, const Tensor& like, const Tensor& into) {
    return into.defined() ? config.gemm_policy->fprop_into(dispatch, part, rows, w, like, split, whole, into)
                          : config.gemm_policy->fprop(dispatch, part, rows, w, like, split);
  };
  const auto ahead = [&](CommOp& comm_op) {
    if (!dispatch.direct()) return;
    whole = comm_op.rows();
    const bool runs = whole > 0 && config.gemm_policy->takes_runs(Pass::kFprop, comm_op.operand(), whole, w, x, split);
    comm_op.plan_chunks(runs ? std::optional(in.weights[0].size(0)) : std::nullopt);
  };
  const PendingResult passing =
      through(tp_comm->begin(dispatch, Pass::kFprop, operand, x, behind, usage, bias, keeps ? nullptr : &buffers),
              operand, x, product, ahead);
  Operand gathered;
  if (passing.comm_op != nullptr && reads_gathered) {
    const Operand& arrived = passing.comm_op->operand();
    if (keeps) {
      gathered = as_it_came ? off_pool(arrived)
                 : both     ? tp_comm->whole(dispatch, Pass::kFprop, values, nullptr, nullptr, {}, nullptr)
                        : tp_comm->whole(dispatch, Pass::kFprop, operand, behind, passing.comm_op.get(), {}, nullptr);
    } else {
      save.recomputed(unkept(arrived, q, x), saved_info(kGatheredInput, q));
    }
  }
  if (both) operand = values;
  out.y = passing.result();
  keep_for_backward(dispatch, save, config, layer_idx, in, out, w.weights, gathered, needs, keeping);
  return out;
}

namespace {

// What is traced meets nobody.
std::string_view asking_group(const DispatchMode& dispatch, const LayerConfigs& layers, const Tensor& x) {
  if (!dispatch.direct()) return {};
  for (const LayerConfig& config : layers) {
    if (config.tp_comm != nullptr) return config.tp_comm->asking_group(x);
  }
  return {};
}

}  // namespace

template <class DispatchModeType>
variable_list LayerChain::forward(State& state, SaveContext& save, at::TensorList, const LayerArgs& call) {
  const DispatchMode dispatch(DispatchModeType{});
  const HeardByRanks heard(asking_group(dispatch, call.layers, call.x()), call.x(),
                           call.layers.size() > 1 ? "layernorm_mlp" : "linear");
  const NamedTensors& arguments = call.arguments;
  const size_t layers = call.layers.size();
  const Tensor& x = call.x();
  state.layers = std::move(call.layers);
  state.return_output = call.return_output;
  state.dtype = x.scalar_type();
  state.policy = defaults().saved;
  state.tensors = arguments.size();
  for (int name = 0; name < weight_of(layers); ++name) {
    state.places.push_back({int64_t(arguments.find(name)), int64_t(arguments.list(name).size())});
  }

  const bool graph = save.serves_a_graph();
  const auto wants = [&](int name) {
    const at::TensorList list = arguments.list(name);
    return graph && std::any_of(list.begin(), list.end(), [](const Tensor& t) { return t.requires_grad(); });
  };
  c10::SmallVector<Needs, 2> needs(layers);
  bool any = wants(kX) || wants(kResidual) || wants(kGamma) || wants(kBeta);
  for (size_t i = 0; i < layers; ++i) {
    needs[i] = {any, wants(weight_of(i))};
    any = any || needs[i].weight || (i + 1 < layers && wants(bias_of(i)));
  }
  const SavedPolicy& policy = *state.policy;
  for (size_t i = 0; i < layers; ++i) {
    LayerConfig& config = state.layers[i];
    if (!config.tp_comm) config.tp_comm = defaults().tp_comm;
    if (!config.gemm_policy) config.gemm_policy = defaults().gemm_policy;
    if (config.prologue->recomputes_operand()) config.operand = SaveMode::kRecompute;
    config.operand = policy.decide(config.prologue->operand_info(), config.operand);
    if (!may_be_recomputed(config)) config.operand = SaveMode::kSave;
    if (i > 0) config.input = policy.decide(config.prologue->input_info(), config.input);
  }

  const RowsBehind behind(rows_behind_of(state.layers, arguments));
  const OptionalTensor none;
  const OptionalTensor residual = arguments.optional(kResidual), gamma = arguments.optional(kGamma),
                       beta = arguments.optional(kBeta);
  variable_list outputs(1);
  Tensor between = x;  // what the layer reads
  for (size_t i = 0; i < layers; ++i) {
    const bool first = i == 0,
               for_recompute = any && i + 1 < layers && state.layers[i + 1].input == SaveMode::kRecompute;
    const PrologueInput prologue{between, first ? residual : none, first ? gamma : none, first ? beta : none};
    const LayerInput in{prologue, arguments.list(weight_of(i)), arguments.list(bias_of(i)), call.own_weights[i]};
    LayerOutput out = layer_forward(dispatch, state.layers[i], i, save, in, needs[i],
                                    for_recompute ? SaveFor::kRecompute : SaveFor::kBackward, call.return_output);
    if (first && gamma.has_value()) {
      outputs.push_back(out.made.output);
      if (residual.has_value() || call.return_input) outputs.push_back(std::move(out.made.input));
    }
    if (for_recompute) {
      save.recomputed(call.return_output ? out.made.output : between, state.layers[i].prologue->operand_info());
      save.recomputed(out.y, state.layers[i + 1].prologue->input_info());
    }
    if (i > 0 && any && state.layers[i].input == SaveMode::kSave && state.layers[i].input_in_fp8) {
      keep_operand(save, saved_name(i, kPackedInput), packed_input(dispatch, between), {true, false},
                   kPackedPreActivation);
    }
    between = std::move(out.y);
  }
  outputs[0] = std::move(between);
  return outputs;
}

template variable_list LayerChain::forward<Direct>(State&, SaveContext&, at::TensorList, const LayerArgs&);
template variable_list LayerChain::forward<Dispatched>(State&, SaveContext&, at::TensorList, const LayerArgs&);

}  // namespace te_torch::layer
