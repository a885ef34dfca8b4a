// Kernel wrappers of gemm_fp8 that other bindings call: products of FP8 matrices of any shape. LibTorch, on the CPU,
// multiplies widened operands.
#pragma once

#include <transformer_engine/gemm.h>

#include "core/common.h"
#include "quantize/quantize.h"

namespace te_torch {

// An operand as a schema carries it: uint8 data [outer, depth], its scales, and 2 * te_scaling + e5m2. The data start a
// row on 16 bytes and hold zeros there beyond their columns, as empty_quantized makes them; others are copied to such.
inline int64_t fp8_code(te_scaling scaling, bool e5m2) { return 2 * int64_t(scaling) + (e5m2 ? 1 : 0); }

// d [b's outer, a's outer] = b a^T (+ bias of its columns), in out_dtype: float32, float16 or bfloat16. Usage:
//   fprop: weight rowwise, x rowwise; dgrad: weight columnwise, dy rowwise; wgrad: x columnwise, dy columnwise.
// fast: sums stay in the tensor cores (TENSOR alone). Refused: E5M2 with E5M2, BLOCK_2D with BLOCK_2D, TENSOR with
// blocks, fast with blocks.
Tensor gemm_fp8_op(const Tensor& a, const Tensor& a_scale_inv, int64_t a_code, const Tensor& b,
                   const Tensor& b_scale_inv, int64_t b_code, at::ScalarType out_dtype, const OptionalTensor& bias,
                   bool fast);

// out += that product, or out = with overwrite, in out's dtype (float32, float16 or bfloat16).
void gemm_fp8_accumulate_op(const Tensor& a, const Tensor& a_scale_inv, int64_t a_code, const Tensor& b,
                            const Tensor& b_scale_inv, int64_t b_code, Tensor& out, bool overwrite, bool fast);

// One direction of a Quantized, which must be there.
struct Fp8Operand {
  const Tensor& data;
  const Tensor& scale_inv;
  int64_t code;

  Fp8Operand(const Quantized& q, bool columnwise, const char* argument)
      : data(columnwise ? q.columnwise : q.rowwise),
        scale_inv(columnwise ? q.columnwise_scale_inv : q.rowwise_scale_inv),
        code(fp8_code(q.scaling, q.e5m2)) {
    TORCH_CHECK_VALUE(data.defined() && scale_inv.defined(), "gemm_fp8: argument '", argument, "' has no ",
                      columnwise ? "columnwise" : "rowwise", " data, which this product reads; quantize it that way.");
  }
};

template <class Mode = Direct>
Tensor gemm_fp8(const Quantized& a, bool a_columnwise, const Quantized& b, bool b_columnwise, at::ScalarType out_dtype,
                const OptionalTensor& bias, bool fast) {
  const Fp8Operand left(a, a_columnwise, "a"), right(b, b_columnwise, "b");
  return Mode::template call<gemm_fp8_op>("te::gemm_fp8", left.data, left.scale_inv, left.code, right.data,
                                          right.scale_inv, right.code, out_dtype, bias, fast);
}

// The same into d, [b's outer, a's outer], contiguous; the bits are those of a fresh one.
void gemm_fp8_into(const Quantized& a, bool a_columnwise, const Quantized& b, bool b_columnwise, const Tensor& d,
                   const OptionalTensor& bias, bool fast);

// The tile of an algorithm that gives chunks of the `rows` rows, in multiples of 16, the bits of the GEMM over all rows
// (RunsOf); none if cuBLASLt has none.
std::optional<te_gemm_tile> fp8_runs_match_full(const Quantized& a, bool a_columnwise, const Quantized& b,
                                                at::ScalarType out_dtype, const OptionalTensor& bias, bool fast,
                                                int64_t rows);

template <class Mode = Direct>
void gemm_fp8_accumulate(const Quantized& a, bool a_columnwise, const Quantized& b, bool b_columnwise, Tensor& out,
                         bool overwrite, bool fast) {
  const Fp8Operand left(a, a_columnwise, "a"), right(b, b_columnwise, "b");
  Mode::template call<gemm_fp8_accumulate_op>("te::gemm_fp8_accumulate", left.data, left.scale_inv, left.code,
                                              right.data, right.scale_inv, right.code, out, overwrite, fast);
}

}  // namespace te_torch
