// Rows of x as a prologue, in the order of a map (transformer_engine/permute.h): x has tokens, the GEMM reads a row for
// each pair of a token and an expert. The backward gathers them again from x, unless the call keeps them. Where groups
// of rows on the device are quantized, that gathers them (te_grouped_quantize).
#include "layer/gemm_policy.h"
#include "layer/prologue.h"
#include "ops/permute.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kTokens{"tokens", "the rows are gathered from it again, for the weight's gradient", kCallers};
constexpr SavedInfo kGatheredRows{"gathered rows", "the weight's gradient is taken with them",
                                  "gathering them again: keep_rows=False", true};
constexpr SavedInfo kTokenOfRow{"token of each row", "the rows are gathered by it again",
                                "making it again from the routing", true, true};
constexpr SavedInfo kRowOfPair{"rows of each token", "the gradient of a token is the sum of theirs",
                               "making it again from the routing"};

class GatheredRows final : public Prologue {
 public:
  const SavedInfo& input_info() const override { return kTokens; }
  const SavedInfo& operand_info() const override { return kGatheredRows; }
  bool has_own_rows() const override { return true; }
  bool reads_input() const override { return false; }

  PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                         QuantizeUsage usage, bool) const override {
    const Tensor &source = in.tensors[row_map::kTokenOfRow], &back = in.tensors[row_map::kRowOfPair];
    const Operand rows{in.x, {}, {}, source};
    return {quantizer == nullptr ? rows : operand_of(dispatch, quantizer, gathered_rows(dispatch, rows), usage),
            in.x,
            {},
            {{row_map::kTokenOfRow, source, &kTokenOfRow, true, true}, {row_map::kRowOfPair, back, &kRowOfPair, true}}};
  }

  Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                    const Quantizer* quantizer) const override {
    const Operand rows{saved.input, {}, {}, saved.tensors[row_map::kTokenOfRow]};
    if (quantizer == nullptr) return rows;
    return recomputed_operand(dispatch, quantizer, saved.used_scales, gathered_rows(dispatch, rows), {false, true});
  }

  PrologueBackward backward(const DispatchMode& dispatch, const PrologueSaved& saved,
                            const PrologueGradient& g) const override {
    PrologueBackward back;
    if (!g.needs_input || !g.d_operand.defined()) return back;
    back.dx.plain = dispatch.call<unpermute_fwd>("te::unpermute_fwd", g.d_operand, saved.tensors[row_map::kRowOfPair],
                                                 false, OptionalTensor(), OptionalTensor(), OptionalTensor());
    return back;
  }
};

}  // namespace

ProloguePtr rows_prologue() {
  static const ProloguePtr prologue = std::make_shared<GatheredRows>();
  return prologue;
}

}  // namespace te_torch::layer
