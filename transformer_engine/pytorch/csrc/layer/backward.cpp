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

// How the earlier layer in the chain reads the gradient of this layer's input. quantizer: null if the earlier layer
// reads it in high precision and quantizes it itself.
struct NextGradient {
  const Quantizer* quantizer = nullptr;
  QuantizeUsage usage;
  bool column_sums = false;
};

struct Gradients {
  Operand dx;
  Tensor dx_sums;
  WeightGrads weights;
  OwnGradients prologue, epilogue;
};

// The saved tensors of a layer's prologue, and its input, which another layer may have recomputed.
PrologueSaved prologue_saved(const NamedTensors& saved, size_t layer_idx, const Tensor& input) {
  return {input.defined() ? input : saved[saved_name(layer_idx, kInput)],
          saved[saved_name(layer_idx, kUsedScales)],
          {saved, saved_name(layer_idx, kSavedPrologue)}};
}

// Arguments of the backward of one layer.
struct LayerBackwardArgs {
  const LayerConfig& config;
  const SavedPolicy& policy;
  size_t layer_idx;
  const NamedTensors& saved;
  PrologueSaved prologue;
  at::ScalarType dtype;
  const WantedGradients& wanted;
  const IncomingGradient& in;
  NextGradient next;
};

class LayerBackward {
 public:
  LayerBackward(const DispatchMode& dispatch, const LayerBackwardArgs& args)
      : dispatch_(dispatch),
        args_(args),
        fused_(fused_epilogues(args.config)),
        bias_(fused_ > 0 && args.wanted.bias()) {}

  Gradients run();

 private:
  // The operand of a weight's gradient, and the task, once it is made. divided: the same task, if its matrices are
  // divided over ranks.
  struct WeightGradient {
    Operand operand;
    bool gathered = false;  // the operand has all ranks' rows
    std::shared_ptr<WgradTask> task;
    std::shared_ptr<GatheredWgrad> divided;
  };

  bool gathers(Pass pass) const { return args_.config.tp_comm != nullptr && args_.config.tp_comm->gathers(pass); }
  void through_epilogues();
  void prepare_gradient();
  void find_operand(Operand recomputed);
  void make_task(Gradient gradient);
  bool begins_wgrad_first() const;
  PendingResult input_gradient();
  PrologueBackward through_prologue(const PendingResult& pending) const;
  WeightGrads weight_gradients(const CommOp* arrived);

  const DispatchMode& dispatch_;
  const LayerBackwardArgs& args_;
  const size_t fused_;       // epilogues that the GEMM computes
  const bool bias_;          // whether the GEMM's bias needs a gradient
  Tensor dy_ = args_.in.dy;  // of the GEMM's result, before it is quantized
  OwnGradients epilogue_gradients_;
  Gradient gradient_;  // of the GEMM's result
  const Quantizer* quantize_gathered_ = nullptr;
  OperandRecompute recompute_;
  WeightGradient wgrad_;
  ScopedBuffers buffers_;  // of what arrives: the gradient, which both GEMMs read, and the operand
};

void LayerBackward::through_epilogues() {
  const OwnTensors own(args_.saved, saved_name(args_.layer_idx, kSavedEpilogue));
  for (size_t i = args_.config.epilogues.size(); dy_.defined() && i-- > fused_;) {
    EpilogueBackward back = args_.config.epilogues[i]->backward(dispatch_, dy_, own, args_.wanted.epilogue);
    dy_ = std::move(back.dy);
    epilogue_gradients_.append(back.gradients.begin(), back.gradients.end());
  }
}

