// A norm as a prologue: RMSNorm or LayerNorm, of x or of x + residual.
#include "layer/prologue.h"
#include "ops/normalization.h"
#include "ops/normalization_quantize.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kNormInput{"norm input", "the norm's backward normalises it again",
                               "the product or sum that made it: te.checkpoint around the layer", true};
constexpr SavedInfo kNormOutput{"norm output", "the weight's gradient is taken with it",
                                "the norm's forward, 4 B per 16-bit element: recompute_norm_output=True", true};

using norm::kBeta, norm::kGamma, norm::kMean, norm::kResidual, norm::kRstd;

OptionalTensor optional(const Tensor& t) { return t.defined() ? OptionalTensor(t) : OptionalTensor(); }

class Norm final : public Prologue {
 public:
  Norm(double eps, bool rms, bool zero_centered_gamma) : eps_(eps), rms_(rms), zero_centered_(zero_centered_gamma) {}

  const SavedInfo& input_info() const override { return kNormInput; }
  const SavedInfo& operand_info() const override { return kNormOutput; }
  bool reads_input() const override { return true; }

  PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                         QuantizeUsage usage, bool want_output) const override {
    PrologueOutput out;
    Tensor summed, mean, rstd;
    const Tensor &gamma = in.tensors[kGamma], &beta = in.tensors[kBeta];
    const OptionalTensor residual = in.tensors.optional(kResidual);
    if (fuses(dispatch, quantizer)) {
      QuantizedNorm norm = Direct::call<normalization_fwd_quantize>("te::normalization_fwd_quantize", in.x, residual,
                                                                    gamma, optional(beta), eps_, rms_, zero_centered_,
                                                                    *quantizer, usage, want_output);
      out.operand.fp8 = norm.quantized;
      out.output = norm.y;
      summed = norm.h;
      mean = norm.mean;
      rstd = norm.rstd;
    } else {
      std::tie(out.output, summed, mean, rstd) = dispatch.call<normalization_fwd>(
          "te::normalization_fwd", in.x, residual, gamma, optional(beta), eps_, rms_, zero_centered_);
      out.operand = operand_of(dispatch, quantizer, out.output, usage);
    }
    out.input = residual.has_value() ? summed : in.x;
    if (!want_output) out.output = in.x.new_empty({0});
    out.saves = {{kGamma, gamma, &kParameter, true},
                 {kBeta, beta, &kParameter, true, true},
                 {kMean, std::move(mean), &statistic_of(in.x)},
                 {kRstd, std::move(rstd), &statistic_of(in.x)}};
    return out;
  }

  Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                    const Quantizer* quantizer) const override {
    const QuantizeUsage columnwise{false, true};
    const OptionalTensor beta = saved.tensors.optional(kBeta);
    if (fuses(dispatch, quantizer)) {
      return {{},
              Direct::call<normalization_again_quantize>(
                  "te::normalization_again_quantize", saved.input, saved.tensors[kGamma], beta, saved.tensors[kMean],
                  saved.tensors[kRstd], rms_, zero_centered_, quantizer->spec, saved.used_scales, columnwise)};
    }
    const Tensor value =
        std::get<0>(dispatch.call<normalization_fwd>("te::normalization_fwd", saved.input, OptionalTensor(),
                                                     saved.tensors[kGamma], beta, eps_, rms_, zero_centered_));
    return recomputed_operand(dispatch, quantizer, saved.used_scales, value, columnwise);
  }

  PrologueBackward backward(const DispatchMode& dispatch, const PrologueSaved& saved,
                            const PrologueGradient& g) const override {
    PrologueBackward back;
    if (g.d_operand.defined()) {
      const Tensor &rstd = saved.tensors[kRstd], &saved_mean = saved.tensors[kMean];
      const Tensor mean = saved_mean.defined() ? saved_mean : rstd.new_empty({0});
      const bool input = g.needs_input || g.wanted[kResidual] || g.d_input.defined();
      auto [dx, dgamma, dbeta] = dispatch.call<normalization_bwd>(
          "te::normalization_bwd", g.d_operand, optional(g.d_input), saved.input, saved.tensors[kGamma], mean, rstd,
          rms_, zero_centered_, std::array<bool, 3>{input, g.wanted[kGamma], g.wanted[kBeta]});
      back.dx.plain = std::move(dx);
      back.gradients = {{kGamma, std::move(dgamma)}, {kBeta, std::move(dbeta)}};
    } else {
      back.dx.plain = g.d_input;
    }
    if (g.wanted[kResidual]) back.gradients.emplace_back(kResidual, back.dx.plain);
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
