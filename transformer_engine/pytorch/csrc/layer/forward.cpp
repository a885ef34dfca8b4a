// The forward of a layer and of a chain (layer.h).
#include <algorithm>

#include "autograd/trailing_rows.h"
#include "core/grouped_operands.h"
#include "distributed/agreement.h"
#include "gemm/linear_core.h"
#include "layer/grouping.h"
#include "layer/layer_gemm.h"
#include "layer/prepare_operand.h"
#include "layer/save_rules.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kPackedPreActivation{"pre-activation, FP8", "the activation's backward reads it",
                                         "norm and first product: LayerNormMLP(checkpoint=True)", true};

// An operand that is x itself is kept as x in any case.
bool may_be_recomputed(const LayerConfig& config) {
  const ProductQuantization* q = config.quantization.get();
  return !config.prologue->is_identity() || (q != nullptr && !reads_high_precision(q));
}

// Rows after the live ones that quantizing a saved tensor again reads: those of the last live row's block; all, for a
// quantizer written in Python.
int64_t trailing_rows_of(const ProductQuantization* q) {
  if (q == nullptr || !q->x.active() || reads_high_precision(q)) return 0;
  if (q->x.spec.kind == QuantizeSpec::kPython) return kAllRows;
  return q->x.spec.scaling() == TE_SCALING_TENSOR ? 0 : 127;
}

int64_t trailing_rows_of(const LayerConfigs& layers, const NamedTensors& arguments) {
  int64_t rows = 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const bool input_recomputed = i + 1 < layers.size() && layers[i + 1].input == SaveMode::kRecompute;
    if (layers[i].operand != SaveMode::kRecompute && !input_recomputed) continue;
    if (layers[i].quantization == nullptr) continue;
    const at::TensorList given = arguments.list(weight_of(i));
    const size_t weights = layers[i].stacked ? grouped::weights_in(given) : given.size();
    for (size_t w = 0; w < weights; ++w) {
      rows = std::max(rows, trailing_rows_of(layers[i].gemm_policy->quantization(layers[i].quantization.get(), w)));
    }
  }
  return rows;
}

// Shapes of a layer that quantizes or communicates: its GEMM sees other matrices than x, or some rows of it. shown: in
// the error.
void check_shapes(const LayerConfig& config, const LayerInput& in, const Tensor& shown, const c10::SymInt& features) {
  if (config.quantization == nullptr && !config.tp_comm) return;
  const at::TensorList biases = in.epilogue.list(kBias);
  const Tensor of_all = config.stacked ? in.weights[0].select(0, 0) : Tensor();  // they have one shape
  for (size_t i = 0; i < std::max(in.weights.size(), biases.size()); ++i) {
    const OptionalTensor bias = biases.empty() ? OptionalTensor() : OptionalTensor(biases[i]);
    check_product(shown, features, config.stacked ? of_all : in.weights[i], bias, !in.own.empty());
  }
}

// A tensor with the leading dimensions of the operand, and x's dtype: x, but for a prologue with rows of its own.
// rows: of the operand, before it was quantized.
Tensor like_operand(const LayerConfig& config, const Tensor& x, const Operand& operand, const c10::SymInt& rows) {
  if (!config.prologue->has_own_rows()) return x;
  return operand.plain.defined() ? operand.plain : x.new_empty({1}).expand_symint({rows, x.sym_size(-1)});
}

bool adds_up(const LayerConfig& config) { return config.tp_comm != nullptr && config.tp_comm->adds_up(Pass::kFprop); }

// Of a stacked weight whose matrices a quantizer left as they are: all are the one tensor again, and some are views
// with its version, so that a write before the backward is noticed.
void keep_stacked(const DispatchMode& dispatch, const Tensor& stacked, WeightSet& set) {
  const auto plain = [](const Operand& weight) { return !weight.quantized(); };
  if (std::all_of(set.weights.begin(), set.weights.end(), plain)) {
    set.weights = {Operand{stacked, {}}};
    return;
  }
  for (const Operand& weight : set.weights) {
    if (plain(weight) && dispatch.direct()) share_version(weight.plain, stacked);
  }
}

// With a sum over ranks, the bias is added after that.
WeightSet weight_set(const DispatchMode& dispatch, const LayerConfig& config, const LayerInput& in,
                     at::TensorList biases, QuantizeUsage usage) {
  WeightSet set{{}, adds_up(config) ? at::TensorList() : biases};
  if (!in.own.empty()) {
    TORCH_INTERNAL_ASSERT(in.own.size() == (config.stacked ? grouped::weights_in(in.weights) : in.weights.size()));
    set.weights.assign(in.own.begin(), in.own.end());
    return set;
  }
  if (config.stacked && config.quantization == nullptr) {
    set.weights = {Operand{in.weights[0], {}}};
    return set;
  }
  std::vector<Tensor> matrices;
  if (config.stacked) matrices = matrices_in(dispatch, in.weights[0]);
  const at::TensorList weights = config.stacked ? at::TensorList(matrices) : in.weights;
  c10::SmallVector<const Quantizer*, 1> quantizers;
  for (size_t i = 0; i < weights.size(); ++i) {
    const ProductQuantization* q = config.gemm_policy->quantization(config.quantization.get(), i);
    quantizers.push_back(q != nullptr ? &q->weight : nullptr);
  }
  set.weights = operands_of(dispatch, quantizers, weights, usage);
  if (config.stacked) keep_stacked(dispatch, in.weights[0], set);
  return set;
}

