// The linear layers as one autograd family: Linear, LayerNormLinear and the second half of an MLP differ in the
// prologue of their product (nothing, a norm, an activation). The prologue is data; forward and backward stand here
// once, on operands that are plain or FP8 (product.h).
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>

#include "autograd.h"
#include "prologue.h"
#include "weight_grad.h"

namespace te_torch {

// The form in which an operand is kept; its data are saved tensors.
struct Form {
  bool quantized = false;
  te_scaling scaling = TE_SCALING_TENSOR;
  bool e5m2 = false;
};

struct LinearFamily {
  static constexpr const char* kName = "linear";
  struct State {
    Prologue prologue;
    Sink sink;
    Quantization quantization;
    Form weight, operand;
    at::ScalarType dtype = at::kFloat;

    State() = default;
    State(Prologue p, Sink s, Quantization q)
        : prologue(std::move(p)), sink(std::move(s)), quantization(std::move(q)) {}
  };

  // Argument positions, and where each tensor lies among the saved ones.
  enum Slot { kX, kWeight, kBias, kGamma, kBeta, kResidual };
  enum Saved {
    kInput,
    kSavedWeight,
    kWeightScale,
    kProduct,
    kProductScale,  // of the kept operand, or those that an operand made again is quantized by
    kSavedGamma,
    kSavedBeta,
    kMean,
    kRstd,
    kSavedCount
  };

  struct Inputs {
    const Tensor& x;
    const Tensor& weight;
    const OptionalTensor& bias;
    const OptionalTensor& gamma;
    const OptionalTensor& beta;
    const OptionalTensor& residual;
    const Quantized& quantized_weight;  // the module's own copy, or undefined
  };

  // Whether a gradient goes on into the prologue, and whether into the weight.
  struct Needs {
    bool input;
    bool weight;
  };

  // Outputs: y; with a norm prologue also the norm's output, and x + residual (or x itself, asked for) after it.
  template <class Route>
  static variable_list forward(State& state, Keeper& keeper, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& gamma, const OptionalTensor& beta,
                               const OptionalTensor& residual, const Prologue& p, const Sink& sink,
                               const Quantization& quantization, const Quantized& quantized_weight) {
    state = State(p, sink, quantization);
    const bool graph = keeper.serves_a_graph();
    const Needs needs{graph && (x.requires_grad() || wants(gamma) || wants(beta) || wants(residual)),
                      graph && weight.requires_grad()};
    return run<Route>(state, keeper, {x, weight, bias, gamma, beta, residual, quantized_weight}, needs);
  }

  // Kept: weight and norm statistics for the input's gradient, the product's operand for the weight's, each in the one
  // direction that the backward reads; of an activation only its input, the activation is written again by the
  // backward.
  template <class Route>
  static variable_list run(State& state, Keeper& keeper, const Inputs& in, Needs needs) {
    const Prologue& p = state.prologue;
    const ProductQuantization* q = state.quantization.get();
    const Quantizer* x_quantizer = q != nullptr ? &q->x : nullptr;
    const bool norm = p.kind == Prologue::kNorm;
    const bool activation = p.kind == Prologue::kActivation;
    const bool again = needs.weight && (p.recompute_output || (p.keep_input && q != nullptr));

    state.dtype = in.x.scalar_type();
    const bool keep_operand = needs.weight && !activation && !again;
    const auto check = [&](const c10::SymInt& depth) {
      if (q != nullptr) check_product(in.x, depth, in.weight, in.bias, in.quantized_weight.defined());
    };
    // Before a quantizer notes the amax of an x that is refused. A norm looks at x itself; what an activation makes of
    // it is known behind it.
    if (p.kind == Prologue::kNone) check(in.x.dim() > 0 ? in.x.sym_size(-1) : c10::SymInt(-1));
    const Produced made = produce<Route>(p, in.x, in.residual, in.gamma, in.beta, x_quantizer, {true, keep_operand});
    const Operand& x = made.operand;
    if (p.kind != Prologue::kNone) check(x.quantized() ? x.fp8.rowwise.sym_size(-1) : x.plain.sym_size(-1));
    const Operand weight = in.quantized_weight.defined()
                               ? Operand{{}, in.quantized_weight}
                               : operand_of<Route>(q != nullptr ? &q->weight : nullptr, in.weight, {true, needs.input});
    const Tensor y = fprop<Route>(made.operand, weight, in.bias, in.x, q == nullptr || q->split_fprop);

    const bool keep_h = (norm && needs.input) || (activation && (needs.input || needs.weight)) || again;
    keeper.keep_if(keep_h && !p.input_kept_elsewhere, made.h,
                   norm         ? kNormInput
                   : activation ? kPreActivation
                                : kLinearInput);
    state.weight = keep(keeper, needs.input, weight, weight.quantized() ? kQuantizedWeight : kParameter);
    if (keep_operand || !needs.weight) {
      state.operand = keep(keeper, keep_operand, made.operand, norm ? kNormOutput : kLinearInput);
    } else {
      const Operand& operand = made.operand;
      keeper.recompute(operand.quantized() ? operand.fp8.rowwise : operand.plain, norm ? kNormOutput : kActivation);
      keeper.keep_if(false, Tensor(), kScales);
      keeper.keep_if(operand.quantized() && operand.fp8.scaling == TE_SCALING_TENSOR, operand.fp8.rowwise_scale_inv,
                     kScales);
    }
    keeper.keep_if(norm && (needs.input || again), in.gamma, kParameter);
    keeper.keep_if(norm && again, in.beta, kParameter);
    keeper.keep_if(norm && (needs.input || again), made.mean, kStatistic);
    keeper.keep_if(norm && (needs.input || again), made.rstd, kStatistic);
    if (!norm) return {y};
    if (in.residual.has_value() || p.return_input) return {y, made.output, made.h};
    return {y, made.output};
  }

