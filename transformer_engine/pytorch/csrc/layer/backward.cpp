// The backward of a layer and of a chain (layer.h): takes back what forward.cpp kept.
#include <ATen/TensorOperators.h>

#include "layer/gathered_product.h"
#include "layer/layer.h"

namespace te_torch::layer {

namespace {

// What arrives at a layer's result: dy as it is, or quantized already by whoever made it, with its column sums then.
struct Incoming {
  Tensor dy;
  Operand made;
  Tensor dbias;
  Tensor like;         // has the leading dimensions and the dtype
  Tensor norm_output;  // what arrives at a norm's output, and at its input
  Tensor norm_input;

  bool any() const { return dy.defined() || made.defined() || dbias.defined(); }
};

struct WantedHere {
  bool source = false, input = false, gamma = false, beta = false;  // source: any of what stands before the product
  bool weight = false, bias = false;
};

// How the product that made a layer's input reads that input's gradient.
struct Onward {
  const Quantizer* quantizer = nullptr;
  Directions directions;
  bool sums = false;
};

struct Gradients {
  Operand dx;
  Tensor dx_sums, dgamma, dbeta;
  WeightGrads weights;
};

// What a layer's backward has: its saved tensors, and its source's input, which another layer may have recomputed.
SourceSaved source_saved(const NamedTensors& saved, size_t number, const Tensor& input) {
  const auto get = [&](SavedName n) -> const Tensor& { return saved[saved_name(number, n)]; };
  return {input.defined() ? input : get(kInput),
          get(kSavedGamma),
          get(kSavedBeta),
          get(kMean),
          get(kRstd),
          get(kUsedScales)};
}

// What a weight's gradient is made of. gathered: the operand has all ranks' rows already. behind: of dy, as an exchange
// takes it.
struct WeightParts {
  Gradient gradient;
  Operand operand;
  bool gathered = false;
  const Quantizer* behind = nullptr;
};

// Its product, ready to be computed; divided: the same, where its matrices are divided over ranks.
struct WeightWork {
  std::shared_ptr<WeightProduct> product;
  std::shared_ptr<GatheredProduct> divided;

