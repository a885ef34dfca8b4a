// The identity as a prologue: the GEMM reads the layer's input.
#include "layer/prologue.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kLinearInput{"linear input", "the weight's gradient is taken with it", kCallers, true};

class Plain final : public Prologue {
 public:
  const SavedInfo& input_info() const override { return kLinearInput; }
  const SavedInfo& operand_info() const override { return kLinearInput; }
  bool is_identity() const override { return true; }
  bool reads_input() const override { return false; }

  PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                         QuantizeUsage usage, bool) const override {
    return {operand_of(dispatch, quantizer, in.x, usage), in.x, {}, {}};
  }
  Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                    const Quantizer* quantizer) const override {
    return recomputed_operand(dispatch, quantizer, saved.used_scales, saved.input, {false, true});
  }
  PrologueBackward backward(const DispatchMode&, const PrologueSaved&,
                            const PrologueGradient& gradient) const override {
    return {{gradient.d_operand, {}}, {}, {}, {}};
  }
};

}  // namespace

ProloguePtr plain_prologue() {
  static const ProloguePtr prologue = std::make_shared<Plain>();
  return prologue;
}

}  // namespace te_torch::layer