  // What arrives at the outputs: dy as it is, or quantized already by whoever made it, with its column sums then.
  struct Incoming {
    Tensor dy;
    Tensor norm_output;
    Tensor h;
    Operand made;
    Tensor dbias;

    bool any() const { return dy.defined() || made.quantized() || made.plain.defined() || dbias.defined(); }
  };

  // Where the gradient of an activation's input goes on to: the dy of another product, which quantizes it so.
  struct Onward {
    const Quantizer* quantizer;
    Directions directions;
    bool with_bias;
    ActivationGradient made;
  };

  template <class Route>
  static variable_list backward(const State& state, const Wanted& wanted, const variable_list& saved,
                                const variable_list& grads) {
    const auto grad = [&](size_t i) { return grads.size() > i ? grads[i] : Tensor(); };
    return run_backward<Route>(state, wanted, saved, {grads[0], grad(1), grad(2), {}, {}}, nullptr);
  }

  template <class Route>
  static variable_list run_backward(const State& state, const Wanted& wanted, const variable_list& saved,
                                    const Incoming& in, Onward* onward) {
    const Prologue& p = state.prologue;
    const ProductQuantization* q = state.quantization.get();
    const Quantizer* x_quantizer = q != nullptr ? &q->x : nullptr;
    const bool norm = p.kind == Prologue::kNorm;
    const bool activation = p.kind == Prologue::kActivation;
    const bool into_prologue = wanted[kX] || wanted[kGamma] || wanted[kBeta] || wanted[kResidual];
    variable_list out(kResidual + 1);

    Operand dy = in.made;
    Tensor dbias = in.dbias;
    if (in.dy.defined() && (into_prologue || wanted[kWeight] || wanted[kBias])) {
      const Directions directions{into_prologue, wanted[kWeight]};
      dy = operand_of<Route>(gradient_quantizer(q, directions), in.dy, directions, wanted[kBias] ? &dbias : nullptr);
    }
    Tensor d_operand;
    if (in.any() && into_prologue) {
      const Tensor& like = in.dy.defined() ? in.dy : saved[kInput];
      d_operand = dgrad<Route>(dy, kept(saved, kSavedWeight, state.weight), like, q == nullptr || q->split_dgrad);
    }
    if (norm && p.return_output && in.norm_output.defined()) {
      d_operand = d_operand.defined() ? d_operand + in.norm_output : in.norm_output;
    }
    Operand operand = kept(saved, kProduct, state.operand);
    if (activation && in.any() && into_prologue) {
      Onward plain{nullptr, {}, false, {}};
      Onward& to = onward != nullptr ? *onward : plain;
      to.made = activation_back<Route>(p, d_operand, saved[kInput], wanted[kWeight], x_quantizer, saved[kProductScale],
                                       to.quantizer, to.directions, to.with_bias);
      operand = to.made.operand;
      out[kX] = to.made.dx.plain;
    } else if (p.kind == Prologue::kNone) {
      out[kX] = d_operand;
    }
    if (in.any() && wanted[kWeight]) {
      if (!operand.quantized() && !operand.plain.defined()) {
        const Again from{saved[kInput], optional(saved[kSavedGamma]), optional(saved[kSavedBeta]), saved[kMean],
                         saved[kRstd]};
        operand = produce_again<Route>(p, from, x_quantizer, saved[kProductScale]);
      }
      MatrixProduct product{dy, operand, dbias, state.dtype, q == nullptr || q->split_wgrad};
      // What a sink stores must not hold this node, which holds the sink: an output of the node, kept, would.
      if (state.sink && operand.plain.defined()) product.x.plain = operand.plain.detach();
      std::tie(out[kWeight], out[kBias]) = state.sink ? (*state.sink)(std::move(product), wanted[kBias])
                                                      : product.template compute<Route>(wanted[kBias]);
    } else if (in.any() && wanted[kBias]) {
      out[kBias] = dbias.defined() ? dbias : column_sums(in.dy);
    }
    if (norm && into_prologue) into_norm<Route>(p, wanted, saved, d_operand, in.h, out);
    for (size_t slot = 0; slot < out.size(); ++slot) {
      if (!wanted[slot]) out[slot] = Tensor();
    }
    return out;
  }

