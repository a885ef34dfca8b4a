// What stands before a layer's product: nothing, a norm, an activation. A source makes the product's operand, makes it
// again for the backward, and takes a gradient back. The arithmetic is the rooms'.
#pragma once

#include <memory>

#include "gemm/product.h"

namespace te_torch::layer {

// What a source reads; of the last three a norm alone has some.
struct SourceInput {
  const Tensor& x;
  const OptionalTensor& residual;
  const OptionalTensor& gamma;
  const OptionalTensor& beta;
};

struct Made {
  Operand operand;
  Tensor input;   // what the source read: x, or x + residual
  Tensor output;  // of a norm, plain; an empty tensor where nobody asked for it
  Tensor mean, rstd;
};

// What the backward has of it.
struct SourceSaved {
  const Tensor &input, &gamma, &beta, &mean, &rstd;
  const Tensor& used_scales;  // that the operand was quantized by, where its scaling is of the whole tensor
};

// A gradient on its way back through a source.
struct SourceGradient {
  Tensor d_operand;  // undefined: none has arrived there
  Tensor d_input;    // what has arrived at the source's input from elsewhere: a residual's
  bool wants_gamma = false, wants_beta = false, wants_input = true;
  // Whether the operand is recomputed on the way, and by which quantizer.
  bool wants_operand = false;
  const Quantizer* quantizer = nullptr;
  // Of the product that made the source's input: how it reads the gradient. Null where it goes on as it is.
  const Quantizer* onward = nullptr;
  Directions directions{};
  bool wants_onward_sums = false;
};

struct TakenBack {
  Operand dx;
  Tensor dx_sums;  // of dx's columns, where they are wanted and dx was quantized
  Tensor dgamma, dbeta;
  Operand operand;  // recomputed, in the direction that a weight's gradient reads
};

class TE_EXPORT Source {
 public:
  Source() = default;
  virtual ~Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  virtual const Kept& input_words() const = 0;
  virtual const Kept& operand_words() const = 0;
  // Whether the operand is x itself: a product can look at x first, and nothing is saved by making it again.
  virtual bool keeps_width() const { return false; }
  // Whether taking a gradient back reads the input.
  virtual bool reads_input() const = 0;
  // Whether take_back() recomputes the operand on the way, at no cost worth a name: it is not kept then.
  virtual bool brings_operand_back() const { return false; }

  virtual Made make(const Route& route, const SourceInput& in, const Quantizer* quantizer, Directions directions,
                    bool want_output) const = 0;
  // The operand in the direction that a weight's gradient reads, to the same bits.
  virtual Operand recompute(const Route& route, const SourceSaved& saved, const Quantizer* quantizer) const = 0;
  virtual TakenBack take_back(const Route& route, const SourceSaved& saved, const SourceGradient& gradient) const = 0;
};

using SourcePtr = std::shared_ptr<const Source>;

TE_EXPORT SourcePtr plain_source();
TE_EXPORT SourcePtr norm_source(double eps, bool rms, bool zero_centered_gamma);
TE_EXPORT SourcePtr activation_source(std::string_view kind, at::ArrayRef<double> params);

// Whether a room's own FP8 form serves: the dispatcher's route and quantizers written in Python go by way of the plain
// value, to the same bits.
inline bool fuses(const Route& route, const Quantizer* quantizer) {
  return route.direct() && quantizer != nullptr && quantizer->active() && quantizer->spec.kind != QuantizeSpec::kPython;
}

}  // namespace te_torch::layer
