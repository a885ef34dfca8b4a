// The sizes of a gemm problem and of its scales, read off its operands; shared by both paths.
#pragma once

#include "core/tensor.h"
#include "transformer_engine/gemm.h"
#include "transformer_engine/scaling.h"

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

inline bool is_empty(const Sizes& s) { return s.rows == 0 || s.cols == 0 || s.depth == 0; }

inline const char* scaling_name(te_scaling scaling) {
  return is_scaling(int(scaling)) ? scaling_row(scaling).name : "unknown";
}

struct Extent {
  int64_t rows, cols;
};

// The scales of an FP8 operand [outer, depth], as transformer_engine/quantize.h lays them.
inline Extent scales_of(te_scaling scaling, int64_t outer, int64_t depth) {
  const auto [rows, cols] = scale_shape(scaling, outer, depth);
  return {rows, cols};
}

Sizes check_problem(const te_gemm_problem& p);  // throws the argument's error

namespace cpu {
void lend(te_cpu_gemm_hook hook);
void run(const te_gemm_problem& problem, const Sizes& sizes);  // by what was lent, else by the plain loop
void run_by(te_cpu_gemm_hook hook, const te_gemm_problem& problem, const Sizes& sizes);  // NULL: by the plain loop
}  // namespace cpu

namespace cuda {
size_t workspace(const te_gemm_problem& problem, const Sizes& sizes);
bool takes_runs(const te_gemm_problem& problem, const Sizes& sizes);
void splits_of(const te_gemm_problem& problem, bool along_depth, const int64_t* counts, int32_t number,
               uint8_t* splits);
void run(const te_gemm_problem& problem, const Sizes& sizes, void* workspace, size_t bytes, te_stream stream);
te_gemm_key key_of(const te_gemm_problem& problem, const Sizes& sizes);
int32_t candidates(const te_gemm_key& key, int32_t most, te_gemm_choice* choices);
void choose(const te_gemm_key* keys, const te_gemm_choice* choices, int32_t count);
void forget_choices();
void try_choice(const te_gemm_key& key, const te_gemm_choice& choice, const te_gemm_operands& operands, int32_t repeats,
                void* workspace, size_t bytes, te_stream stream);
int64_t library_version();
}  // namespace cuda

}  // namespace te::gemm
