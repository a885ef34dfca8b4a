// Helpers of the checks of grouped products.
#pragma once

#include "core/tensor.h"
#include "transformer_engine/grouped_gemm.h"

namespace te::gemm::grouped {

inline constexpr const char* kOp = "te_grouped_gemm";

inline const char* name_of(te_grouped_product product) {
  return product == TE_GROUPED_FPROP ? "FPROP" : product == TE_GROUPED_DGRAD ? "DGRAD" : "WGRAD";
}

// Whether check_as() would pass; `like` has been checked.
inline bool is_as(const te_tensor& t, int64_t rows, int64_t columns, te_dtype dtype, const te_tensor& like) {
  return t.rows == rows && t.cols == columns && t.row_pitch >= columns && t.dtype == dtype && t.device == like.device &&
         (t.data != nullptr || rows * columns == 0);
}

inline void check_presence(const te_grouped_gemm_problem& p, const char* argument, bool wanted, bool given) {
  if (wanted == given) return;
  bad_argument(kOp, argument, given ? "given" : "NULL",
               concat(given ? "NULL" : "a value", " for ", name_of(p.product)));
}

}  // namespace te::gemm::grouped
