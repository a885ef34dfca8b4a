// The linear layers as one autograd family: Linear, LayerNormLinear and the second half of an MLP differ in the
// prologue of their product (nothing, a norm, an activation). The prologue is data; forward and backward stand here
// once.
#pragma once

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>

#include "activation.h"
#include "autograd.h"
#include "linear_core.h"
#include "normalization.h"
#include "weight_grad.h"

namespace te_torch {

// What stands before the product, as plain values.
struct Prologue {
  enum Kind { kNone, kNorm, kActivation } kind = kNone;
  double eps = 0;
  bool rms = false;
  bool zero_centered_gamma = false;
  bool recompute_output = false;  // of a norm: written again by the backward instead of kept
  bool return_input = false;      // of a norm: x is an output too, so that a residual's gradient joins in the backward
  std::string activation;
  std::vector<double> params;

  static Prologue norm(double eps, bool rms, bool zero_centered_gamma) {
    Prologue p;
    p.kind = kNorm;
    p.eps = eps;
    p.rms = rms;
    p.zero_centered_gamma = zero_centered_gamma;
    return p;
  }
  static Prologue act(std::string_view kind, at::ArrayRef<double> params) {
    Prologue p;
    p.kind = kActivation;
    p.activation = std::string(kind);
    p.params = params.vec();
    return p;
  }
};

struct LinearFamily {
  static constexpr const char* kName = "linear";
  struct State {
    Prologue prologue;
    Sink sink;
  };

  // Argument positions, and where each tensor lies among the saved ones.
  enum Slot { kX, kWeight, kBias, kGamma, kBeta, kResidual };
  enum Saved { kInput, kSavedWeight, kProduct, kSavedGamma, kSavedBeta, kMean, kRstd, kSavedCount };

  // Outputs: y; with a norm prologue also the norm's output, and x + residual (or x itself, asked for) after it.
  // Kept: weight and norm statistics for the input's gradient, the product's operand for the weight's; of an
  // activation only its input, the activation itself is written again by the backward.
  template <class Route>
  static variable_list forward(State& state, Keeper& keeper, const Tensor& x, const Tensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& gamma, const OptionalTensor& beta,
                               const OptionalTensor& residual, const Prologue& p, const Sink& sink) {
    state.prologue = p;
    state.sink = sink;
    const auto wants = [](const OptionalTensor& t) { return t.has_value() && t->requires_grad(); };
    const bool into_prologue = x.requires_grad() || wants(gamma) || wants(beta) || wants(residual);
    const bool into_weight = weight.requires_grad();
    const bool norm = p.kind == Prologue::kNorm;
    const bool activation = p.kind == Prologue::kActivation;
    Tensor operand = x;
    Tensor h = x;
    Tensor mean, rstd;
    if (norm) {
      Tensor summed;
      std::tie(operand, summed, mean, rstd) = Route::template call<normalization_fwd>(
          "te::normalization_fwd", x, residual, *gamma, beta, p.eps, p.rms, p.zero_centered_gamma);
      if (residual.has_value()) h = summed;
    } else if (activation) {
      operand = Route::template call<activation_fwd>("te::activation_fwd", x, std::string_view(p.activation),
                                                     at::ArrayRef<double>(p.params));
    }
    Tensor y = Route::template call<linear_fwd>("te::linear_fwd", operand, weight, bias);

    const bool again = norm && into_weight && p.recompute_output;
    keeper.keep_if((norm && into_prologue) || (activation && (into_prologue || into_weight)) || again, h,
                   norm ? kNormInput : kPreActivation);
    keeper.keep_if(into_prologue, weight, kParameter);
    keeper.keep_if(into_weight && !activation && !again, operand, norm ? kNormOutput : kLinearInput);
    keeper.keep_if((norm && into_prologue) || again, gamma, kParameter);
    keeper.keep_if(again, beta, kParameter);
    keeper.keep_if(norm && into_prologue, mean, kStatistic);
    keeper.keep_if(norm && into_prologue, rstd, kStatistic);
    if (again) keeper.recompute(operand, kNormOutput);
    if (activation && into_weight) keeper.recompute(operand, kActivation);
    if (!norm) return {y};
    if (residual.has_value() || p.return_input) return {y, operand, h};
    return {y, operand};
  }

  template <class Route>
  static variable_list backward(const State& state, const Wanted& wanted, const variable_list& saved,
                                const variable_list& grads) {
    const Prologue& p = state.prologue;
    const bool norm = p.kind == Prologue::kNorm;
    const bool into_prologue = wanted[kX] || wanted[kGamma] || wanted[kBeta] || wanted[kResidual];
    const Tensor& dy = grads[0];
    variable_list out(kResidual + 1);
    Tensor operand = saved[kProduct];
    Tensor d_operand;
    if (dy.defined() && into_prologue) {
      d_operand = Route::template call<linear_dgrad>("te::linear_dgrad", dy, saved[kSavedWeight]);
    }
    if (norm && grads.size() > 1 && grads[1].defined()) {
      d_operand = d_operand.defined() ? d_operand + grads[1] : grads[1];
    }
    if (p.kind == Prologue::kActivation && dy.defined()) {
      const std::string_view kind(p.activation);
      const at::ArrayRef<double> params(p.params);
      if (into_prologue) {
        std::tie(out[kX], operand) = Route::template call<activation_bwd>("te::activation_bwd", d_operand,
                                                                          saved[kInput], kind, params, wanted[kWeight]);
      } else if (wanted[kWeight]) {
        operand = Route::template call<activation_fwd>("te::activation_fwd", saved[kInput], kind, params);
      }
    } else if (!norm) {
      out[kX] = d_operand;
    }
    if (dy.defined() && wanted[kWeight]) {
      if (norm && !operand.defined()) operand = normed_again<Route>(p, saved);
      std::tie(out[kWeight], out[kBias]) =
          state.sink ? (*state.sink)(dy, operand, wanted[kBias])
                     : Route::template call<linear_wgrad>("te::linear_wgrad", dy, operand, wanted[kBias]);
    } else if (dy.defined() && wanted[kBias]) {
      const c10::SymInt features = dy.sym_size(-1);
      out[kBias] = at::sum_to(dy, c10::SymIntArrayRef(&features, 1));
    }
    if (norm && into_prologue) {
      const OptionalTensor dh = grads.size() > 2 && grads[2].defined() ? OptionalTensor(grads[2]) : OptionalTensor();
      if (d_operand.defined()) {
        std::tie(out[kX], out[kGamma], out[kBeta]) = Route::template call<normalization_bwd>(
            "te::normalization_bwd", d_operand, dh, saved[kInput], saved[kSavedGamma], saved[kMean], saved[kRstd],
            p.rms, p.zero_centered_gamma,
            std::array<bool, 3>{wanted[kX] || wanted[kResidual] || dh.has_value(), wanted[kGamma], wanted[kBeta]});
      } else if (dh.has_value()) {
        out[kX] = *dh;
      }
      out[kResidual] = out[kX];
    }
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

 private:
  template <class Route>
  static Tensor normed_again(const Prologue& p, const variable_list& saved) {
    const OptionalTensor beta = saved[kSavedBeta].defined() ? OptionalTensor(saved[kSavedBeta]) : OptionalTensor();
    return std::get<0>(Route::template call<normalization_fwd>("te::normalization_fwd", saved[kInput], OptionalTensor(),
                                                               saved[kSavedGamma], beta, p.eps, p.rms,
                                                               p.zero_centered_gamma));
  }
};

}  // namespace te_torch
