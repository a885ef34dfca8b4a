// The matrices that a GEMM reads, plain or FP8, and how they are quantized.
// - Written once for both dispatch modes. Only this file depends on the format of an operand.
#pragma once

#include "autograd/saved.h"
#include "quantize/quantize.h"

namespace te_torch {

// The operands that the GEMMs of a backward read: operands in FP8, as those of the forward; or, with an unquantized
// gradient, the operands before they were quantized, or the values of the forward's FP8 operands.
enum class BackwardReads : uint8_t { kQuantized, kHighPrecision, kDequantized };

// How the three products of one weight are quantized: its input, itself, the gradient of its output.
struct ProductQuantization {
  Quantizer x, weight, dy;
  // float32 accumulation throughout; without it the products of TENSOR scaling may accumulate faster.
  bool split_fprop = false;
  bool split_dgrad = true;
  bool split_wgrad = true;
  BackwardReads backward = BackwardReads::kQuantized;

  static constexpr size_t kPacked = 3 * QuantizeSpec::kPacked + 4;
  // The integers of a schema: the specs of the quantizers, the three flags, then `backward`.
  std::vector<int64_t> pack() const;
};

using Quantization = std::shared_ptr<const ProductQuantization>;  // none: plain operands

// None for no integers.
Quantization quantization_of(at::ArrayRef<int64_t> packed, const char* op);

inline BackwardReads backward_reads(const ProductQuantization* q) {
  return q == nullptr ? BackwardReads::kQuantized : q->backward;
}
// In which directions the backward reads an FP8 operand of the forward.
inline QuantizeUsage kept_usage(const ProductQuantization* q) {
  const bool columnwise = backward_reads(q) == BackwardReads::kQuantized;
  return {!columnwise, columnwise};
}
// Why the GEMMs of the backward are not in FP8, for te.explain and te.memory_plan; null: they may be.
const char* why_override(const ProductQuantization* q);

// A matrix that a product reads.
struct Operand {
  Tensor plain;  // undefined where it is FP8
  Quantized fp8;
  std::vector<Operand> groups = {};  // in place of one matrix: one for each group of its rows
  // int32; defined: row r is plain[row_map[r]], or 0. Between a prologue and what quantizes its result alone.
  Tensor row_map = {};

  bool quantized() const { return fp8.defined() || !groups.empty(); }
  bool defined() const { return plain.defined() || quantized(); }
};

// Consecutive rows of a matrix whose leading dimensions are folded.
struct Rows {
  int64_t first = 0, count = 0;
};

// The same quantization, whose input is quantized by the scales that were used before: same bits, no state changes.
Quantization with_scales(const ProductQuantization& q, const Tensor& used_scales);

// The quantizer of the gradient of a GEMM's result, read in these directions; null: the gradient stays plain. If
// neither direction is read, as only the bias needs a gradient, the quantizer computes no data, and column sums to the
// same bits as any other quantizer.
const Quantizer* gradient_quantizer(const ProductQuantization* q, QuantizeUsage usage);

// Refuses a quantizer whose state no schema carries, in a traced call.
void refuse_state(const Quantizer& quantizer);

// x quantized; x itself if the quantizer is null or leaves x alone. dbias: receives the column sums of x if x is
// quantized; null: they are not wanted.
TE_EXPORT Operand operand_of(const DispatchMode& dispatch, const Quantizer* quantizer, const Tensor& x,
                             QuantizeUsage usage, Tensor* dbias = nullptr);

// operand_of() of each, in as few launches as possible.
c10::SmallVector<Operand, 1> operands_of(const DispatchMode& dispatch, at::ArrayRef<const Quantizer*> quantizers,
                                         at::TensorList xs, QuantizeUsage usage);

// Quantizes x again by the scales that were used before, to the same bits.
TE_EXPORT Operand recomputed_operand(const DispatchMode& dispatch, const Quantizer* quantizer,
                                     const Tensor& used_scales, const Tensor& x, QuantizeUsage usage);

// Whether sums may stay in the tensor cores: without split accumulation, and with per-tensor scales.
inline bool may_be_fast(const Quantized& a, const Quantized& b, bool split) {
  return !split && a.scaling == TE_SCALING_TENSOR && b.scaling == TE_SCALING_TENSOR;
}

Tensor plain_of(const DispatchMode& dispatch, const Operand& t, at::ScalarType dtype);

// Some rows of an operand as a matrix of its own, rowwise. With blocks of 128 x 128, rows start and end with a block.
TE_EXPORT Operand rows_of(const Operand& t, const Rows& rows);

// The operand with copies of its pooled tensors.
Operand off_pool(const Operand& t);

// refuse_pooled() of its tensors.
void refuse_pooled(const Operand& t, const char* op);

// Saves an operand under one name: itself, or data and scales in these directions.
void keep_operand(SaveContext& save, int name, const Operand& t, QuantizeUsage usage, const SavedInfo& what);
Operand kept_operand(const NamedTensors& saved, int name);  // the one under the name; several are its groups
c10::SmallVector<Operand, 1> kept_operands(const NamedTensors& saved, int name);

inline constexpr SavedInfo kScales{"scales", "FP8 data mean nothing without them", "a few bytes for each block"};

}  // namespace te_torch
