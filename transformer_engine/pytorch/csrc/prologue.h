// What stands before a linear layer's product (nothing, a norm, an activation) as data, and how it makes the product's
// operand, makes it again, and takes a gradient back. The arithmetic is the rooms'.
#pragma once

#include "activation.h"
#include "normalization.h"
#include "normalization_quantized.h"
#include "product.h"

namespace te_torch {

// As plain values.
struct Prologue {
  enum Kind { kNone, kNorm, kActivation } kind = kNone;
  double eps = 0;
  bool rms = false;
  bool zero_centered_gamma = false;
  bool recompute_output = false;  // of a norm: written again by the backward instead of kept
  bool return_input = false;      // of a norm: x is an output too, so that a residual's gradient joins in the backward
  bool return_output = true;      // of a norm: its output is one of the node's
  bool keep_input = false;        // of nothing: x is kept as it is and quantized again by the backward
  bool input_kept_elsewhere = false;  // of an activation: the caller sees to x
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

struct Produced {
  Operand operand;
  Tensor h;       // what the prologue read: x, or x + residual
  Tensor output;  // of a norm, plain; an empty tensor where nobody wants it
  Tensor mean, rstd;
};

// Whether a room's own FP8 form serves: the dispatcher's routes and quantizers written in Python go by way of the plain
// value, to the same bits.
template <class Route>
bool fuses(const Quantizer* quantizer) {
  return std::is_same_v<Route, Direct> && quantizer != nullptr && quantizer->active() &&
         quantizer->spec.kind != QuantizeSpec::kPython;
}

template <class Route>
Produced produce_norm(const Prologue& p, const Tensor& x, const OptionalTensor& residual, const Tensor& gamma,
                      const OptionalTensor& beta, const Quantizer* quantizer, Directions directions) {
  Produced made;
  Tensor summed;
  if (fuses<Route>(quantizer)) {
    QuantizedNorm norm = Direct::call<normalization_fwd_quantized>("te::normalization_quantize_fwd", x, residual, gamma,
                                                                   beta, p.eps, p.rms, p.zero_centered_gamma,
                                                                   *quantizer, directions, p.return_output);
    made.operand.fp8 = norm.quantized;
    made.output = norm.y;
    summed = norm.h;
    made.mean = norm.mean;
    made.rstd = norm.rstd;
  } else {
    std::tie(made.output, summed, made.mean, made.rstd) = Route::template call<normalization_fwd>(
        "te::normalization_fwd", x, residual, gamma, beta, p.eps, p.rms, p.zero_centered_gamma);
    made.operand = operand_of<Route>(quantizer, made.output, directions);
  }
  made.h = residual.has_value() ? summed : x;
  if (!p.return_output) made.output = x.new_empty({0});
  return made;
}

template <class Route>
Produced produce(const Prologue& p, const Tensor& x, const OptionalTensor& residual, const OptionalTensor& gamma,
                 const OptionalTensor& beta, const Quantizer* quantizer, Directions directions) {
  if (p.kind == Prologue::kNorm) return produce_norm<Route>(p, x, residual, *gamma, beta, quantizer, directions);
  if (p.kind == Prologue::kNone) return {operand_of<Route>(quantizer, x, directions), x, {}, {}, {}};
  const std::string_view kind(p.activation);
  const at::ArrayRef<double> params(p.params);
  if (fuses<Route>(quantizer)) {
    return {{{},
             Direct::call<activation_fwd_quantized>("te::activation_fwd_quantized", x, kind, params, *quantizer,
                                                    directions)},
            x,
            {},
            {},
            {}};
  }
  const Tensor y = Route::template call<activation_fwd>("te::activation_fwd", x, kind, params);
  return {operand_of<Route>(quantizer, y, directions), x, {}, {}, {}};
}

// What the backward has at hand to make an operand again: what the prologue read, and a norm's parameters and
// statistics.
struct Again {
  const Tensor& h;
  OptionalTensor gamma, beta;
  const Tensor& mean;
  const Tensor& rstd;
};

// The operand in the direction that a weight's gradient reads, to the same bits.
template <class Route>
Operand produce_again(const Prologue& p, const Again& from, const Quantizer* quantizer, const Tensor& used_scales) {
  const Directions columnwise{false, true};
  if (p.kind == Prologue::kNorm && fuses<Route>(quantizer)) {
    return {{},
            Direct::call<normalization_again_quantized>("te::normalization_quantize", from.h, *from.gamma, from.beta,
                                                        from.mean, from.rstd, p.rms, p.zero_centered_gamma,
                                                        quantizer->spec, used_scales, columnwise)};
  }
  Tensor value = from.h;
  if (p.kind == Prologue::kNorm) {
    value = std::get<0>(Route::template call<normalization_fwd>("te::normalization_fwd", from.h, OptionalTensor(),
                                                                *from.gamma, from.beta, p.eps, p.rms,
                                                                p.zero_centered_gamma));
  } else if (p.kind == Prologue::kActivation) {
    value = Route::template call<activation_fwd>("te::activation_fwd", from.h, std::string_view(p.activation),
                                                 at::ArrayRef<double>(p.params));
  }
  return operand_again<Route>(quantizer, used_scales, value, columnwise);
}

struct ActivationGradient {
  Operand dx;
  Tensor dbias;     // the column sums of dx, where they are wanted and dx was quantized
  Operand operand;  // the activation again, in the direction that a weight's gradient reads
};

// onward: what the activation's input came from, which quantizes dx; null where dx goes on as it is.
template <class Route>
ActivationGradient activation_back(const Prologue& p, const Tensor& dy, const Tensor& x, bool with_operand,
                                   const Quantizer* quantizer, const Tensor& used_scales, const Quantizer* onward,
                                   Directions directions, bool with_bias) {
  ActivationGradient made;
  if (fuses<Route>(onward) && (!with_operand || fuses<Route>(quantizer))) {
    const QuantizeSpec spec = with_operand ? quantizer->spec : QuantizeSpec();
    std::tie(made.dx.fp8, made.operand.fp8) = Direct::call<activation_bwd_quantized>(
        "te::activation_bwd_quantized", dy, x, std::string_view(p.activation), at::ArrayRef<double>(p.params), *onward,
        directions, with_bias ? &made.dbias : nullptr, spec, used_scales, Directions{false, with_operand});
    return made;
  }
  const auto [dx, y] = Route::template call<activation_bwd>("te::activation_bwd", dy, x, std::string_view(p.activation),
                                                            at::ArrayRef<double>(p.params), with_operand);
  made.dx = operand_of<Route>(onward, dx, directions, with_bias ? &made.dbias : nullptr);
  if (with_operand) made.operand = operand_again<Route>(quantizer, used_scales, y, {false, true});
  return made;
}

}  // namespace te_torch
