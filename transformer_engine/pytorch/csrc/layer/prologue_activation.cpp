// An activation as a prologue, also one whose rows are multiplied by a scale each. Their backward recomputes the
// activation, so that is never kept.
#include <torch/csrc/autograd/anomaly_mode.h>

#include "layer/prologue.h"
#include "ops/activation.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kPreActivation{"pre-activation", "the activation's backward reads it and recomputes it",
                                   "norm and first product: LayerNormMLP(checkpoint=True)", true};
constexpr SavedInfo kActivation{"activation", "the weight's gradient is taken with it",
                                "nothing beside the activation's backward, which recomputes it: 2 B of 12", true};

class Activation final : public Prologue {
 public:
  Activation(std::string_view kind, at::ArrayRef<double> params) : kind_(kind), params_(params.vec()) {}

  const SavedInfo& input_info() const override { return kPreActivation; }
  const SavedInfo& operand_info() const override { return kActivation; }
  bool reads_input() const override { return true; }
  bool recomputes_operand() const override { return true; }

  PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                         QuantizeUsage usage, bool) const override {
    if (fuses(dispatch, quantizer)) {
      return {{{},
               Direct::call<activation_fwd_quantize>("te::activation_fwd_quantize", in.x, kind(), params(), *quantizer,
                                                     usage)},
              in.x,
              {},
              {}};
    }
    const Tensor y = dispatch.call<activation_fwd>("te::activation_fwd", in.x, kind(), params());
    return {operand_of(dispatch, quantizer, y, usage), in.x, {}, {}};
  }

  Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                    const Quantizer* quantizer) const override {
    const Tensor value = dispatch.call<activation_fwd>("te::activation_fwd", saved.input, kind(), params());
    return recomputed_operand(dispatch, quantizer, saved.used_scales, value, {false, true});
  }

  PrologueBackward backward(const DispatchMode& dispatch, const PrologueSaved& saved,
                            const PrologueGradient& g) const override {
    PrologueBackward back;
    if (fuses(dispatch, g.next_quantizer) && (!g.needs_operand || fuses(dispatch, g.quantizer))) {
      const QuantizeSpec spec = g.needs_operand ? g.quantizer->spec : QuantizeSpec();
      std::tie(back.dx.fp8, back.operand.fp8) = Direct::call<activation_bwd_quantize>(
          "te::activation_bwd_quantize", g.d_operand, saved.input, kind(), params(), *g.next_quantizer, g.usage,
          g.needs_next_sums ? &back.dx_sums : nullptr, spec, saved.used_scales, QuantizeUsage{false, g.needs_operand});
      return back;
    }
    const auto [dx, y] =
        g.is_own && g.needs_operand
            ? Direct::call<activation_bwd_over_dy>("te::activation_bwd", g.d_operand, saved.input, kind(), params())
            : dispatch.call<activation_bwd>("te::activation_bwd", g.d_operand, saved.input, kind(), params(),
                                            g.needs_operand);
    back.dx = operand_of(dispatch, g.next_quantizer, dx, g.usage, g.needs_next_sums ? &back.dx_sums : nullptr);
    if (g.needs_operand) back.operand = recomputed_operand(dispatch, g.quantizer, saved.used_scales, y, {false, true});
    return back;
  }

 private:
  std::string_view kind() const { return kind_; }
  at::ArrayRef<double> params() const { return params_; }

  std::string kind_;
  std::vector<double> params_;
};

constexpr SavedInfo kGroupedPreActivation{"pre-activation", "the activation's backward reads it and recomputes it",
                                          "the first product", true};
constexpr SavedInfo kScaledActivation{"scaled activation", "the weight's gradient is taken with it",
                                      "nothing beside the activation's backward, which recomputes it", true};
constexpr SavedInfo kRowScale{"row scale", "the activation's gradient is multiplied by it", kCallers, true, true};

// No kernel writes its FP8 result directly: the operand is quantized after it.
class ScaledActivation final : public Prologue {
 public:
  ScaledActivation(std::string_view kind, at::ArrayRef<double> params, OptionalTensor live, bool zero_tail)
      : kind_(kind), params_(params.vec()), live_(std::move(live)), zero_tail_(zero_tail) {}

  const SavedInfo& input_info() const override { return kGroupedPreActivation; }
  const SavedInfo& operand_info() const override { return kScaledActivation; }
  bool reads_input() const override { return true; }
  bool recomputes_operand() const override { return true; }
  bool is_cast(int own) const override { return own != row_scale::kScale; }

  PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                         QuantizeUsage usage, bool) const override {
    const Tensor& scale = in.tensors[row_scale::kScale];
    return {operand_of(dispatch, quantizer, value(dispatch, in.x, scale), usage),
            in.x,
            {},
            {{row_scale::kScale, scale, &kRowScale, true}}};
  }

  Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                    const Quantizer* quantizer) const override {
    return recomputed_operand(dispatch, quantizer, saved.used_scales,
                              value(dispatch, saved.input, saved.tensors[row_scale::kScale]), {false, true});
  }

  PrologueBackward backward(const DispatchMode& dispatch, const PrologueSaved& saved,
                            const PrologueGradient& g) const override {
    PrologueBackward back;
    const bool needs_scale = g.wanted[row_scale::kScale];
    const auto gradients = [&](auto&& call) {
      return call("te::scaled_activation_bwd", g.d_operand, saved.input, saved.tensors[row_scale::kScale], live_,
                  kind(), params(), needs_scale, g.needs_operand);
    };
    // torch's anomaly mode looks for NaN in all of a node's gradients.
    const bool live_alone = !zero_tail_ && dispatch.direct() && !torch::autograd::AnomalyMode::is_enabled();
    auto [dx, dscale, y] =
        live_alone ? gradients([](auto&&... a) { return Direct::call<scaled_activation_bwd_of_live>(a...); })
                   : gradients([&](auto&&... a) { return dispatch.call<scaled_activation_bwd>(a...); });
    back.dx = operand_of(dispatch, g.next_quantizer, dx, g.usage, g.needs_next_sums ? &back.dx_sums : nullptr);
    if (g.needs_operand) back.operand = recomputed_operand(dispatch, g.quantizer, saved.used_scales, y, {false, true});
    if (needs_scale) back.gradients.emplace_back(row_scale::kScale, std::move(dscale));
    return back;
  }

 private:
  std::string_view kind() const { return kind_; }
  at::ArrayRef<double> params() const { return params_; }
  Tensor value(const DispatchMode& dispatch, const Tensor& x, const Tensor& scale) const {
    return dispatch.call<scaled_activation_fwd>("te::scaled_activation_fwd", x, scale, live_, kind(), params());
  }

  std::string kind_;
  std::vector<double> params_;
  OptionalTensor live_;
  bool zero_tail_;
};

}  // namespace

ProloguePtr scaled_activation_prologue(std::string_view kind, at::ArrayRef<double> params, OptionalTensor live,
                                       bool zero_tail) {
  return std::make_shared<ScaledActivation>(kind, params, std::move(live), zero_tail);
}

ProloguePtr activation_prologue(std::string_view kind, at::ArrayRef<double> params) {
  return std::make_shared<Activation>(kind, params);
}

}  // namespace te_torch::layer