void LayerBackward::prepare_gradient() {
  const WantedGradients& wanted = args_.wanted;
  if (!dy_.defined() || !(wanted.operand || wanted.weight || bias_)) {
    gradient_ = {args_.in.quantized, args_.in.dbias};
    return;
  }
  const QuantizeUsage usage{wanted.operand, wanted.weight};
  Tensor* sums = bias_ ? &gradient_.dbias : nullptr;
  const Quantizer* quantizer = gradient_quantizer(args_.config.quantization.get(), usage);
  const auto produce = [&](const Quantizer* by) { return operand_of(dispatch_, by, dy_, usage, sums); };
  PreparedOperand prepared =
      prepare_operand(dispatch_, args_.config, {Pass::kDgrad, quantizer, usage, false, sums}, dy_, produce);
  gradient_.dy = std::move(prepared.for_gemm);
  quantize_gathered_ = prepared.after_gather;
  // A bias added after the sum over ranks has the gradient of this rank's rows; the GEMM's sums would be of all rows.
  if (gathers(Pass::kDgrad) && bias_ && !gradient_.dbias.defined()) gradient_.dbias = column_sums(dy_);
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
  // This node holds the gradient accumulator, so a tensor that the accumulator stores must not hold the node, as an
  // output of the node would.
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
  const probe::PathReason because(why_override(config.quantization.get()));
  WeightSet weights{kept_operands(args_.saved, saved_name(args_.layer_idx, kWeight)), {}};
  for (Operand& weight : weights.weights) {  // a parameter whose FP8 copy served under autocast was not cast
    if (!weight.quantized() && weight.plain.scalar_type() != args_.dtype) weight.plain = weight.plain.to(args_.dtype);
  }
  const Tensor& like = dy_.defined() ? dy_ : args_.in.like;
  const QuantizeUsage usage{args_.wanted.operand, args_.wanted.weight};
  std::unique_ptr<CommOp> comm_op;
  if (config.tp_comm != nullptr) {
    comm_op = config.tp_comm->begin(dispatch_, Pass::kDgrad, gradient_.dy, like, quantize_gathered_, usage,
                                    OptionalTensor(), &buffers_);
  }
  return layer_gemm(dispatch_, config, Pass::kDgrad, gradient_.dy, weights, like, std::move(comm_op));
}

PrologueBackward LayerBackward::through_prologue(const PendingResult& pending) const {
  const WantedGradients& wanted = args_.wanted;
  PrologueGradient g{{}, args_.in.norm_input, wanted.prologue, wanted.input};
  g.quantizer = recompute_.in_prologue;
  g.needs_operand = wanted.weight && args_.config.operand == SaveMode::kRecompute;
  g.next_quantizer = args_.next.quantizer;
  g.usage = args_.next.usage;
  g.needs_next_sums = args_.next.column_sums;
  if (pending.defined()) g.d_operand = pending.result();
  if (dispatch_.direct() && pending.local.defined()) {  // two references: of pending, and this one
    g.is_own = g.d_operand.use_count() == 2 && g.d_operand.storage().use_count() == 1;
  }
  if (args_.in.norm_output.defined()) {
    g.d_operand = g.d_operand.defined() ? g.d_operand + args_.in.norm_output : args_.in.norm_output;
  }
  return args_.config.prologue->backward(dispatch_, args_.prologue, g);
}

// arrived: the CommOp of dy that the input's gradient was taken over, or null.
WeightGrads LayerBackward::weight_gradients(const CommOp* arrived) {
  const LayerConfig& config = args_.config;
  std::optional<GatheredWgrad::ReuseScope> reuse;
  if (wgrad_.divided != nullptr) reuse.emplace(std::move(wgrad_.divided), arrived);
  const probe::PathReason because(why_override(config.quantization.get()));
  return config.grad_accumulator ? config.grad_accumulator->take(std::move(wgrad_.task), bias_)
                                 : wgrad_.task->compute(dispatch_, bias_);
}

