// The backward of a layer and of a chain (layer.h): takes back what forward.cpp kept.
#include <ATen/TensorOperators.h>

#include "layer/gathered_wgrad.h"
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
  bool prologue = false, input = false, gamma = false, beta = false;  // prologue: any of what stands before the product
  bool weight = false, bias = false;
};

// How the product that made a layer's input reads that input's gradient.
struct Onward {
  const Quantizer* quantizer = nullptr;
  QuantizeUsage usage;
  bool sums = false;
};

struct Gradients {
  Operand dx;
  Tensor dx_sums, dgamma, dbeta;
  WeightGrads weights;
};

// What a layer's backward has: its saved tensors, and its prologue's input, which another layer may have recomputed.
PrologueSaved prologue_saved(const NamedTensors& saved, size_t layer_idx, const Tensor& input) {
  const auto get = [&](SavedName n) -> const Tensor& { return saved[saved_name(layer_idx, n)]; };
  return {input.defined() ? input : get(kInput),
          get(kSavedGamma),
          get(kSavedBeta),
          get(kMean),
          get(kRstd),
          get(kUsedScales)};
}

// What a weight's gradient is made of. gathered: the operand has all ranks' rows already. behind: of dy, as a TPComm
// takes it.
struct WeightParts {
  Gradient gradient;
  Operand operand;
  bool gathered = false;
  const Quantizer* behind = nullptr;
};

// Its product, ready to be computed; divided: the same, where its matrices are divided over ranks.
struct WeightWork {
  std::shared_ptr<WgradTask> product;
  std::shared_ptr<GatheredWgrad> divided;

  bool defined() const { return product != nullptr; }
};

WeightWork weight_work(const DispatchMode& dispatch, const LayerConfig& config, WeightParts parts,
                       at::ScalarType dtype) {
  const ProductQuantization* q = config.quantization.get();
  const TPComm* tp_comm = config.tp_comm.get();
  // What a gradient accumulator stores must not hold this node, which holds the gradient accumulator: an output of the
  // node, kept, would.
  if (config.grad_accumulator && parts.operand.plain.defined()) parts.operand.plain = parts.operand.plain.detach();
  if (config.grad_accumulator) {
    for (const Operand* read : {&parts.gradient.dy, &parts.operand}) refuse_pooled(*read, "weight gradient");
  }
  const bool x = tp_comm != nullptr && tp_comm->gathers(Pass::kFprop) && !parts.gathered;
  const bool dy = tp_comm != nullptr && tp_comm->gathers(Pass::kDgrad);
  if (x || dy) {
    const auto divided = std::make_shared<GatheredWgrad>(config, std::move(parts.gradient), std::move(parts.operand),
                                                         parts.behind, x, dtype);
    return {divided, divided};
  }
  return {config.gemm_policy->wgrad_task(dispatch, std::move(parts.gradient), std::move(parts.operand), dtype,
                                         q == nullptr || q->split_wgrad),
          nullptr};
}

// arrived: the CommOp of dy that the input's gradient was taken over, or null.
WeightGrads weight_gradient(const DispatchMode& dispatch, const LayerConfig& config, WeightWork work,
                            const CommOp* arrived, bool with_bias) {
  const auto gradient = [&] {
    const probe::Because told(why_override(config.quantization.get()));
    return config.grad_accumulator ? config.grad_accumulator->take(work.product, with_bias)
                                   : work.product->compute(dispatch, with_bias);
  };
  if (work.divided == nullptr) return gradient();
  const GatheredWgrad::Loan loan(work.divided, arrived);
  return gradient();
}

