// The backward of a layer and of a chain (layer.h): takes back what forward.cpp kept.
#include <ATen/TensorOperators.h>

#include "layer/gathered_wgrad.h"
#include "layer/layer_gemm.h"
#include "layer/prepare_operand.h"

namespace te_torch::layer {

namespace {

// The gradient that arrives at a layer's result: dy, or quantized already by what computed it, with its column sums.
struct IncomingGradient {
  Tensor dy;
  Operand quantized;
  Tensor dbias;
  Tensor like;         // has the leading dimensions and the dtype
  Tensor norm_output;  // what arrives at a norm's output, and at its input
  Tensor norm_input;

  bool any() const { return dy.defined() || quantized.defined() || dbias.defined(); }
};

// prologue: a gradient goes through the GEMM into anything before it.
struct WantedGradients {
  bool prologue = false, input = false, gamma = false, beta = false;
  bool weight = false, bias = false;
};

// How the layer that made this one's input reads that input's gradient.
struct NextGradient {
  const Quantizer* quantizer = nullptr;
  QuantizeUsage usage;
  bool column_sums = false;
};

struct Gradients {
  Operand dx;
  Tensor dx_sums, dgamma, dbeta;
  WeightGrads weights;
};

// The saved tensors of a layer's prologue, and its input, which another layer may have recomputed.
PrologueSaved prologue_saved(const NamedTensors& saved, size_t layer_idx, const Tensor& input) {
  const auto get = [&](SavedName n) -> const Tensor& { return saved[saved_name(layer_idx, n)]; };
  return {input.defined() ? input : get(kInput),
          get(kSavedGamma),
          get(kSavedBeta),
          get(kMean),
          get(kRstd),
          get(kUsedScales)};
}

// What the backward of one layer reads.
struct LayerBackwardArgs {
  const LayerConfig& config;
  const SavedPolicy& policy;
  size_t layer_idx;
  const NamedTensors& saved;
  PrologueSaved prologue;
  at::ScalarType dtype;
  WantedGradients wanted;
  const IncomingGradient& in;
  NextGradient next;
};

class LayerBackward {
 public:
  LayerBackward(const DispatchMode& dispatch, const LayerBackwardArgs& args) : dispatch_(dispatch), args_(args) {}

  Gradients run();

 private:
  // What a weight's gradient is made of, and its task, if that has been made; divided: the same, where its matrices are
  // divided over ranks.
  struct WeightGradient {
    Operand operand;
    bool gathered = false;  // the operand has all ranks' rows
    std::shared_ptr<WgradTask> task;
    std::shared_ptr<GatheredWgrad> divided;
  };

  bool gathers(Pass pass) const { return args_.config.tp_comm != nullptr && args_.config.tp_comm->gathers(pass); }
  void prepare_gradient();
  void find_operand(Operand recomputed);
  void make_task(Gradient gradient);
  bool begins_wgrad_first() const;
  PendingResult input_gradient();
  PrologueBackward through_prologue(const PendingResult& pending) const;
  WeightGrads weight_gradients(const CommOp* arrived);