Gradients LayerBackward::run() {
  const WantedGradients& wanted = args_.wanted;
  const IncomingGradient& in = args_.in;
  through_epilogues();
  prepare_gradient();
  if (args_.config.operand == SaveMode::kRecompute && args_.prologue.input.defined()) {
    recompute_ = plan_recompute(dispatch_, args_.config, args_.prologue.input);
  }
  // A prologue whose backward recomputes the operand runs before the weight's gradient, which reads that. Others run
  // after it, so that their results do not live meanwhile, and communication has time.
  const bool prologue_first = args_.config.prologue->recomputes_operand();
  const bool dgrad = in.any() && wanted.operand, wgrad = in.any() && wanted.weight;
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
  } else if (in.any() && bias_) {
    out.weights.biases = args_.config.gemm_policy->bias_gradients(dispatch_, dy_, gradient_.dbias);
  }
  if (!prologue_first && wanted.operand) back = through_prologue(pending);
  out.dx = std::move(back.dx);
  out.dx_sums = std::move(back.dx_sums);
  out.prologue = std::move(back.gradients);
  out.epilogue = std::move(epilogue_gradients_);
  return out;
}

Gradients layer_backward(const DispatchMode& dispatch, const LayerBackwardArgs& args) {
  return LayerBackward(dispatch, args).run();
}

// The layer as its backward runs it again: it quantizes by the scales of the forward. A traced call has no state, and
// finds the same scales again.
LayerConfig with_used_scales(const DispatchMode& dispatch, LayerConfig config, at::TensorList used) {
  config.operand = SaveMode::kSave;
  if (!dispatch.direct() || config.quantization == nullptr || used.empty()) return config;
  if (config.gemm_policy->quantizes_groups(config.quantization.get())) {
    config.gemm_policy = config.gemm_policy->with_scales(used);
  } else {
    config.quantization = with_scales(*config.quantization, used[0]);
  }
  return config;
}

// Runs prologue and GEMM of a layer again: the result, and what the forward would have saved of it.
std::pair<Tensor, NamedTensors> recompute_layer(const DispatchMode& dispatch, const LayerConfig& layer,
                                                size_t layer_idx, const NamedTensors& saved,
                                                const WantedGradients& wanted) {
  LayerConfig config = with_used_scales(dispatch, layer, saved.list(saved_name(layer_idx, kUsedScales)));
  const auto weights = kept_operands(saved, saved_name(layer_idx, kWeight));
  std::vector<Tensor> parameters = saved.list(saved_name(layer_idx, kWeightValues)).vec();  // of all, or of none
  const bool values = config.stacked && !parameters.empty();  // of a stacked weight: one tensor
  for (size_t i = parameters.size(); !values && i < weights.size(); ++i) {
    parameters.push_back(weights[i].quantized() ? weights[i].fp8.rowwise : weights[i].plain);
  }
  TORCH_INTERNAL_ASSERT(values || parameters.size() == weights.size());
  config.stacked = config.stacked && parameters[0].dim() == 3;  // else of FP8 copies: a matrix for each
  const at::ArrayRef<Operand> own = weights[0].quantized() ? at::ArrayRef<Operand>(weights) : at::ArrayRef<Operand>();
  const Tensor input = saved[saved_name(layer_idx, kInput)];
  const LayerInput in{{input, {saved, saved_name(layer_idx, kSavedPrologue)}},
                      parameters,
                      {saved, saved_name(layer_idx, kSavedEpilogue)},
                      own};
  SaveContext save = SaveContext::collecting();
  const Tensor y = layer_forward(dispatch, config, layer_idx, save, in, wanted, SaveFor::kBackward, false).y;
  return {y, save.take()};
}

// How a layer reads the gradient of its result from the layer after it.
NextGradient next_gradient(const LayerConfig& layer, const WantedGradients& wanted) {
  const ProductQuantization* q = layer.quantization.get();
  const QuantizeUsage usage{wanted.operand, wanted.weight};
  const bool quantizes_later = layer.gemm_policy->quantizes_groups(q) ||
                               (layer.tp_comm != nullptr && layer.tp_comm->gathers(Pass::kDgrad)) ||
                               fused_epilogues(layer) < layer.epilogues.size();
  return {quantizes_later ? nullptr : gradient_quantizer(q, usage), usage, wanted.bias()};
}

