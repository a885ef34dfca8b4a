// A norm as a prologue: RMSNorm or LayerNorm, of the sum with a residual where there is one.
#include "layer/prologue.h"
#include "ops/normalization.h"
#include "ops/normalization_quantize.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kNormInput{"norm input", "the norm's backward normalises it again",
                               "the product or sum that made it: te.checkpoint around the layer", true};
constexpr SavedInfo kNormOutput{"norm output", "the weight's gradient is taken with it",
                                "the norm's forward, 4 B per 16-bit element: recompute_norm_output=True", true};

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : OptionalTensor(); }

class Norm final : public Prologue {
 public:
  Norm(double eps, bool rms, bool zero_centered_gamma) : eps_(eps), rms_(rms), zero_centered_(zero_centered_gamma) {}

  const SavedInfo& input_info() const override { return kNormInput; }
  const SavedInfo& operand_info() const override { return kNormOutput; }
  bool reads_input() const override { return true; }

  PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                         QuantizeUsage usage, bool want_output) const override {
    PrologueOutput made;
    Tensor summed;
    if (fuses(dispatch, quantizer)) {
      QuantizedNorm norm =
          Direct::call<normalization_fwd_quantize>("te::normalization_fwd_quantize", in.x, in.residual, *in.gamma,
                                                   in.beta, eps_, rms_, zero_centered_, *quantizer, usage, want_output);
      made.operand.fp8 = norm.quantized;
      made.output = norm.y;
      summed = norm.h;
      made.mean = norm.mean;
      made.rstd = norm.rstd;
    } else {
      std::tie(made.output, summed, made.mean, made.rstd) = dispatch.call<normalization_fwd>(
          "te::normalization_fwd", in.x, in.residual, *in.gamma, in.beta, eps_, rms_, zero_centered_);
      made.operand = operand_of(dispatch, quantizer, made.output, usage);
    }
    made.input = in.residual.has_value() ? summed : in.x;
    if (!want_output) made.output = in.x.new_empty({0});
    return made;
  }

  Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                    const Quantizer* quantizer) const override {
    const QuantizeUsage columnwise{false, true};
    const OptionalTensor beta = optional(saved.beta);
    if (fuses(dispatch, quantizer)) {
      return {{},
              Direct::call<normalization_again_quantize>("te::normalization_again_quantize", saved.input, saved.gamma,
                                                         beta, saved.mean, saved.rstd, rms_, zero_centered_,
                                                         quantizer->spec, saved.used_scales, columnwise)};
    }
    const Tensor value = std::get<0>(dispatch.call<normalization_fwd>(
        "te::normalization_fwd", saved.input, OptionalTensor(), saved.gamma, beta, eps_, rms_, zero_centered_));
    return recomputed_operand(dispatch, quantizer, saved.used_scales, value, columnwise);
  }

  PrologueBackward backward(const DispatchMode& dispatch, const PrologueSaved& saved,
                            const PrologueGradient& g) const override {
    PrologueBackward back;
    if (g.d_operand.defined()) {
      const Tensor mean = saved.mean.defined() ? saved.mean : saved.rstd.new_empty({0});
      std::tie(back.dx.plain, back.dgamma, back.dbeta) = dispatch.call<normalization_bwd>(
          "te::normalization_bwd", g.d_operand, optional(g.d_input), saved.input, saved.gamma, mean, saved.rstd, rms_,
          zero_centered_, std::array<bool, 3>{g.wants_input || g.d_input.defined(), g.wants_gamma, g.wants_beta});
    } else {
      back.dx.plain = g.d_input;
    }
    return back;
  }

 private:
  double eps_;
  bool rms_, zero_centered_;
};

}  // namespace

ProloguePtr norm_prologue(double eps, bool rms, bool zero_centered_gamma) {
  return std::make_shared<Norm>(eps, rms, zero_centered_gamma);
}

}  // namespace te_torch::layer