  const DispatchMode& dispatch_;
  const LayerBackwardArgs& args_;
  Gradient gradient_;  // of the GEMM's result
  const Quantizer* quantize_gathered_ = nullptr;
  OperandRecompute recompute_;
  WeightGradient wgrad_;
  ScopedBuffers buffers_;  // of what arrives: the gradient, which both GEMMs read, and the operand
};

void LayerBackward::prepare_gradient() {
  const WantedGradients& wanted = args_.wanted;
  const Tensor& dy = args_.in.dy;
  if (!dy.defined() || !(wanted.prologue || wanted.weight || wanted.bias)) {
    gradient_ = {args_.in.quantized, args_.in.dbias};
    return;
  }
  const QuantizeUsage usage{wanted.prologue, wanted.weight};
  Tensor* sums = wanted.bias ? &gradient_.dbias : nullptr;
  const Quantizer* quantizer = gradient_quantizer(args_.config.quantization.get(), usage);
  const auto produce = [&](const Quantizer* by) { return operand_of(dispatch_, by, dy, usage, sums); };
  PreparedOperand prepared =
      prepare_operand(dispatch_, args_.config, {Pass::kDgrad, quantizer, usage, false, sums}, dy, produce);
  gradient_.dy = std::move(prepared.for_gemm);
  quantize_gathered_ = prepared.after_gather;
  // A bias added after the sum over ranks has the gradient of this rank's rows; the GEMM's sums would be of all rows.
  if (gathers(Pass::kDgrad) && wanted.bias && !gradient_.dbias.defined()) gradient_.dbias = column_sums(dy);
}

// recomputed: by the prologue's backward, or undefined.
void LayerBackward::find_operand(Operand recomputed) {
  const LayerConfig& config = args_.config;
  Operand& operand = wgrad_.operand;
  operand = kept_operand(args_.saved, saved_name(args_.layer_idx, kWholeOperand));
  wgrad_.gathered = operand.defined();
  if (!operand.defined()) operand = kept_operand(args_.saved, saved_name(args_.layer_idx, kOperand));
  if (!operand.defined()) {
    if (!recomputed.defined()) {
      recomputed = config.prologue->recompute(dispatch_, args_.prologue, recompute_.in_prologue);
    }
    operand = finish_recompute(dispatch_, config, recompute_, std::move(recomputed),
                               args_.saved.list(saved_name(args_.layer_idx, kUsedScales)));
  }
  if (config.operand == SaveMode::kRecompute) args_.policy.recomputed(config.prologue->operand_info());
}

void LayerBackward::make_task(Gradient gradient) {
  const LayerConfig& config = args_.config;
  const ProductQuantization* q = config.quantization.get();
  Operand& operand = wgrad_.operand;
  // What a gradient accumulator stores must not hold this node, which holds the gradient accumulator: an output of the
  // node, kept, would.
  if (config.grad_accumulator && operand.plain.defined()) operand.plain = operand.plain.detach();
  if (config.grad_accumulator) {
    for (const Operand* read : {&gradient.dy, &operand}) refuse_pooled(*read, "weight gradient");
  }
  const bool gather_operand = gathers(Pass::kFprop) && !wgrad_.gathered;
  if (gather_operand || gathers(Pass::kDgrad)) {
    wgrad_.divided = std::make_shared<GatheredWgrad>(config, std::move(gradient), std::move(operand),
                                                     quantize_gathered_, gather_operand, args_.dtype);
    wgrad_.task = wgrad_.divided;
    return;
  }
  wgrad_.task = config.gemm_policy->wgrad_task(dispatch_, std::move(gradient), std::move(operand), args_.dtype,
                                               q == nullptr || q->split_wgrad);
}

// Whether the operand's rows go ahead of the input gradient's, on one stream: they are read first, and nothing else is
// there to be pushed until chunks of that are computed.
bool LayerBackward::begins_wgrad_first() const {
  const LayerConfig& config = args_.config;
  return config.tp_comm != nullptr && config.tp_comm->begins_ahead() && gathers(Pass::kFprop) &&
         (!config.grad_accumulator || config.grad_accumulator->computes_now());
}

PendingResult LayerBackward::input_gradient() {
  const LayerConfig& config = args_.config;
  const probe::PathReason told(why_override(config.quantization.get()));
  WeightSet weights{kept_operands(args_.saved, saved_name(args_.layer_idx, kWeight)), {}};
  for (Operand& weight : weights.weights) {  // a parameter whose FP8 copy served under autocast was not cast
    if (!weight.quantized() && weight.plain.scalar_type() != args_.dtype) weight.plain = weight.plain.to(args_.dtype);
  }
  const Tensor& like = args_.in.dy.defined() ? args_.in.dy : args_.in.like;
  const QuantizeUsage usage{args_.wanted.prologue, args_.wanted.weight};
  std::unique_ptr<CommOp> comm_op;
  if (config.tp_comm != nullptr) {
    comm_op = config.tp_comm->begin(dispatch_, Pass::kDgrad, gradient_.dy, like, quantize_gathered_, usage,
                                    OptionalTensor(), &buffers_);
  }
  return run_gemm(dispatch_, config, Pass::kDgrad, gradient_.dy, weights, like, std::move(comm_op));
}

PrologueBackward LayerBackward::through_prologue(const PendingResult& pending) const {
  const WantedGradients& wanted = args_.wanted;
  PrologueGradient g{{}, args_.in.norm_input, wanted.gamma, wanted.beta, wanted.input};
  g.quantizer = recompute_.in_prologue;
  g.wants_operand = wanted.weight && args_.config.operand == SaveMode::kRecompute;
  g.next_quantizer = args_.next.quantizer;
  g.usage = args_.next.usage;
  g.wants_next_sums = args_.next.column_sums;
  if (pending.defined()) g.d_operand = pending.result();
  if (args_.in.norm_output.defined()) {
    g.d_operand = g.d_operand.defined() ? g.d_operand + args_.in.norm_output : args_.in.norm_output;
  }
  return args_.config.prologue->backward(dispatch_, args_.prologue, g);
}

// arrived: the CommOp of dy that the input's gradient was taken over, or null.
WeightGrads LayerBackward::weight_gradients(const CommOp* arrived) {
  const LayerConfig& config = args_.config;
  std::optional<GatheredWgrad::Loan> loan;
  if (wgrad_.divided != nullptr) loan.emplace(std::move(wgrad_.divided), arrived);
  const probe::PathReason told(why_override(config.quantization.get()));
  return config.grad_accumulator ? config.grad_accumulator->take(std::move(wgrad_.task), args_.wanted.bias)
                                 : wgrad_.task->compute(dispatch_, args_.wanted.bias);
}

Gradients LayerBackward::run() {
  const WantedGradients& wanted = args_.wanted;
  const IncomingGradient& in = args_.in;
  prepare_gradient();
  if (args_.config.operand == SaveMode::kRecompute && args_.prologue.input.defined()) {
    recompute_ = plan_recompute(dispatch_, args_.config, args_.prologue.input);
  }
  // A prologue whose backward recomputes the operand runs before the weight's gradient, which reads that. Others run
  // after it, so that their results do not live meanwhile, and communication has time.
  const bool prologue_first = args_.config.prologue->recomputes_operand();
  const bool dgrad = in.any() && wanted.prologue, wgrad = in.any() && wanted.weight;
  if (wgrad && dgrad && !prologue_first && begins_wgrad_first()) {
    find_operand({});
    make_task(gradient_);
    if (wgrad_.divided != nullptr) wgrad_.divided->begin(dispatch_, buffers_);
  }
  PendingResult pending;
  if (dgrad) pending = input_gradient();
  PrologueBackward back;
  if (prologue_first && dgrad) back = through_prologue(pending);
  Gradients out;
  if (wgrad) {
    if (wgrad_.task == nullptr) {
      find_operand(std::move(back.operand));
      make_task(std::move(gradient_));
    }
    gradient_ = {};
    out.weights = weight_gradients(pending.comm_op.get());
    wgrad_ = {};
  } else if (in.any() && wanted.bias) {
    out.weights.biases = args_.config.gemm_policy->bias_gradients(dispatch_, in.dy, gradient_.dbias);
  }
  if (!prologue_first && wanted.prologue) back = through_prologue(pending);
  out.dx = std::move(back.dx);
  out.dx_sums = std::move(back.dx_sums);
  out.dgamma = std::move(back.dgamma);
  out.dbeta = std::move(back.dbeta);
  return out;
}

Gradients layer_backward(const DispatchMode& dispatch, const LayerBackwardArgs& args) {
  return LayerBackward(dispatch, args).run();
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

// What is read of an input that the forward kept in E4M3: its values. recomputed: the input, where it was recomputed in
// place of being kept. dy: the gradient of the chain's result.
Tensor unpacked_input(const DispatchMode& dispatch, const LayerConfig& config, const Operand& packed,
                      const Tensor& recomputed, const Tensor& dy, at::ScalarType dtype) {
  const Operand& read = recomputed.defined() ? packed_input(dispatch, recomputed) : packed;
  const Tensor values = plain_of(dispatch, read, dtype);  // leading dimensions folded
  const Tensor& like = recomputed.defined() ? recomputed : dy;
  c10::SymDimVector shape(like.sym_sizes().begin(), like.sym_sizes().end());
  shape.back() = values.sym_size(-1);
  if (config.tp_comm != nullptr && !recomputed.defined()) shape[0] = config.tp_comm->rows_before(shape[0]);
  return values.view_symint(shape);
}

}  // namespace

template <class Mode>
variable_list LayerChain::backward(const State& state, const Wanted& wanted, const NamedTensors& saved,
                                   const variable_list& grads) {
  const DispatchMode dispatch(Mode{});
  const size_t layers = state.layers.size();
  // The node's first argument is the list of all tensors.
  const auto wants = [&](int name) {
    const Rows& place = state.places[name];
    for (int64_t i = 0; i < place.count; ++i) {
      if (wanted.at(0, size_t(place.first + i))) return true;
    }
    return false;
  };
  c10::SmallVector<WantedGradients, 2> wanted_of(layers);
  bool before = wants(kX) || wants(kResidual) || wants(kGamma) || wants(kBeta);
  for (size_t i = 0; i < layers; ++i) {
    wanted_of[i] = {before, before, false, false, wants(weight_of(i)), wants(bias_of(i))};
    before = before || wanted_of[i].weight || (i + 1 < layers && wanted_of[i].bias);
  }
  wanted_of[0].input = wants(kX) || wants(kResidual);
  wanted_of[0].gamma = wants(kGamma);
  wanted_of[0].beta = wants(kBeta);
  const bool any = before;

  // What layers made for the next one and did not keep, and what running them again has kept instead.
  c10::SmallVector<Tensor, 2> inputs(layers);
  c10::SmallVector<NamedTensors, 2> kept_for_recompute(layers);
  for (size_t i = 0; any && i + 1 < layers; ++i) {
    if (state.layers[i + 1].input != SaveMode::kRecompute) continue;
    std::tie(inputs[i + 1], kept_for_recompute[i]) =
        recompute_layer(dispatch, state.layers[i], i, saved, {wanted_of[i].prologue, wanted_of[i].weight});
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
  IncomingGradient in;
  in.dy = grads[0];
  for (size_t i = layers; i-- > 0;) {
    if (i + 1 < layers && !wanted_of[i + 1].prologue) break;
    const LayerConfig& config = state.layers[i];
    const NamedTensors& table = kept_for_recompute[i].size() > 0 ? kept_for_recompute[i] : saved;
    Tensor& input = inputs[i];
    if (i > 0 && !input.defined()) input = table[saved_name(i, kInput)];
    if (i > 0 && any && grads[0].defined() && config.input_in_fp8) {
      input = unpacked_input(dispatch, config, kept_operand(saved, saved_name(i, kPackedInput)), input, grads[0],
                             state.dtype);
    }
    NextGradient next;
    if (i > 0) {
      const QuantizeUsage usage{wanted_of[i - 1].prologue, wanted_of[i - 1].weight};
      next = {gradient_quantizer(state.layers[i - 1].quantization.get(), usage), usage, wanted_of[i - 1].bias};
    }
    if (i == 0) {
      in.norm_output = state.return_output ? grad(1) : Tensor();
      in.norm_input = grad(2);
    }
    const Gradients result = layer_backward(dispatch, {config, *state.policy, i, table, prologue_saved(table, i, input),
                                                       state.dtype, wanted_of[i], in, next});
    give(weight_of(i), result.weights.weights);
    give(bias_of(i), result.weights.biases);
    if (i == 0) {
      give(kX, result.dx.plain);
      give(kResidual, result.dx.plain);
      give(kGamma, result.dgamma);
      give(kBeta, result.dbeta);
    } else {
      in = {result.dx.plain, result.dx.quantized() ? result.dx : Operand{}, result.dx_sums, input, {}, {}};
    }
  }
  return out;
}

template variable_list LayerChain::backward<Direct>(const State&, const Wanted&, const NamedTensors&,
                                                    const variable_list&);
template variable_list LayerChain::backward<Dispatched>(const State&, const Wanted&, const NamedTensors&,
                                                        const variable_list&);

}  // namespace te_torch::layer
