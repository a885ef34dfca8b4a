// The forward of a layer and of a chain (layer.h). What is kept for the backward is decided and kept here alone.
#include <algorithm>

#include "autograd/rows_behind.h"
#include "distributed/agreement.h"
#include "gemm/linear_core.h"
#include "layer/layer.h"

namespace te_torch::layer {

namespace {

constexpr Kept kQuantizedWeight{"quantized weight", "the input's gradient is taken with it",
                                "a copy of a parameter: quantizing it again"};
constexpr Kept kMlpInput{"MLP input", "norm, first product and activation are recomputed from it",
                         "the sum or product that made it: te.checkpoint around the layer", true};
constexpr Kept kGatheredInput{"gathered input", "the weight's gradient is taken with all ranks' rows",
                              "gathering it again; tp_recompute_allgather=False keeps it"};
constexpr Kept kPackedPreActivation{"pre-activation, FP8", "the activation's backward reads it",
                                    "norm and first product: LayerNormMLP(checkpoint=True)"};

// Words of what is kept, with the reason where it is a recipe's backward_override.
Kept words(Kept what, const ProductQuantization* q) {
  if (const char* why = why_override(q)) what.why = why;
  return what;
}

Kept weight_words(const Operand& weight, const ProductQuantization* q) {
  return words(weight.quantized() ? kQuantizedWeight : kParameter, q);
}

bool unquantized(const ProductQuantization* q) { return backward_reads(q) == BackwardReads::kHighPrecision; }

// A weight as a backward in high precision reads it: the parameter; where that is held in FP8 alone, what it means.
// Such a parameter is a subclass in eager mode; in a layer that is run again it is FP8 data.
Operand weight_values(const Route& route, const Tensor& parameter, const Operand& read, bool own) {
  const bool subclass = route.direct() && parameter.key_set().has(c10::DispatchKey::Python);
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
bool may_be_recomputed(const Stage& stage) {
  const ProductQuantization* q = stage.quantization.get();
  return !stage.source->keeps_width() || (q != nullptr && !unquantized(q));
}

// Of what is kept in place of an operand, rows behind the live ones that quantizing it again reads: those of the last
// one's block; all, where a quantizer written in Python does it.
int64_t rows_behind_of(const ProductQuantization* q) {
  if (q == nullptr || !q->x.active() || unquantized(q)) return 0;
  if (q->x.spec.kind == QuantizeSpec::kPython) return kAllRows;
  return q->x.spec.scaling() == TE_SCALING_TENSOR ? 0 : 127;
}

int64_t rows_behind_of(const Stages& stages, const NamedTensors& arguments) {
  int64_t rows = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    const bool run_again = i + 1 < stages.size() && stages[i + 1].input == Fate::kRecomputed;
    if (stages[i].operand != Fate::kRecomputed && !run_again) continue;
    for (size_t w = 0; w < arguments.list(weight_of(i)).size(); ++w) {
      rows = std::max(rows, rows_behind_of(stages[i].products->quantization(stages[i].quantization.get(), w)));
    }
  }
  return rows;
}

// For a backward that goes on through the layer with what it has. gathered: the operand with all ranks' rows, where
// that is kept in its place.
void keep(Keeper& keeper, const Stage& stage, size_t number, const LayerInput& in, const LayerOutput& out,
          at::ArrayRef<Operand> weights, const Operand& gathered, Needs needs) {
  const Source& source = *stage.source;
  const ProductQuantization* q = stage.quantization.get();
  const Directions read = kept_directions(q);
  const Made& made = out.made;
  const bool again = needs.weight && stage.operand == Fate::kRecomputed;
  const bool input = (needs.source && source.reads_input()) || again;
  const bool elsewhere = number > 0 && (stage.input == Fate::kRecomputed || stage.input_in_fp8);
  const auto name = [&](SavedName n) { return saved_name(number, n); };
  if (input && !elsewhere) keeper.keep(name(kInput), made.input, source.input_words());
  for (const Operand& weight : weights) {
    if (needs.source) keep_operand(keeper, name(kWeight), weight, read, weight_words(weight, q));
  }
  if (again) {
    const Operand& operand = made.operand;
    if (number == 0 || stage.input == Fate::kKept) {  // else it goes with the input, which is named
      for (const Operand& group : operand.groups) {
        keeper.recomputed(unkept(group, q, made.input), words(source.operand_words(), q));
      }
      if (operand.groups.empty()) {
        keeper.recomputed(unkept(operand, q, made.input), words(source.operand_words(), q));
      }
    }
    if (!unquantized(q) && stage.products->quantizes_groups(q)) {
      for (const Tensor& used : stage.products->used_scales(operand)) keeper.keep(name(kUsedScales), used, kScales);
    } else if (!unquantized(q)) {
      keeper.keep(name(kUsedScales), used_scales(operand), kScales);
    }
  } else if (gathered.defined()) {
    keep_operand(keeper, name(kWholeOperand), gathered, read, words(kGatheredInput, q));
  } else if (needs.weight) {
    keep_operand(keeper, name(kOperand), made.operand, read, words(source.operand_words(), q));
  }
  if (!source.reads_input() || !(needs.source || again)) return;
  keeper.keep(name(kSavedGamma), in.source.gamma, kParameter);
  if (again) keeper.keep(name(kSavedBeta), in.source.beta, kParameter);
  keeper.keep(name(kMean), made.mean, kStatistic);
  keeper.keep(name(kRstd), made.rstd, kStatistic);
}

// For a backward that runs source and product again first.
void keep_for_recompute(const Route& route, Keeper& keeper, const ProductQuantization* q, size_t number,
                        const LayerInput& in, const LayerOutput& out, at::ArrayRef<Operand> weights) {
  const auto name = [&](SavedName n) { return saved_name(number, n); };
  keeper.keep(name(kInput), out.made.input, kMlpInput);
  keeper.keep(name(kSavedGamma), in.source.gamma, kParameter);
  keeper.keep(name(kSavedBeta), in.source.beta, kParameter);
  for (const Tensor& bias : in.biases) keeper.keep(name(kBias), bias, kParameter);
  keeper.keep(name(kUsedScales), used_scales(out.made.operand), kScales);
  for (const Operand& weight : weights) {
    keep_operand(keeper, name(kWeight), weight, {true, kept_directions(q).columnwise}, weight_words(weight, q));
  }
  for (size_t i = 0; unquantized(q) && i < weights.size(); ++i) {
    if (!weights[i].quantized()) continue;
    const Operand values = weight_values(route, in.weights[i], weights[i], !in.own.empty());
    keeper.keep(name(kWeightValues), values.plain, words(kParameter, q));
  }
}

void keep_for_backward(const Route& route, Keeper& keeper, const Stage& stage, size_t number, const LayerInput& in,
                       const LayerOutput& out, at::ArrayRef<Operand> weights, const Operand& gathered, Needs needs,
                       Keeping keeping) {
  const ProductQuantization* q = stage.quantization.get();
  if (keeping == Keeping::kForRecompute) {
    keep_for_recompute(route, keeper, q, number, in, out, weights);
  } else if (unquantized(q)) {
    c10::SmallVector<Operand, 1> values;
    for (size_t i = 0; i < weights.size(); ++i) {
      values.push_back(weight_values(route, in.weights[i], weights[i], !in.own.empty()));
    }
    keep(keeper, stage, number, in, out, values, gathered, needs);
  } else {
    keep(keeper, stage, number, in, out, weights, gathered, needs);
  }
}

}  // namespace

Defaults& defaults() {
  static Defaults policies{nullptr, std::make_shared<SingleProduct>(), std::make_shared<SavedPolicy>()};
  return policies;
}

Operand packed_input(const Route& route, const Tensor& input) {
  static const Quantizer packer{{QuantizeSpec::kBlock1d, false, true, 0.f}, {}, {}, {}};
  return operand_of(route, &packer, input, {true, false});
}

LayerOutput layer_forward(const Route& route, const Stage& stage, size_t number, Keeper& keeper, const LayerInput& in,
                          Needs needs, Keeping keeping, bool want_output) {
  const ProductQuantization* q = stage.quantization.get();
  const Source& source = *stage.source;
  const Tensor& x = in.source.x;
  const bool own = !in.own.empty();
  TORCH_INTERNAL_ASSERT(!own || in.own.size() == in.weights.size());
  const auto check = [&](const Tensor& shown, const c10::SymInt& depth) {
    if (q == nullptr && !stage.exchange) return;  // the product does, and of an exchange it sees some rows
    for (size_t i = 0; i < in.weights.size(); ++i) {
      check_product(shown, depth, in.weights[i], in.biases.empty() ? OptionalTensor() : OptionalTensor(in.biases[i]),
                    own);
    }
  };
  // Before a quantizer notes the amax of an x that is refused. A norm looks at x itself; what an activation makes of it
  // is known behind it.
  if (source.keeps_width()) check(x, x.dim() > 0 ? x.sym_size(-1) : c10::SymInt(-1));
  const Exchange* exchange = stage.exchange.get();
  if (exchange != nullptr) exchange->check(x);
  const Quantizer* quantizer = q != nullptr ? &q->x : nullptr;
  const Quantizing how =
      exchange != nullptr ? exchange->quantizing(route, Pass::kFprop, quantizer, x) : Quantizing::kBefore;
  const bool keep_operand = needs.weight && stage.operand == Fate::kKept && keeping == Keeping::kNormal;
  const Directions read = kept_directions(q);
  const Directions directions{true, keep_operand && read.columnwise};
  const bool both = keep_operand && unquantized(q);  // the backward reads the operand as it is
  const bool by_groups = stage.products->quantizes_groups(q);
  const Quantizer* before = how == Quantizing::kBefore && !both && !by_groups ? quantizer : nullptr;
  LayerOutput out;
  out.made = source.make(route, in.source, before, directions, want_output);
  Operand& operand = out.made.operand;
  if (!source.keeps_width() && operand.quantized()) check(x, operand.fp8.rowwise.sym_size(-1));
  if (!source.keeps_width() && !operand.quantized())
    check(q == nullptr ? operand.plain : x, operand.plain.sym_size(-1));
  const Operand values = both ? operand : Operand();
  if (both && how == Quantizing::kBefore && !by_groups) {
    operand = operand_of(route, quantizer, operand.plain, directions);
  }
  if (how == Quantizing::kTogether) operand = exchange->quantized(*quantizer, operand.plain, directions);
  if (by_groups) {
    operand = stage.products->quantized_groups(route, Pass::kFprop, Tensor(operand.plain), directions, nullptr);
  }

  const bool columnwise = read.columnwise && (needs.source || keeping == Keeping::kForRecompute);
  const bool adds_up = exchange != nullptr && exchange->adds_up(Pass::kFprop);
  WeightSet w{{}, adds_up ? at::TensorList() : in.biases};
  if (own) {
    w.weights.assign(in.own.begin(), in.own.end());
  } else {
    c10::SmallVector<const Quantizer*, 1> quantizers;
    for (size_t i = 0; i < in.weights.size(); ++i) {
      const ProductQuantization* its = stage.products->quantization(q, i);
      quantizers.push_back(its != nullptr ? &its->weight : nullptr);
    }
    w.weights = operands_of(route, quantizers, in.weights, {true, columnwise});
  }
  const bool split = q == nullptr || q->split_fprop;
  if (exchange == nullptr) {
    out.y = stage.products->fprop(route, operand, nullptr, w, x, split);
    if (both) operand = values;
    keep_for_backward(route, keeper, stage, number, in, out, w.weights, {}, needs, keeping);
    return out;
  }
  const Quantizer* behind = how == Quantizing::kBehind ? quantizer : nullptr;
  const OptionalTensor bias = adds_up && !in.biases.empty() ? OptionalTensor(in.biases[0]) : OptionalTensor();
  // The backward reads what the product has read, and nothing else would be gathered to be kept.
  const bool as_it_came = backward_reads(q) == BackwardReads::kDequantized;
  const bool quantized = !as_it_came && (operand.quantized() || (both && behind != nullptr));
  const bool reads_gathered = keep_operand && exchange->gathers(Pass::kFprop);
  // What a backward keeps for itself alone is kept as it came.
  const bool keeps = reads_gathered && (exchange->keeps_gathered(quantized) || !keeper.serves_a_graph());
  Leases leases;  // until the product is there
  int64_t whole = 0;
  const auto product = [&](const Operand& part, const Rows* rows, const Tensor& like, const Tensor& into) {
    return into.defined() ? stage.products->fprop_into(route, part, rows, w, like, split, whole, into)
                          : stage.products->fprop(route, part, rows, w, like, split);
  };
  const auto ahead = [&](Transfer& transfer) {
    if (!route.direct()) return;
    whole = transfer.rows();
    const bool runs = whole > 0 && stage.products->takes_runs(Pass::kFprop, transfer.operand(), whole, w, x, split);
    transfer.expect(runs ? std::optional(in.weights[0].size(0)) : std::nullopt);
  };
  const Passing passing =
      through(exchange->begin(route, Pass::kFprop, operand, x, behind, directions, bias, keeps ? nullptr : &leases),
              operand, x, product, ahead);
  Operand gathered;
  if (passing.transfer != nullptr && reads_gathered) {
    const Operand& arrived = passing.transfer->operand();
    if (keeps) {
      gathered = as_it_came ? off_lease(arrived)
                 : both     ? exchange->whole(route, Pass::kFprop, values, nullptr, nullptr, {}, nullptr)
                        : exchange->whole(route, Pass::kFprop, operand, behind, passing.transfer.get(), {}, nullptr);
    } else {
      keeper.recomputed(unkept(arrived, q, x), words(kGatheredInput, q));
    }
  }
  if (both) operand = values;
  out.y = passing.result();
  keep_for_backward(route, keeper, stage, number, in, out, w.weights, gathered, needs, keeping);
  return out;
}

namespace {

// What is traced meets nobody.
std::string_view asking_group(const Route& route, const Stages& stages, const Tensor& x) {
  if (!route.direct()) return {};
  for (const Stage& stage : stages) {
    if (stage.exchange != nullptr) return stage.exchange->asking_group(x);
  }
  return {};
}

}  // namespace

template <class RouteType>
variable_list Chain::forward(State& state, Keeper& keeper, at::TensorList, const Call& call) {
  const Route route(RouteType{});
  const HeardByRanks heard(asking_group(route, call.stages, call.x()), call.x(),
                           call.stages.size() > 1 ? "layernorm_mlp" : "linear");
  const NamedTensors& arguments = call.arguments;
  const size_t layers = call.stages.size();
  const Tensor& x = call.x();
  state.stages = std::move(call.stages);
  state.return_output = call.return_output;
  state.dtype = x.scalar_type();
  state.policy = defaults().saved;
  state.tensors = arguments.size();
  for (int name = 0; name < weight_of(layers); ++name) {
    state.places.push_back({int64_t(arguments.find(name)), int64_t(arguments.list(name).size())});
  }

  const bool graph = keeper.serves_a_graph();
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
    Stage& stage = state.stages[i];
    if (!stage.exchange) stage.exchange = defaults().exchange;
    if (!stage.products) stage.products = defaults().products;
    if (stage.source->brings_operand_back()) stage.operand = Fate::kRecomputed;
    stage.operand = policy.decide(stage.source->operand_words(), stage.operand);
    if (!may_be_recomputed(stage)) stage.operand = Fate::kKept;
    if (i > 0) stage.input = policy.decide(stage.source->input_words(), stage.input);
  }