  bool defined() const { return product != nullptr; }
};

WeightWork weight_work(const Route& route, const Stage& stage, WeightParts parts, at::ScalarType dtype) {
  const ProductQuantization* q = stage.quantization.get();
  const Exchange* exchange = stage.exchange.get();
  // What a sink stores must not hold this node, which holds the sink: an output of the node, kept, would.
  if (stage.sink && parts.operand.plain.defined()) parts.operand.plain = parts.operand.plain.detach();
  if (stage.sink) {
    for (const Operand* read : {&parts.gradient.dy, &parts.operand}) refuse_leased(*read, "weight gradient");
  }
  const bool x = exchange != nullptr && exchange->gathers(Pass::kFprop) && !parts.gathered;
  const bool dy = exchange != nullptr && exchange->gathers(Pass::kDgrad);
  if (x || dy) {
    const auto divided = std::make_shared<GatheredProduct>(stage, std::move(parts.gradient), std::move(parts.operand),
                                                           parts.behind, x, dtype);
    return {divided, divided};
  }
  return {stage.products->weight_product(route, std::move(parts.gradient), std::move(parts.operand), dtype,
                                         q == nullptr || q->split_wgrad),
          nullptr};
}

// arrived: the transfer of dy that the input's gradient was taken over, or null.
WeightGrads weight_gradient(const Route& route, const Stage& stage, WeightWork work, const Transfer* arrived,
                            bool with_bias) {
  const auto gradient = [&] {
    const probe::Because told(why_override(stage.quantization.get()));
    return stage.sink ? stage.sink->take(work.product, with_bias) : work.product->compute(route, with_bias);
  };
  if (work.divided == nullptr) return gradient();
  const GatheredProduct::Loan loan(work.divided, arrived);
  return gradient();
}

Gradients layer_backward(const Route& route, const Stage& stage, const SavedPolicy& policy, size_t number,
                         const NamedTensors& saved, const Tensor& input, at::ScalarType dtype, const WantedHere& wanted,
                         const Incoming& in, const Onward& onward) {
  const ProductQuantization* q = stage.quantization.get();
  const Source& source = *stage.source;
  const Exchange* exchange = stage.exchange.get();
  const SourceSaved from = source_saved(saved, number, input);
  Gradients out;

  WeightParts parts{{in.made, in.dbias}, {}, false, nullptr};
  Gradient& gradient = parts.gradient;
  const Directions directions{wanted.source, wanted.weight};
  const bool by_groups = stage.products->quantizes_groups(q);
  if (in.dy.defined() && (wanted.source || wanted.weight || wanted.bias)) {
    const Quantizer* quantizer = gradient_quantizer(q, directions);
    const Quantizing how =
        exchange != nullptr ? exchange->quantizing(route, Pass::kDgrad, quantizer, in.dy) : Quantizing::kBefore;
    Tensor* sums = wanted.bias ? &gradient.dbias : nullptr;
    if (by_groups) {
      gradient.dy = stage.products->quantized_groups(route, Pass::kDgrad, in.dy, directions, sums);
    } else if (how == Quantizing::kBefore) {
      gradient.dy = operand_of(route, quantizer, in.dy, directions, sums);
    } else {
      if (wanted.bias) operand_of(route, gradient_quantizer(q, {}), in.dy, {}, sums);
      gradient.dy =
          how == Quantizing::kTogether ? exchange->quantized(*quantizer, in.dy, directions) : Operand{in.dy, {}};
      parts.behind = how == Quantizing::kBehind ? quantizer : nullptr;
    }
    // A bias behind the sum over ranks has the gradient of this rank's rows; the product's sums would be of all.
    const bool all_rows = exchange != nullptr && exchange->gathers(Pass::kDgrad);
    if (all_rows && wanted.bias && !gradient.dbias.defined()) gradient.dbias = column_sums(in.dy);
  }
  // A source that brings the operand back on the way goes before the weight's gradient, which reads it; others go
  // behind it, so that what they make is not alive meanwhile, and what is on its way has time.
  const bool before = source.brings_operand_back();
  const BackwardReads reads = backward_reads(q);
  const Quantizer* as_before = q != nullptr && reads != BackwardReads::kHighPrecision ? &q->x : nullptr;
  SourceGradient back{{}, in.norm_input, wanted.gamma, wanted.beta, wanted.input};
  back.quantizer = reads == BackwardReads::kQuantized ? as_before : nullptr;
  const bool through_source = in.any() && wanted.source, wants_weight = in.any() && wanted.weight;
  const auto find_operand = [&](const TakenBack& taken) {
    parts.operand = kept_operand(saved, saved_name(number, kWholeOperand));
    parts.gathered = parts.operand.defined();
    if (!parts.gathered) parts.operand = kept_operand(saved, saved_name(number, kOperand));
    if (!parts.operand.defined()) {
      const bool behind = exchange != nullptr && as_before != nullptr &&
                          exchange->quantizing(route, Pass::kFprop, as_before, from.input) == Quantizing::kBehind;
      const Quantizer* now = behind || by_groups ? nullptr : back.quantizer;
      parts.operand = taken.operand.defined() ? taken.operand : source.recompute(route, from, now);
      if (by_groups && as_before != nullptr) {
        const Tensor plain = parts.operand.plain;
        const at::TensorList used = saved.list(saved_name(number, kUsedScales));
        parts.operand = stage.products->quantized_again(route, plain, kept_directions(q), used);
      } else if (reads == BackwardReads::kDequantized && !behind) {
        parts.operand = recomputed_operand(route, as_before, from.used_scales, parts.operand.plain, kept_directions(q));
      }
    }
    if (stage.operand == Fate::kRecomputed) policy.recomputed(source.operand_words());
  };

  Leases leases;  // of what arrives: the gradient, which both products read, and the operand, if it is begun here
  WeightWork work;
  // The operand's rows go ahead of the input gradient's, on one lane: they are read first, and nothing else is there
  // to be pushed until runs of that are computed.
  if (wants_weight && through_source && !before && exchange != nullptr && exchange->begins_ahead() &&
      exchange->gathers(Pass::kFprop) && (!stage.sink || stage.sink->computes_now())) {
    find_operand({});
    work = weight_work(route, stage, parts, dtype);
    if (work.divided != nullptr) work.divided->begin(route, leases);
  }
  Passing passing;
  if (through_source) {
    const probe::Because told(why_override(q));
    WeightSet w{kept_operands(saved, saved_name(number, kWeight)), {}};
    for (Operand& weight : w.weights) {  // a parameter whose FP8 copy served under autocast was not cast
      if (!weight.quantized() && weight.plain.scalar_type() != dtype) weight.plain = weight.plain.to(dtype);
    }
    const bool split = q == nullptr || q->split_dgrad;
    int64_t whole = 0;
    const auto product = [&](const Operand& part, const Rows* rows, const Tensor& like, const Tensor& into) {
      return into.defined() ? stage.products->dgrad_into(route, part, rows, w, like, split, whole, into)
                            : stage.products->dgrad(route, part, rows, w, like, split);
    };
    const Tensor& like = in.dy.defined() ? in.dy : in.like;
    std::unique_ptr<Transfer> transfer = exchange != nullptr
                                             ? exchange->begin(route, Pass::kDgrad, gradient.dy, like, parts.behind,
                                                               directions, OptionalTensor(), &leases)
                                             : nullptr;
    const auto ahead = [&](Transfer& transfer) {
      if (!route.direct()) return;
      const Operand& weight = w.weights[0];
      const Tensor& across = weight.quantized() ? weight.fp8.columnwise : weight.plain;
      whole = transfer.rows();
      const bool runs = whole > 0 && across.defined() &&
                        stage.products->takes_runs(Pass::kDgrad, transfer.operand(), whole, w, like, split);
      transfer.expect(runs ? std::optional(across.size(weight.quantized() ? 0 : 1)) : std::nullopt);
    };
    passing = through(std::move(transfer), gradient.dy, like, product, ahead);
  }

  back.wants_operand = wanted.weight && stage.operand == Fate::kRecomputed;
  back.onward = onward.quantizer;
  back.directions = onward.directions;
  back.wants_onward_sums = onward.sums;
  const auto take_back = [&] {
    if (passing.defined()) back.d_operand = passing.result();
    if (in.norm_output.defined()) {
      back.d_operand = back.d_operand.defined() ? back.d_operand + in.norm_output : in.norm_output;
    }
    return source.take_back(route, from, back);
  };
  TakenBack taken;
  if (before && through_source) taken = take_back();

  if (wants_weight) {
    if (!work.defined()) {
      find_operand(taken);
      work = weight_work(route, stage, std::move(parts), dtype);
    }
    parts = {};
    out.weights = weight_gradient(route, stage, std::move(work), passing.transfer.get(), wanted.bias);
  } else if (in.any() && wanted.bias) {
    out.weights.biases = stage.products->bias_gradients(route, in.dy, gradient.dbias);
  }
  if (!before && wanted.source) taken = take_back();
  out.dx = taken.dx;
  out.dx_sums = taken.dx_sums;
  out.dgamma = taken.dgamma;
  out.dbeta = taken.dbeta;
  return out;
}

// A layer's source and product once more, by the scales of the forward: its result, and what the forward would have
// kept of it.
std::pair<Tensor, NamedTensors> recompute_layer(const Route& route, Stage stage, size_t number,
                                                const NamedTensors& saved, Needs needs) {
  const auto get = [&](SavedName n) { return saved.optional(saved_name(number, n)); };
  stage.operand = Fate::kKept;
  if (route.direct() &&
      stage.quantization != nullptr) {  // a traced route has no state, and makes the same scales again
    stage.quantization = with_scales(*stage.quantization, saved[saved_name(number, kUsedScales)]);
  }
  const auto weights = kept_operands(saved, saved_name(number, kWeight));
  std::vector<Tensor> parameters = saved.list(saved_name(number, kWeightValues)).vec();  // of all, or of none
  for (size_t i = parameters.size(); i < weights.size(); ++i) {
    parameters.push_back(weights[i].quantized() ? weights[i].fp8.rowwise : weights[i].plain);
  }
  TORCH_INTERNAL_ASSERT(parameters.size() == weights.size());
  const at::ArrayRef<Operand> own = weights[0].quantized() ? at::ArrayRef<Operand>(weights) : at::ArrayRef<Operand>();
  const OptionalTensor none, gamma = get(kSavedGamma), beta = get(kSavedBeta);
  const Tensor input = saved[saved_name(number, kInput)];
  const LayerInput in{{input, none, gamma, beta}, parameters, saved.list(saved_name(number, kBias)), own};
  Keeper keeper = Keeper::collecting();
  const Tensor y = layer_forward(route, stage, number, keeper, in, needs, Keeping::kNormal, false).y;
  return {y, keeper.take()};
}

}  // namespace

template <class RouteType>
variable_list Chain::backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                              const variable_list& grads) {
  const Route route(RouteType{});
  const size_t layers = state.stages.size();
  // The node's first argument is the list of all tensors.
  const auto wants = [&](int name) {
    const Rows& place = state.places[name];
    for (int64_t i = 0; i < place.count; ++i) {
      if (wanted.at(0, size_t(place.first + i))) return true;
    }
    return false;
  };
  c10::SmallVector<WantedHere, 2> here(layers);
  bool before = wants(kX) || wants(kResidual) || wants(kGamma) || wants(kBeta);
  for (size_t i = 0; i < layers; ++i) {
    here[i] = {before, before, false, false, wants(weight_of(i)), wants(bias_of(i))};
    before = before || here[i].weight || (i + 1 < layers && here[i].bias);
  }
  here[0].input = wants(kX) || wants(kResidual);
  here[0].gamma = wants(kGamma);
  here[0].beta = wants(kBeta);
  const bool any = before;

  // What layers made for the next one and did not keep, and what running them again has kept instead.
  c10::SmallVector<Tensor, 2> inputs(layers);
  c10::SmallVector<NamedTensors, 2> kept_for_recompute(layers);
  for (size_t i = 0; any && i + 1 < layers; ++i) {
    if (state.stages[i + 1].input != Fate::kRecomputed) continue;
    std::tie(inputs[i + 1], kept_for_recompute[i]) =
        recompute_layer(route, state.stages[i], i, saved, {here[i].source, here[i].weight});
    state.policy->recomputed(state.stages[i + 1].source->input_words());
  }

  variable_list out(state.tensors);
  const auto give = [&](int name, at::TensorList gradients) {
    for (int64_t i = 0; i < state.places[name].count && i < int64_t(gradients.size()); ++i) {
      const size_t place = size_t(state.places[name].first + i);
      if (wanted.at(0, place)) out[place] = gradients[size_t(i)];
    }
  };
  const auto grad = [&](size_t i) { return grads.size() > i ? grads[i] : Tensor(); };
  Incoming in;
  in.dy = grads[0];
  for (size_t i = layers; i-- > 0;) {
    if (i + 1 < layers && !here[i + 1].source) break;
    const Stage& stage = state.stages[i];
    const NamedTensors& table = kept_for_recompute[i].size() > 0 ? kept_for_recompute[i] : saved;
    Tensor& input = inputs[i];
    if (i > 0 && !input.defined()) input = table[saved_name(i, kInput)];
    if (i > 0 && any && grads[0].defined() && stage.input_in_fp8) {
      const Tensor& like = input.defined() ? input : grads[0];
      const Operand packed =
          input.defined() ? packed_input(route, input) : kept_operand(saved, saved_name(i, kPackedInput));
      const Tensor unpacked = plain_of(route, packed, state.dtype);  // leading dimensions folded
      c10::SymDimVector shape(like.sym_sizes().begin(), like.sym_sizes().end());
      shape.back() = unpacked.sym_size(-1);
      if (stage.exchange != nullptr && !input.defined()) shape[0] = stage.exchange->rows_before(shape[0]);
      input = unpacked.view_symint(shape);
    }
    Onward onward;
    if (i > 0) {
      const Directions directions{here[i - 1].source, here[i - 1].weight};
      onward = {gradient_quantizer(state.stages[i - 1].quantization.get(), directions), directions, here[i - 1].bias};
    }
    if (i == 0) {
      in.norm_output = state.return_output ? grad(1) : Tensor();
      in.norm_input = grad(2);
    }
    const Gradients made =
        layer_backward(route, stage, *state.policy, i, table, input, state.dtype, here[i], in, onward);
    give(weight_of(i), made.weights.weights);
    give(bias_of(i), made.weights.biases);
    if (i == 0) {
      give(kX, made.dx.plain);
      give(kResidual, made.dx.plain);
      give(kGamma, made.dgamma);
      give(kBeta, made.dbeta);
    } else {
      in = {made.dx.plain, made.dx.quantized() ? made.dx : Operand{}, made.dx_sums, input, {}, {}};
    }
  }
  return out;
}

template variable_list Chain::backward<Direct>(const State&, const Wanted&, const NamedTensors&, const variable_list&);
template variable_list Chain::backward<Dispatched>(const State&, const Wanted&, const NamedTensors&,
                                                   const variable_list&);

}  // namespace te_torch::layer