struct CommResult {
  Tensor y;
  Operand gathered;  // kept for the backward in place of the operand; else undefined
};

// The GEMM of a layer with a TPComm. keep_gathered: the weight's gradient reads the operand with all ranks' rows.
CommResult gemm_with_comm(const DispatchMode& dispatch, const LayerConfig& config, const SaveContext& save,
                          const Tensor& x, const PreparedOperand& operand, const WeightSet& weights,
                          at::TensorList biases, QuantizeUsage usage, bool keep_gathered) {
  const ProductQuantization* q = config.quantization.get();
  const TPComm& tp_comm = *config.tp_comm;
  const OptionalTensor bias = adds_up(config) && !biases.empty() ? OptionalTensor(biases[0]) : OptionalTensor();
  // A backward that dequantizes the GEMM's operand keeps that operand, and nothing is gathered for the backward alone.
  const bool dequantized = backward_reads(q) == BackwardReads::kDequantized, high = operand.high_precision.defined();
  const bool quantized = !dequantized && (operand.for_gemm.quantized() || (high && operand.after_gather != nullptr));
  // A tensor that is gathered only for the backward is kept in the form in which it is gathered.
  const bool kept = keep_gathered && (tp_comm.keeps_gathered(quantized) || !save.serves_a_graph());
  ScopedBuffers buffers;  // until the result is complete
  const PendingResult pending = layer_gemm(dispatch, config, Pass::kFprop, operand.for_gemm, weights, x,
                                           tp_comm.begin(dispatch, Pass::kFprop, operand.for_gemm, x,
                                                         operand.after_gather, usage, bias, kept ? nullptr : &buffers));
  CommResult result;
  const CommOp* comm_op = pending.comm_op.get();
  if (comm_op != nullptr && keep_gathered) {
    const auto gather = [&](const Operand& mine, const Quantizer* quantizer, const CommOp* done) {
      return tp_comm.gather_all(dispatch, Pass::kFprop, mine, quantizer, done, {}, nullptr);
    };
    if (!kept) {
      report_recomputed(save, comm_op->operand(), q, x, saved_info(kGatheredInput, q));
    } else if (dequantized) {
      result.gathered = off_pool(comm_op->operand());
    } else {
      result.gathered = high ? gather(operand.high_precision, nullptr, nullptr)
                             : gather(operand.for_gemm, operand.after_gather, comm_op);
    }
  }
  result.y = pending.result();
  return result;
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

size_t fused_epilogues(const LayerConfig& config) {
  const Epilogues& all = config.epilogues;
  return size_t(std::find_if(all.begin(), all.end(),
                             [&](const auto& epilogue) { return !epilogue->fuses_into(*config.gemm_policy); }) -
                all.begin());
}

LayerOutput layer_forward(const DispatchMode& dispatch, const LayerConfig& config, size_t layer_idx, SaveContext& save,
                          const LayerInput& in, const WantedGradients& wanted, SaveFor save_for, bool want_output) {
  const ProductQuantization* q = config.quantization.get();
  const Prologue& prologue = *config.prologue;
  const Tensor& x = in.prologue.x;
  // Before a quantizer notes the amax of an x that is refused. A norm checks x itself; the operand of an activation is
  // checked after it.
  if (prologue.is_identity()) check_shapes(config, in, x, x.dim() > 0 ? x.sym_size(-1) : c10::SymInt(-1));
  if (config.tp_comm != nullptr) config.tp_comm->check(x);
  const bool save_operand = wanted.weight && config.operand == SaveMode::kSave && save_for == SaveFor::kBackward;
  const QuantizeUsage read = kept_usage(q), usage{true, save_operand && read.columnwise};
  LayerOutput out;
  c10::SymInt rows;
  const auto produce = [&](const Quantizer* quantizer) {
    out.prologue = prologue.forward(dispatch, in.prologue, quantizer, usage, want_output);
    Operand operand = std::move(out.prologue.operand);
    if (!prologue.is_identity()) {
      const Tensor& matrix = operand.quantized() ? operand.fp8.rowwise : operand.plain;
      rows = operand.row_map.defined() ? operand.row_map.sym_size(0) : matrix.sym_size(0);
      check_shapes(config, in, operand.quantized() || q != nullptr ? x : matrix, matrix.sym_size(-1));
    }
    return operand;
  };
  const OperandRequest request{Pass::kFprop, q != nullptr ? &q->x : nullptr, usage,
                               save_operand && reads_high_precision(q), nullptr};
  const PreparedOperand operand = prepare_operand(dispatch, config, request, x, produce);
  const size_t fused = fused_epilogues(config);
  const at::TensorList biases = fused > 0 ? in.epilogue.list(kBias) : at::TensorList();
  const bool backward_reads_weight = wanted.operand || save_for == SaveFor::kRecompute;
  const WeightSet weights = weight_set(dispatch, config, in, biases, {true, read.columnwise && backward_reads_weight});
  Operand gathered;
  if (config.tp_comm == nullptr) {
    const Tensor like = like_operand(config, x, operand.for_gemm, rows);
    out.y =
        config.gemm_policy->fprop(dispatch, operand.for_gemm, nullptr, weights, like, q == nullptr || q->split_fprop);
  } else {
    CommResult result = gemm_with_comm(dispatch, config, save, x, operand, weights, biases, usage,
                                       save_operand && config.tp_comm->gathers(Pass::kFprop));
    out.y = std::move(result.y);
    gathered = std::move(result.gathered);
  }
  OwnSaves epilogue_saves;
  for (size_t i = fused; i < config.epilogues.size(); ++i) {
    EpilogueOutput result = config.epilogues[i]->forward(dispatch, out.y, in.epilogue);
    out.y = std::move(result.y);
    epilogue_saves.append(result.saves.begin(), result.saves.end());
  }
  save_layer(
      dispatch, save,
      {config, layer_idx, in, out.prologue, epilogue_saves, operand.for_backward(), gathered, weights.weights, wanted},
      save_for);
  return out;
}

namespace {

// A traced call meets no other rank.
std::string_view fingerprint_group(const DispatchMode& dispatch, const LayerConfigs& layers, const Tensor& x) {
  if (!dispatch.direct()) return {};
  for (const LayerConfig& config : layers) {
    if (config.tp_comm != nullptr) return config.tp_comm->fingerprint_group(x);
  }
  return {};
}

// Sets the members of config that the call leaves to the defaults and to the policy of saved tensors.
void decide(LayerConfig& config, size_t layer_idx, const SavedPolicy& policy) {
  if (!config.tp_comm) config.tp_comm = defaults().tp_comm;
  if (!config.gemm_policy) config.gemm_policy = defaults().gemm_policy;
  if (config.prologue->recomputes_operand()) config.operand = SaveMode::kRecompute;
  config.operand = policy.decide(config.prologue->operand_info(), config.operand);
  if (!may_be_recomputed(config)) config.operand = SaveMode::kSave;
  if (layer_idx > 0) config.input = policy.decide(config.prologue->input_info(), config.input);
}

}  // namespace

template <class Mode>
variable_list LayerChain::forward(State& state, SaveContext& save, at::TensorList, const LayerArgs& call) {
  const DispatchMode dispatch(Mode{});
  const RankErrorGuard guard(fingerprint_group(dispatch, call.layers, call.x()), call.x(),
                             call.layers.size() > 1 ? "layernorm_mlp" : "linear");
  const NamedTensors& arguments = call.arguments;
  const size_t layers = call.layers.size();
  const Tensor& x = call.x();
  state.layers = std::move(call.layers);
  state.return_output = call.return_output;
  state.dtype = x.scalar_type();
  state.policy = defaults().saved;
  state.tensors = arguments.size();
  state.places = places_of(arguments);
  const bool graph = save.serves_a_graph();
  const WantedByLayer wanted(layers, state.places,
                             [&](size_t place) { return graph && arguments.tensors()[place].requires_grad(); });
  for (size_t i = 0; i < layers; ++i) decide(state.layers[i], i, *state.policy);

  const TrailingRows trailing(trailing_rows_of(state.layers, arguments));
  variable_list outputs(1);
  Tensor input = x;  // of the layer
  for (size_t i = 0; i < layers; ++i) {
    const LayerConfig& config = state.layers[i];
    const bool first = i == 0;
    const bool for_recompute = wanted.any && i + 1 < layers && state.layers[i + 1].input == SaveMode::kRecompute;
    const LayerInput in{{input, {arguments, prologue_of(i)}},
                        arguments.list(weight_of(i)),
                        {arguments, epilogue_of(i)},
                        call.own_weights[i]};
    LayerOutput out = layer_forward(dispatch, config, i, save, in, wanted.layers[i],
                                    for_recompute ? SaveFor::kRecompute : SaveFor::kBackward, call.return_output);
    PrologueOutput& prologue = out.prologue;
    if (first && prologue.output.defined()) {
      outputs.push_back(prologue.output);
      if (!prologue.input.is_same(x) || call.return_input) outputs.push_back(std::move(prologue.input));
    }
    if (for_recompute) {
      save.recomputed(call.return_output ? prologue.output : input, config.prologue->operand_info());
      save.recomputed(out.y, state.layers[i + 1].prologue->input_info());
    }
    if (!first && wanted.any && config.input == SaveMode::kSave && config.input_in_fp8) {
      keep_operand(save, saved_name(i, kPackedInput), packed_input(dispatch, input), {true, false},
                   kPackedPreActivation);
    }
    input = std::move(out.y);
  }
  outputs[0] = std::move(input);
  return outputs;
}

template variable_list LayerChain::forward<Direct>(State&, SaveContext&, at::TensorList, const LayerArgs&);
template variable_list LayerChain::forward<Dispatched>(State&, SaveContext&, at::TensorList, const LayerArgs&);

}  // namespace te_torch::layer
