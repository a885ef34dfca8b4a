// Helpers of the checks of grouped products, and views of a group's rows.
#pragma once

#include <string>

#include "core/tensor.h"
#include "transformer_engine/grouped_gemm.h"

namespace te::gemm::grouped {

inline constexpr const char* kOp = "te_grouped_gemm";

inline const char* name_of(te_grouped_product product) {
  return product == TE_GROUPED_FPROP ? "FPROP" : product == TE_GROUPED_DGRAD ? "DGRAD" : "WGRAD";
}

// For errors alone: with hundreds of groups, building a name would take longer than the check.
inline std::string member(const char* list, int32_t group) { return concat(list, "[", group, "]"); }

// Whether check_as() would pass; `like` has been checked.
inline bool is_as(const te_tensor& t, int64_t rows, int64_t cols, te_dtype dtype, const te_tensor& like) {
  return t.rows == rows && t.cols == cols && t.row_pitch >= cols && t.dtype == dtype && t.device == like.device &&
         (t.data != nullptr || rows * cols == 0);
}

inline void check_presence(const te_grouped_gemm_problem& p, const char* argument, bool wanted, bool given) {
  if (wanted == given) return;
  bad_argument(kOp, argument, given ? "given" : "NULL",
               concat(given ? "NULL" : "a value", " for ", name_of(p.product)));
}

inline te_tensor rows_of(const te_tensor& t, int64_t first, int64_t last) {
  te_tensor part = t;
  part.rows = last - first;
  if (t.data != nullptr) {
    part.data = static_cast<char*>(t.data) + first * t.row_pitch * int64_t(te_dtype_bytes(t.dtype));
  }
  return part;
}

}  // namespace te::gemm::grouped
