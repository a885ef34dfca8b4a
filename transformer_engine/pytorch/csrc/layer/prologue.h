// A prologue is the computation of a layer before its GEMM: nothing, a gather of rows, a norm, an activation. It
// computes the operand of the GEMM, recomputes it for the backward, and has a backward of its own. The arithmetic is in
// the op folders.
#pragma once

#include <memory>

#include "gemm/product.h"
#include "layer/named_arguments.h"

namespace te_torch::layer {

// The inputs of a prologue: x, and tensors of its own.
struct PrologueInput {
  const Tensor& x;
  OwnTensors tensors;
};

struct PrologueOutput {
  Operand operand;
  Tensor input;   // what the prologue read: x, or x + residual
  Tensor output;  // an output of the node beside y, in high precision (a norm's); empty where it is not wanted
  OwnSaves saves;
};

// Tensors that the forward has saved for the backward.
struct PrologueSaved {
  const Tensor& input;
  const Tensor& used_scales;  // that the operand was quantized by, where its scaling is of the whole tensor
  OwnTensors tensors;
};

// A gradient on its way back through a prologue.
struct PrologueGradient {
  Tensor d_operand;  // undefined: there is none
  Tensor d_input;    // a gradient of the prologue's input from elsewhere: that of a residual
  OwnWanted wanted;  // of the prologue's tensors
  bool needs_input = true;
  // Whether backward() recomputes the operand too, and by which quantizer.
  bool needs_operand = false;
  const Quantizer* quantizer = nullptr;
  // How the layer that computed the prologue's input reads the gradient. Null: in high precision.
  const Quantizer* next_quantizer = nullptr;
  QuantizeUsage usage{};
  bool needs_next_sums = false;
  bool is_own = false;  // whether nothing else reads d_operand, so that it may be overwritten
};

struct PrologueBackward {
  Operand dx;
  Tensor dx_sums;  // column sums of dx, if they are wanted and dx is quantized
  OwnGradients gradients;
  Operand operand;  // recomputed, in the direction that a weight's gradient reads
};

class TE_EXPORT Prologue {
 public:
  Prologue() = default;
  virtual ~Prologue() = default;
  Prologue(const Prologue&) = delete;
  Prologue& operator=(const Prologue&) = delete;

  virtual const SavedInfo& input_info() const = 0;
  virtual const SavedInfo& operand_info() const = 0;
  // Whether the operand is x itself, so that x can be checked first, and recomputing the operand saves no memory.
  virtual bool is_identity() const { return false; }
  // Whether the operand has other rows than the input, which is a matrix then.
  virtual bool has_own_rows() const { return false; }
  // Whether backward() reads the input.
  virtual bool reads_input() const = 0;
  // Whether backward() recomputes the operand at almost no cost: the operand is not saved then.
  virtual bool recomputes_operand() const { return false; }
  // Whether autocast casts its tensor of that name, if it is of a floating dtype.
  virtual bool is_cast(int own) const { return true; }

  virtual PrologueOutput forward(const DispatchMode& dispatch, const PrologueInput& in, const Quantizer* quantizer,
                                 QuantizeUsage usage, bool want_output) const = 0;
  // The operand in the direction that a weight's gradient reads, to the same bits.
  virtual Operand recompute(const DispatchMode& dispatch, const PrologueSaved& saved,
                            const Quantizer* quantizer) const = 0;
  virtual PrologueBackward backward(const DispatchMode& dispatch, const PrologueSaved& saved,
                                    const PrologueGradient& gradient) const = 0;
};

using ProloguePtr = std::shared_ptr<const Prologue>;

TE_EXPORT ProloguePtr plain_prologue();
// The operand is rows of x, which the names' tensors choose.
namespace row_map {
enum Own : int { kTokenOfRow, kRowOfPair };
}
TE_EXPORT ProloguePtr rows_prologue();
// Names of a norm's tensors: arguments, then what it saves.
namespace norm {
enum Own : int { kResidual, kGamma, kBeta, kMean, kRstd };
}
TE_EXPORT ProloguePtr norm_prologue(double eps, bool rms, bool zero_centered_gamma);
// The name of the scale of each row.
namespace row_scale {
enum Own : int { kScale };
}
// live: one int32 on the device, the rows from the first on that hold data; none: all rows. zero_tail: the scale's
// gradient is 0 in the rows after them; else it may be anything there.
TE_EXPORT ProloguePtr scaled_activation_prologue(std::string_view kind, at::ArrayRef<double> params,
                                                 OptionalTensor live, bool zero_tail);
TE_EXPORT ProloguePtr activation_prologue(std::string_view kind, at::ArrayRef<double> params);

// Whether a kernel may write FP8 directly. Traced calls and quantizers written in Python quantize its plain result, to
// the same bits.
inline bool fuses(const DispatchMode& dispatch, const Quantizer* quantizer) {
  return dispatch.direct() && quantizer != nullptr && quantizer->active() &&
         quantizer->spec.kind != QuantizeSpec::kPython;
}

}  // namespace te_torch::layer
