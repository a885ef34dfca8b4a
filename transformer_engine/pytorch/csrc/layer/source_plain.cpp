// The source that is none: the product reads the layer's input.
#include "layer/source.h"

namespace te_torch::layer {

namespace {

constexpr Kept kLinearInput{"linear input", "the weight's gradient is taken with it", kCallers, true};

class Plain final : public Source {
 public:
  const Kept& input_words() const override { return kLinearInput; }
  const Kept& operand_words() const override { return kLinearInput; }
  bool keeps_width() const override { return true; }
  bool reads_input() const override { return false; }

  Made make(const Route& route, const SourceInput& in, const Quantizer* quantizer, Directions directions,
            bool) const override {
    return {operand_of(route, quantizer, in.x, directions), in.x, {}, {}, {}};
  }
  Operand recompute(const Route& route, const SourceSaved& saved, const Quantizer* quantizer) const override {
    return recomputed_operand(route, quantizer, saved.used_scales, saved.input, {false, true});
  }
  TakenBack take_back(const Route&, const SourceSaved&, const SourceGradient& gradient) const override {
    return {{gradient.d_operand, {}}, {}, {}, {}, {}};
  }
};

}  // namespace

SourcePtr plain_source() {
  static const SourcePtr source = std::make_shared<Plain>();
  return source;
}

}  // namespace te_torch::layer
