// gemm, FP8: checks of FP8 operands, and how the plain CPU loop reads them.
#pragma once

#include "core/fp8.h"
#include "ops/gemm/gemm_problem.h"

namespace te::gemm {

template <class... Parts>
[[noreturn]] void not_for_fp8(const Parts&... parts) {
  throw Error(TE_NOT_IMPLEMENTED, concat("te_gemm: FP8 operands ", parts...));
}

inline void check_aligned(const char* argument, const te_tensor& t) {
  const int64_t pitch = t.row_pitch * int64_t(te_dtype_bytes(t.dtype));
  if (pitch % 16 != 0) {
    bad_argument("te_gemm", argument, concat("of row pitch ", pitch, " bytes"), "a multiple of 16 with FP8 operands");
  }
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) {
    bad_argument("te_gemm", argument, "at an address that is not a multiple of 16",
                 "a multiple of 16 with FP8 operands");
  }
}

inline void check_scales(const char* argument, const te_tensor& scales, te_scaling scaling, int64_t outer, int64_t k,
                         const te_tensor& like) {
  const char* op = "te_gemm";
  const ScaleShape e = scales_of(scaling, outer, k);
  const bool pair = scaling == TE_SCALING_TENSOR && scales.cols == 2;  // scale_inv and scale
  check_shape(op, argument, scales, e.rows, pair ? 2 : e.columns);
  if (scales.dtype != TE_FLOAT32) {
    bad_argument(op, argument, concat("of dtype ", te_dtype_name(scales.dtype)), "float32");
  }
  if (scales.device != like.device) bad_argument(op, argument, concat("on ", device_of(scales)), device_of(like));
  if (scales.row_pitch != scales.cols) {
    bad_argument(op, argument, concat("of row pitch ", scales.row_pitch), concat(scales.cols, ", its columns"));
  }
  if (reinterpret_cast<uintptr_t>(scales.data) % 16 != 0) {  // cuBLASLt 13 on an H200 fails otherwise
    bad_argument(op, argument, "at an address that is not a multiple of 16", "a multiple of 16");
  }
}

// Sizes and epilogue arguments are checked as for other operands.
inline void check_fp8(const te_gemm_problem& p, const GemmShape& s) {
  const char* op = "te_gemm";
  dispatch_fp8(p.a.dtype, op, "a", [](auto) {});
  dispatch_fp8(p.b.dtype, op, "b", [](auto) {});
  if (p.a.device != p.b.device) bad_argument(op, "b", concat("on ", device_of(p.b)), device_of(p.a));
  if (p.layout != TE_GEMM_TN) {
    not_for_fp8("in layout ", layout_name(p.layout), ": use layout TN with the columnwise data.");
  }
  if (p.a.dtype == TE_FLOAT8_E5M2 && p.b.dtype == TE_FLOAT8_E5M2) {
    not_for_fp8("are both float8_e5m2: at most one of them may be, quantize the other to float8_e4m3.");
  }
  for (const auto& [name, scaling] : {std::pair("a_scaling", p.a_scaling), std::pair("b_scaling", p.b_scaling)}) {
    if (!is_scaling(int(scaling))) {
      bad_argument(op, name, int(scaling), "a te_scaling");
    }
  }
  if ((p.a_scaling == TE_SCALING_TENSOR) != (p.b_scaling == TE_SCALING_TENSOR) ||
      (p.a_scaling == TE_SCALING_BLOCK_2D && p.b_scaling == TE_SCALING_BLOCK_2D)) {
    not_for_fp8("of scalings ", scaling_name(p.a_scaling), " and ", scaling_name(p.b_scaling),
                ": TENSOR goes with TENSOR, BLOCK_1D with BLOCK_1D or BLOCK_2D.");
  }
  if (p.fast_accumulation && p.a_scaling != TE_SCALING_TENSOR) {
    not_for_fp8("of scaling ", scaling_name(p.a_scaling), " with fast_accumulation: it needs scaling TENSOR.");
  }
  if (p.epilogue != TE_GEMM_NONE && p.epilogue != TE_GEMM_BIAS) {
    not_for_fp8("with epilogue ", int(p.epilogue), ": use none or BIAS.");
  }
  if (s.n % 16 != 0 || s.k % 16 != 0) {
    bad_argument(op, "a", concat("FP8 ", shape_of(p.a)), "sizes that are multiples of 16: pad it with zeros");
  }
  if (p.b_scaling == TE_SCALING_BLOCK_1D && s.m % 4 != 0) {
    bad_argument(op, "b", concat("FP8 ", shape_of(p.b), " of scaling BLOCK_1D"), "rows that are a multiple of 4");
  }
  check_aligned("a", p.a);
  check_aligned("b", p.b);
  check_aligned("d", p.d);
  check_scales("a_scale_inv", p.a_scale_inv, p.a_scaling, s.n, s.k, p.a);
  check_scales("b_scale_inv", p.b_scale_inv, p.b_scaling, s.m, s.k, p.b);
  dispatch_float(p.d.dtype, op, "d", [](auto) {});
}

inline void check_fp8_bias(const te_gemm_problem& p) {
  if (p.bias.dtype == (p.d.dtype == TE_FLOAT16 ? TE_FLOAT16 : TE_BFLOAT16)) return;
  bad_argument(
      "te_gemm", "bias", concat("of dtype ", te_dtype_name(p.bias.dtype)),
      p.d.dtype == TE_FLOAT16 ? "float16 beside FP8 operands and a float16 d" : "bfloat16 beside FP8 operands");
}

// Without FP8 operands these arguments would be ignored without an error.
inline void refuse_fp8_arguments(const te_gemm_problem& p) {
  for (const auto& [name, t] : {std::pair("a_scale_inv", p.a_scale_inv), std::pair("b_scale_inv", p.b_scale_inv)}) {
    if (t.data != nullptr) bad_argument("te_gemm", name, shape_of(t), "none without FP8 tensors");
  }
  if (p.fast_accumulation) bad_argument("te_gemm", "fast_accumulation", 1, "0 without FP8 operands");
}

namespace cpu {

// data * scale_inv of one element.
inline float load_fp8(const te_tensor& t, const te_tensor& scales, te_scaling scaling, int64_t row, int64_t col) {
  float value = 0.f;
  dispatch_fp8(t.dtype, "te_gemm", "a", [&](auto type) { value = to_float(row_ptr<decltype(type)>(t, row)[col]); });
  const auto [i, j] = scale_at(scaling, row, col);
  return value * row_ptr<const float>(scales, i)[j];
}

}  // namespace cpu

}  // namespace te::gemm