  static constexpr Kept kNormInput{"norm input", "the norm's backward normalises it again",
                                   "the product or sum that made it: te.checkpoint around the layer"};
  static constexpr Kept kNormOutput{"norm output", "the weight's gradient is taken with it",
                                    "the norm's forward, 4 B per 16-bit element: recompute_norm_output=True"};
  static constexpr Kept kPreActivation{"pre-activation", "the activation's backward reads it and writes it again",
                                       "norm and first product: LayerNormMLP(checkpoint=True)"};
  static constexpr Kept kActivation{"activation", "the weight's gradient is taken with it",
                                    "nothing beside the activation's backward, which writes it again: 2 B of 12"};
  static constexpr Kept kLinearInput{"linear input", "the weight's gradient is taken with it", kCallers};
  static constexpr Kept kQuantizedWeight{"quantized weight", "the input's gradient is taken with it",
                                         "a copy of a parameter: quantizing it again"};
  static constexpr Kept kScales{"scales", "FP8 data mean nothing without them", "a few bytes for each block"};

  static bool wants(const OptionalTensor& t) { return t.has_value() && t->requires_grad(); }

 private:
  static OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : OptionalTensor(); }

  static Tensor column_sums(const Tensor& dy) {
    const c10::SymInt features = dy.sym_size(-1);
    return at::sum_to(dy, c10::SymIntArrayRef(&features, 1));
  }

  // Two places among the saved tensors: the data in the direction that the backward reads, and their scales.
  static Form keep(Keeper& keeper, bool needed, const Operand& t, const Kept& what) {
    if (!t.quantized()) {
      keeper.keep_if(needed, t.plain, what);
      keeper.keep_if(false, Tensor(), kScales);
      return {};
    }
    keeper.keep_if(needed, t.fp8.columnwise, what);
    keeper.keep_if(needed, t.fp8.columnwise_scale_inv, kScales);
    return {true, t.fp8.scaling, t.fp8.e5m2};
  }

  static Operand kept(const variable_list& saved, size_t slot, const Form& form) {
    if (!form.quantized) return {saved[slot], {}};
    return {{}, {form.scaling, form.e5m2, {}, {}, saved[slot], saved[slot + 1]}};
  }

  template <class Route>
  static void into_norm(const Prologue& p, const Wanted& wanted, const variable_list& saved, const Tensor& d_operand,
                        const Tensor& dh, variable_list& out) {
    if (d_operand.defined()) {
      std::tie(out[kX], out[kGamma], out[kBeta]) = Route::template call<normalization_bwd>(
          "te::normalization_bwd", d_operand, optional(dh), saved[kInput], saved[kSavedGamma], saved[kMean],
          saved[kRstd], p.rms, p.zero_centered_gamma,
          std::array<bool, 3>{wanted[kX] || wanted[kResidual] || dh.defined(), wanted[kGamma], wanted[kBeta]});
    } else if (dh.defined()) {
      out[kX] = dh;
    }
    out[kResidual] = out[kX];
  }
};

}  // namespace te_torch