// The values of an input that the forward kept in E4M3. recomputed: the input, where it was recomputed in place of
// being kept. dy: the gradient of the chain's result.
Tensor unpacked_input(const DispatchMode& dispatch, const LayerConfig& config, const Operand& packed,
                      const Tensor& recomputed, const Tensor& dy, at::ScalarType dtype) {
  const Operand& read = recomputed.defined() ? packed_input(dispatch, recomputed) : packed;
  const Tensor values = plain_of(dispatch, read, dtype);  // leading dimensions folded
  const Tensor& like = recomputed.defined() ? recomputed : dy;
  if (like.dim() == 2) return values;  // which may have other rows than the chain's result
  c10::SymDimVector shape(like.sym_sizes().begin(), like.sym_sizes().end());
  shape.back() = values.sym_size(-1);
  if (config.tp_comm != nullptr && !recomputed.defined()) shape[0] = config.tp_comm->rows_before(shape[0]);
  return values.view_symint(shape);
}

}  // namespace

template <class Mode>
variable_list LayerChain::backward(const State& state, const Wanted& needed, const NamedTensors& saved,
                                   const variable_list& grads) {
  const DispatchMode dispatch(Mode{});
  const size_t layers = state.layers.size();
  // The node's first argument is the list of all tensors.
  const WantedByLayer wanted(layers, state.places, [&](size_t place) { return needed.at(0, place); });

  // inputs[i]: the input of layer i, where it is recomputed. kept_for_recompute[i]: the tensors that layer i saves for
  // its backward when its forward runs again.
  c10::SmallVector<Tensor, 2> inputs(layers);
  c10::SmallVector<NamedTensors, 2> kept_for_recompute(layers);
  for (size_t i = 0; wanted.any && i + 1 < layers; ++i) {
    if (state.layers[i + 1].input != SaveMode::kRecompute) continue;
    std::tie(inputs[i + 1], kept_for_recompute[i]) =
        recompute_layer(dispatch, state.layers[i], i, saved, wanted.layers[i]);
    state.policy->recomputed(state.layers[i + 1].prologue->input_info());
  }

  variable_list out(state.tensors);
  const auto give = [&](int name, at::TensorList gradients) {
    const ArgumentPlace* place = find_place(state.places, name);
    for (size_t i = 0; place != nullptr && i < std::min(place->count, gradients.size()); ++i) {
      if (needed.at(0, place->first + i)) out[place->first + i] = gradients[i];
    }
  };
  const auto grad = [&](size_t i) { return grads.size() > i ? grads[i] : Tensor(); };
  IncomingGradient in;
  in.dy = grads[0];
  for (size_t i = layers; i-- > 0;) {
    if (i + 1 < layers && !wanted.layers[i + 1].input) break;
    const LayerConfig& config = state.layers[i];
    const NamedTensors& table = kept_for_recompute[i].size() > 0 ? kept_for_recompute[i] : saved;
    Tensor& input = inputs[i];
    if (i > 0 && !input.defined()) input = table[saved_name(i, kInput)];
    if (i > 0 && wanted.any && grads[0].defined() && config.input_in_fp8) {
      input = unpacked_input(dispatch, config, kept_operand(saved, saved_name(i, kPackedInput)), input, grads[0],
                             state.dtype);
    }
    const NextGradient next = i > 0 ? next_gradient(state.layers[i - 1], wanted.layers[i - 1]) : NextGradient{};
    if (i == 0) {
      in.norm_output = state.return_output ? grad(1) : Tensor();
      in.norm_input = grad(2);
    }
    const Gradients result = layer_backward(dispatch, {config, *state.policy, i, table, prologue_saved(table, i, input),
                                                       state.dtype, wanted.layers[i], in, next});
    give(weight_of(i), result.weights.weights);
    give(bias_of(i), result.weights.biases);
    for (const auto& [own, gradient] : result.prologue) give(prologue_of(i, own), gradient);
    for (const auto& [own, gradient] : result.epilogue) give(epilogue_of(i, own), gradient);
    if (i == 0) {
      give(kX, result.dx.plain);
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
