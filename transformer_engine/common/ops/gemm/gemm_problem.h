// The sizes of a gemm problem, read off its operands; shared by both paths.
#pragma once

#include "core/tensor.h"
#include "transformer_engine/gemm.h"

namespace te::gemm {

struct Sizes {
  int64_t rows;   // of d
  int64_t cols;   // of d
  int64_t depth;  // the reduced dimension
};

inline const char* layout_name(te_gemm_layout layout) {
  switch (layout) {
    case TE_GEMM_TN:
      return "TN";
    case TE_GEMM_NN:
      return "NN";
    case TE_GEMM_NT:
      return "NT";
  }
  bad_argument("te_gemm", "layout", int(layout), "TE_GEMM_TN, TE_GEMM_NN or TE_GEMM_NT");
}

inline Sizes sizes_of(const te_gemm_problem& p) {
  layout_name(p.layout);  // refuses an unknown one
  if (p.layout == TE_GEMM_TN) return {p.b.rows, p.a.rows, p.a.cols};
  if (p.layout == TE_GEMM_NN) return {p.b.rows, p.a.cols, p.a.rows};
  return {p.b.cols, p.a.cols, p.a.rows};
}

}  // namespace te::gemm
