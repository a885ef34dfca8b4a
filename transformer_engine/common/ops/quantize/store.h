// The fused-store header of quantize for the CPU paths and the contracts of other ops: a fused producer checks its plan
// here, rounds its values to their own dtype, and quantizes them. So fused and unfused bytes are the same.
#pragma once

#include <vector>

#include "core/tensor.h"
#include "transformer_engine/transformer_engine.h"

struct te_quantized;
struct te_quantize_plan;

namespace te::quantize {

// The contract of transformer_engine/quantize.h for a [rows, cols] matrix of like's dtype on like's device. `argument`
// names the te_quantized in messages ("out").
void check_quantization(const char* op, const te_quantize_plan& plan, int64_t rows, int64_t cols, const te_tensor& like,
                        const te_quantized& out, const char* argument);

// FP8 data whose rows start on multiples of 16 bytes, if present.
void check_starts(const char* op, const char* argument, const te_tensor& data);

void check_amax_parts(const char* op, const te_tensor& parts, const te_tensor& noop, const te_tensor& like);

namespace cpu {

void quantize(const te_quantize_plan& plan, const te_tensor& x, const te_quantized& out);
void amax(const te_tensor& x, const te_tensor& parts, const te_tensor& noop);

// Memory for a producer's values during a call: a [rows, cols] matrix of like's dtype.
class Scratch {
 public:
  Scratch(int64_t rows, int64_t cols, const te_tensor& like)
      : bytes_(size_t(rows * cols) * te_dtype_bytes(like.dtype)), tensor_{bytes_.data(), rows,       cols,
                                                                          cols,          like.dtype, TE_DEVICE_CPU} {}
  const te_tensor& tensor() const { return tensor_; }

 private:
  std::vector<char> bytes_;
  te_tensor tensor_;
};

}  // namespace cpu

}  // namespace te::quantize