Gradients layer_backward(const DispatchMode& dispatch, const LayerConfig& config, const SavedPolicy& policy,
                         size_t layer_idx, const NamedTensors& saved, const Tensor& input, at::ScalarType dtype,
                         const WantedHere& wanted, const Incoming& in, const Onward& next_quantizer) {
  const ProductQuantization* q = config.quantization.get();
  const Prologue& prologue = *config.prologue;
  const TPComm* tp_comm = config.tp_comm.get();
  const PrologueSaved from = prologue_saved(saved, layer_idx, input);
  Gradients out;

  WeightParts parts{{in.made, in.dbias}, {}, false, nullptr};
  Gradient& gradient = parts.gradient;
  const QuantizeUsage usage{wanted.prologue, wanted.weight};
  const bool by_groups = config.gemm_policy->quantizes_groups(q);
  if (in.dy.defined() && (wanted.prologue || wanted.weight || wanted.bias)) {
    const Quantizer* quantizer = gradient_quantizer(q, usage);
    const QuantizeAt how =
        tp_comm != nullptr ? tp_comm->quantize_at(dispatch, Pass::kDgrad, quantizer, in.dy) : QuantizeAt::kBeforeGather;
    Tensor* sums = wanted.bias ? &gradient.dbias : nullptr;
    if (by_groups) {
      gradient.dy = config.gemm_policy->quantized_groups(dispatch, Pass::kDgrad, in.dy, usage, sums);
    } else if (how == QuantizeAt::kBeforeGather) {
      gradient.dy = operand_of(dispatch, quantizer, in.dy, usage, sums);
    } else {
      if (wanted.bias) operand_of(dispatch, gradient_quantizer(q, {}), in.dy, {}, sums);
      gradient.dy =
          how == QuantizeAt::kWithSharedAmax ? tp_comm->quantized(*quantizer, in.dy, usage) : Operand{in.dy, {}};
      parts.behind = how == QuantizeAt::kAfterGather ? quantizer : nullptr;
    }
    // A bias behind the sum over ranks has the gradient of this rank's rows; the product's sums would be of all.
    const bool all_rows = tp_comm != nullptr && tp_comm->gathers(Pass::kDgrad);
    if (all_rows && wanted.bias && !gradient.dbias.defined()) gradient.dbias = column_sums(in.dy);
  }
  // A prologue that brings the operand back on the way goes before the weight's gradient, which reads it; others go
  // behind it, so that what they make is not alive meanwhile, and what is on its way has time.
  const bool before = prologue.recomputes_operand();
  const BackwardReads reads = backward_reads(q);
  const Quantizer* as_before = q != nullptr && reads != BackwardReads::kHighPrecision ? &q->x : nullptr;
  PrologueGradient back{{}, in.norm_input, wanted.gamma, wanted.beta, wanted.input};
  back.quantizer = reads == BackwardReads::kQuantized ? as_before : nullptr;
  const bool through_prologue = in.any() && wanted.prologue, wants_weight = in.any() && wanted.weight;
  const auto find_operand = [&](const PrologueBackward& taken) {
    parts.operand = kept_operand(saved, saved_name(layer_idx, kWholeOperand));
    parts.gathered = parts.operand.defined();
    if (!parts.gathered) parts.operand = kept_operand(saved, saved_name(layer_idx, kOperand));
    if (!parts.operand.defined()) {
      const bool behind =
          tp_comm != nullptr && as_before != nullptr &&
          tp_comm->quantize_at(dispatch, Pass::kFprop, as_before, from.input) == QuantizeAt::kAfterGather;
      const Quantizer* now = behind || by_groups ? nullptr : back.quantizer;
      parts.operand = taken.operand.defined() ? taken.operand : prologue.recompute(dispatch, from, now);
      if (by_groups && as_before != nullptr) {
        const Tensor plain = parts.operand.plain;
        const at::TensorList used = saved.list(saved_name(layer_idx, kUsedScales));
        parts.operand = config.gemm_policy->quantized_again(dispatch, plain, kept_usage(q), used);
      } else if (reads == BackwardReads::kDequantized && !behind) {
        parts.operand = recomputed_operand(dispatch, as_before, from.used_scales, parts.operand.plain, kept_usage(q));
      }
    }
    if (config.operand == SaveMode::kRecompute) policy.recomputed(prologue.operand_info());
  };

  ScopedBuffers
      buffers;  // of what arrives: the gradient, which both products read, and the operand, if it is begun here
  WeightWork work;
  // The operand's rows go ahead of the input gradient's, on one lane: they are read first, and nothing else is there
  // to be pushed until runs of that are computed.
  if (wants_weight && through_prologue && !before && tp_comm != nullptr && tp_comm->begins_ahead() &&
      tp_comm->gathers(Pass::kFprop) && (!config.grad_accumulator || config.grad_accumulator->computes_now())) {
    find_operand({});
    work = weight_work(dispatch, config, parts, dtype);
    if (work.divided != nullptr) work.divided->begin(dispatch, buffers);
  }
  PendingResult passing;
  if (through_prologue) {
    const probe::Because told(why_override(q));
    WeightSet w{kept_operands(saved, saved_name(layer_idx, kWeight)), {}};
    for (Operand& weight : w.weights) {  // a parameter whose FP8 copy served under autocast was not cast
      if (!weight.quantized() && weight.plain.scalar_type() != dtype) weight.plain = weight.plain.to(dtype);
    }
    const bool split = q == nullptr || q->split_dgrad;
    int64_t whole = 0;
    const auto product = [&](const Operand& part, const Rows* rows, const Tensor& like, const Tensor& into) {
      return into.defined() ? config.gemm_policy->dgrad_into(dispatch, part, rows, w, like, split, whole, into)
                            : config.gemm_policy->dgrad(dispatch, part, rows, w, like, split);
    };
    const Tensor& like = in.dy.defined() ? in.dy : in.like;
    std::unique_ptr<CommOp> comm_op =
        tp_comm != nullptr
            ? tp_comm->begin(dispatch, Pass::kDgrad, gradient.dy, like, parts.behind, usage, OptionalTensor(), &buffers)
            : nullptr;
    const auto ahead = [&](CommOp& comm_op) {
      if (!dispatch.direct()) return;
      const Operand& weight = w.weights[0];
      const Tensor& across = weight.quantized() ? weight.fp8.columnwise : weight.plain;
      whole = comm_op.rows();
      const bool runs = whole > 0 && across.defined() &&
                        config.gemm_policy->takes_runs(Pass::kDgrad, comm_op.operand(), whole, w, like, split);
      comm_op.plan_chunks(runs ? std::optional(across.size(weight.quantized() ? 0 : 1)) : std::nullopt);
    };
    passing = through(std::move(comm_op), gradient.dy, like, product, ahead);
  }

  back.wants_operand = wanted.weight && config.operand == SaveMode::kRecompute;
  back.next_quantizer = next_quantizer.quantizer;
  back.usage = next_quantizer.usage;
  back.wants_next_sums = next_quantizer.sums;
  const auto backward = [&] {
    if (passing.defined()) back.d_operand = passing.result();
    if (in.norm_output.defined()) {
      back.d_operand = back.d_operand.defined() ? back.d_operand + in.norm_output : in.norm_output;
    }
    return prologue.backward(dispatch, from, back);
  };
  PrologueBackward taken;
  if (before && through_prologue) taken = backward();

  if (wants_weight) {
    if (!work.defined()) {
      find_operand(taken);
      work = weight_work(dispatch, config, std::move(parts), dtype);
    }
    parts = {};
    out.weights = weight_gradient(dispatch, config, std::move(work), passing.comm_op.get(), wanted.bias);
  } else if (in.any() && wanted.bias) {
    out.weights.biases = config.gemm_policy->bias_gradients(dispatch, in.dy, gradient.dbias);
  }
  if (!before && wanted.prologue) taken = backward();
  out.dx = taken.dx;
  out.dx_sums = taken.dx_sums;
  out.dgamma = taken.dgamma;
  out.dbeta = taken.dbeta;
  return out;
}