  const RowsBehind behind(rows_behind_of(state.stages, arguments));
  const OptionalTensor none;
  const OptionalTensor residual = arguments.optional(kResidual), gamma = arguments.optional(kGamma),
                       beta = arguments.optional(kBeta);
  variable_list outputs(1);
  Tensor between = x;  // what the layer reads
  for (size_t i = 0; i < layers; ++i) {
    const bool first = i == 0, for_recompute = any && i + 1 < layers && state.stages[i + 1].input == Fate::kRecomputed;
    const SourceInput source{between, first ? residual : none, first ? gamma : none, first ? beta : none};
    const LayerInput in{source, arguments.list(weight_of(i)), arguments.list(bias_of(i)), call.own_weights[i]};
    LayerOutput out = layer_forward(route, state.stages[i], i, keeper, in, needs[i],
                                    for_recompute ? Keeping::kForRecompute : Keeping::kNormal, call.return_output);
    if (first && gamma.has_value()) {
      outputs.push_back(out.made.output);
      if (residual.has_value() || call.return_input) outputs.push_back(std::move(out.made.input));
    }
    if (for_recompute) {
      keeper.recomputed(call.return_output ? out.made.output : between, state.stages[i].source->operand_words());
      keeper.recomputed(out.y, state.stages[i + 1].source->input_words());
    }
    if (i > 0 && any && state.stages[i].input == Fate::kKept && state.stages[i].input_in_fp8) {
      keep_operand(keeper, saved_name(i, kPackedInput), packed_input(route, between), {true, false},
                   kPackedPreActivation);
    }
    between = std::move(out.y);
  }
  outputs[0] = std::move(between);
  return outputs;
}

template variable_list Chain::forward<Direct>(State&, Keeper&, at::TensorList, const Call&);
template variable_list Chain::forward<Dispatched>(State&, Keeper&, at::TensorList, const Call&);

}  // namespace te_torch::layer
