// An activation as a source. Its backward recomputes the activation, so that is never kept.
#include "layer/source.h"
#include "ops/activation.h"

namespace te_torch::layer {

namespace {

constexpr Kept kPreActivation{"pre-activation", "the activation's backward reads it and recomputes it",
                              "norm and first product: LayerNormMLP(checkpoint=True)", true};
constexpr Kept kActivation{"activation", "the weight's gradient is taken with it",
                           "nothing beside the activation's backward, which recomputes it: 2 B of 12", true};

class Activation final : public Source {
 public:
  Activation(std::string_view kind, at::ArrayRef<double> params) : kind_(kind), params_(params.vec()) {}

  const Kept& input_words() const override { return kPreActivation; }
  const Kept& operand_words() const override { return kActivation; }
  bool reads_input() const override { return true; }
  bool brings_operand_back() const override { return true; }

  Made make(const Route& route, const SourceInput& in, const Quantizer* quantizer, Directions directions,
            bool) const override {
    if (fuses(route, quantizer)) {
      return {{{},
               Direct::call<activation_fwd_quantize>("te::activation_fwd_quantize", in.x, kind(), params(), *quantizer,
                                                     directions)},
              in.x,
              {},
              {},
              {}};
    }
    const Tensor y = route.call<activation_fwd>("te::activation_fwd", in.x, kind(), params());
    return {operand_of(route, quantizer, y, directions), in.x, {}, {}, {}};
  }

  Operand recompute(const Route& route, const SourceSaved& saved, const Quantizer* quantizer) const override {
    const Tensor value = route.call<activation_fwd>("te::activation_fwd", saved.input, kind(), params());
    return recomputed_operand(route, quantizer, saved.used_scales, value, {false, true});
  }

  TakenBack take_back(const Route& route, const SourceSaved& saved, const SourceGradient& g) const override {
    TakenBack back;
    if (fuses(route, g.onward) && (!g.wants_operand || fuses(route, g.quantizer))) {
      const QuantizeSpec spec = g.wants_operand ? g.quantizer->spec : QuantizeSpec();
      std::tie(back.dx.fp8, back.operand.fp8) = Direct::call<activation_bwd_quantize>(
          "te::activation_bwd_quantize", g.d_operand, saved.input, kind(), params(), *g.onward, g.directions,
          g.wants_onward_sums ? &back.dx_sums : nullptr, spec, saved.used_scales, Directions{false, g.wants_operand});
      return back;
    }
    const auto [dx, y] =
        route.call<activation_bwd>("te::activation_bwd", g.d_operand, saved.input, kind(), params(), g.wants_operand);
    back.dx = operand_of(route, g.onward, dx, g.directions, g.wants_onward_sums ? &back.dx_sums : nullptr);
    if (g.wants_operand) back.operand = recomputed_operand(route, g.quantizer, saved.used_scales, y, {false, true});
    return back;
  }

 private:
  std::string_view kind() const { return kind_; }
  at::ArrayRef<double> params() const { return params_; }

  std::string kind_;
  std::vector<double> params_;
};

}  // namespace

SourcePtr activation_source(std::string_view kind, at::ArrayRef<double> params) {
  return std::make_shared<Activation>(kind, params);
}

}  // namespace te_torch::layer