// A layer's prologue and product once more, by the scales of the forward: its result, and what the forward would have
// kept of it.
std::pair<Tensor, NamedTensors> recompute_layer(const DispatchMode& dispatch, LayerConfig config, size_t layer_idx,
                                                const NamedTensors& saved, Needs needs) {
  const auto get = [&](SavedName n) { return saved.optional(saved_name(layer_idx, n)); };
  config.operand = SaveMode::kSave;
  if (dispatch.direct() &&
      config.quantization != nullptr) {  // a traced dispatch mode has no state, and makes the same scales again
    config.quantization = with_scales(*config.quantization, saved[saved_name(layer_idx, kUsedScales)]);
  }
  const auto weights = kept_operands(saved, saved_name(layer_idx, kWeight));
  std::vector<Tensor> parameters = saved.list(saved_name(layer_idx, kWeightValues)).vec();  // of all, or of none
  for (size_t i = parameters.size(); i < weights.size(); ++i) {
    parameters.push_back(weights[i].quantized() ? weights[i].fp8.rowwise : weights[i].plain);
  }
  TORCH_INTERNAL_ASSERT(parameters.size() == weights.size());
  const at::ArrayRef<Operand> own = weights[0].quantized() ? at::ArrayRef<Operand>(weights) : at::ArrayRef<Operand>();
  const OptionalTensor none, gamma = get(kSavedGamma), beta = get(kSavedBeta);
  const Tensor input = saved[saved_name(layer_idx, kInput)];
  const LayerInput in{{input, none, gamma, beta}, parameters, saved.list(saved_name(layer_idx, kBias)), own};
  SaveContext save = SaveContext::collecting();
  const Tensor y = layer_forward(dispatch, config, layer_idx, save, in, needs, SaveFor::kBackward, false).y;
  return {y, save.take()};
}

}  // namespace

