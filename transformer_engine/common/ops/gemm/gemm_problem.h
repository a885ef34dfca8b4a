// The sizes of a gemm problem and of its scales, and the functions of the two paths.
#pragma once

#include "core/tensor.h"
#include "transformer_engine/gemm.h"
#include "transformer_engine/scaling.h"

namespace te::gemm {

struct GemmShape {
  int64_t m;  // rows of d
  int64_t n;  // columns of d
  int64_t k;  // the reduced dimension
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

inline GemmShape gemm_shape(const te_gemm_problem& p) {
  layout_name(p.layout);  // refuses an unknown one
  if (p.layout == TE_GEMM_TN) return {p.b.rows, p.a.rows, p.a.cols};
  if (p.layout == TE_GEMM_NN) return {p.b.rows, p.a.cols, p.a.rows};
  return {p.b.cols, p.a.cols, p.a.rows};
}

inline bool is_empty(const GemmShape& s) { return s.m == 0 || s.n == 0 || s.k == 0; }

inline const char* scaling_name(te_scaling scaling) {
  return is_scaling(int(scaling)) ? scaling_row(scaling).name : "unknown";
}

struct ScaleShape {
  int64_t rows, columns;
};

// The scales of an FP8 operand [outer, k], in the layout of transformer_engine/quantize.h.
inline ScaleShape scales_of(te_scaling scaling, int64_t outer, int64_t k) {
  const auto [rows, columns] = scale_shape(scaling, outer, k);
  return {rows, columns};
}

GemmShape check_problem(const te_gemm_problem& p);  // throws for a bad argument

namespace cpu {
void install(te_cpu_gemm_hook hook);
void run(const te_gemm_problem& problem, const GemmShape& shape);  // by the installed product, else by the plain loop
void run_by(te_cpu_gemm_hook hook, const te_gemm_problem& problem, const GemmShape& shape);  // NULL: by the plain loop
}  // namespace cpu

namespace cuda {
size_t workspace(const te_gemm_problem& problem, const GemmShape& shape);
bool takes_runs(const te_gemm_problem& problem, const GemmShape& shape, te_gemm_tile& tile);
void splits_of(const te_gemm_problem& problem, bool along_k, const int64_t* counts, int32_t number, uint8_t* splits);
void run(const te_gemm_problem& problem, const GemmShape& shape, void* workspace, size_t bytes, te_stream stream);
te_gemm_key key_of(const te_gemm_problem& problem, const GemmShape& shape);
int32_t candidates(const te_gemm_key& key, int32_t most, te_gemm_choice* choices);
void choose(const te_gemm_key* keys, const te_gemm_choice* choices, int32_t count);
void forget_choices();
void try_choice(const te_gemm_key& key, const te_gemm_choice& choice, const te_gemm_operands& operands, int32_t repeats,
                void* workspace, size_t bytes, te_stream stream);
int64_t library_version();
}  // namespace cuda

}  // namespace te::gemm