template <class DispatchModeType>
variable_list LayerChain::backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                   const variable_list& grads) {
  const DispatchMode dispatch(DispatchModeType{});
  const size_t layers = state.layers.size();
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
    if (state.layers[i + 1].input != SaveMode::kRecompute) continue;
    std::tie(inputs[i + 1], kept_for_recompute[i]) =
        recompute_layer(dispatch, state.layers[i], i, saved, {here[i].prologue, here[i].weight});
    state.policy->recomputed(state.layers[i + 1].prologue->input_info());
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
    if (i + 1 < layers && !here[i + 1].prologue) break;
    const LayerConfig& config = state.layers[i];
    const NamedTensors& table = kept_for_recompute[i].size() > 0 ? kept_for_recompute[i] : saved;
    Tensor& input = inputs[i];
    if (i > 0 && !input.defined()) input = table[saved_name(i, kInput)];
    if (i > 0 && any && grads[0].defined() && config.input_in_fp8) {
      const Tensor& like = input.defined() ? input : grads[0];
      const Operand packed =
          input.defined() ? packed_input(dispatch, input) : kept_operand(saved, saved_name(i, kPackedInput));
      const Tensor unpacked = plain_of(dispatch, packed, state.dtype);  // leading dimensions folded
      c10::SymDimVector shape(like.sym_sizes().begin(), like.sym_sizes().end());
      shape.back() = unpacked.sym_size(-1);
      if (config.tp_comm != nullptr && !input.defined()) shape[0] = config.tp_comm->rows_before(shape[0]);
      input = unpacked.view_symint(shape);
    }
    Onward next_quantizer;
    if (i > 0) {
      const QuantizeUsage usage{here[i - 1].prologue, here[i - 1].weight};
      next_quantizer = {gradient_quantizer(state.layers[i - 1].quantization.get(), usage), usage, here[i - 1].bias};
    }
    if (i == 0) {
      in.norm_output = state.return_output ? grad(1) : Tensor();
      in.norm_input = grad(2);
    }
    const Gradients made =
        layer_backward(dispatch, config, *state.policy, i, table, input, state.dtype, here[i], in, next_quantizer);
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

template variable_list LayerChain::backward<Direct>(const State&, const Wanted&, const NamedTensors&,
                                                    const variable_list&);
template variable_list LayerChain::backward<Dispatched>(const State&, const Wanted&, const NamedTensors&,
                                                        const variable_list&);

}  // namespace te_torch::layer
