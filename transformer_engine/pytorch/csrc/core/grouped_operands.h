// Shared by the bindings of grouped GEMMs (gemm/grouped_gemm.cpp, gemm/grouped_gemm_fp8.cpp): checks of arguments, and
// operands for te_grouped_gemm.
#pragma once

#include <transformer_engine/grouped_gemm.h>

#include <string>
#include <vector>

#include "core/common.h"

namespace te_torch::grouped {

inline constexpr const char* kOp = "grouped_linear";

// The weights of groups are a matrix for each, or one contiguous tensor [groups, N, K] that stands for its matrices.
inline bool is_stacked(at::TensorList weights) { return weights.size() == 1 && weights[0].dim() == 3; }
inline size_t weights_in(at::TensorList weights) {
  return is_stacked(weights) ? size_t(weights[0].sym_size(0).guard_int(__FILE__, __LINE__)) : weights.size();
}
// Raises ValueError for stacked weights without a matrix, or whose matrices are not one after the other in memory.
void check_stacked(const char* op, const char* argument, const Tensor& stacked);

// Checks the offsets of `groups` groups, on the device of rows.
void check_offsets(const Tensor& offsets, const Tensor& rows, size_t groups);
// The number of groups of the offsets, at least one.
size_t groups_of(const Tensor& offsets);
// Checks the outputs of weight gradients [n, k]: one of `outs` for each mode that is not negative, of float32 or the
// dtype of rows; for FP8 rows of any float dtype. modes: the op's argument `how`, 0 (+=), 1 (=) or -1 (none).
void check_targets(const Tensor& rows, const c10::SymInt& n, const c10::SymInt& k, at::TensorList outs,
                   at::ArrayRef<int64_t> modes, size_t groups);

// The tensors of one call. Those that a kernel cannot read (addresses and pitches of 16 bytes) are copied. Holds the
// copies alone, as the caller holds the others.
class Operands {
 public:
  te_tensor add(const Tensor& t, const char* argument);
  te_tensor add_bytes(const Tensor& t, te_dtype dtype, const char* argument);  // an FP8 matrix
  std::vector<te_tensor> add_biases(at::TensorList biases);
  // Called after the launch: notes the copies for a kernel, for te.explain in place of the launch's own note.
  void note() const;

 private:
  const Tensor& ready(const Tensor& t, const char* argument);

  std::vector<Tensor> held_;
  size_t copied_ = 0;
  std::string names_;  // of the arguments that were copied
};

// One for each group, absent() where the result is undefined and not needed; of a stacked result [groups, N, K], all.
std::vector<te_tensor> views_of_results(const std::vector<Tensor>& results);
std::vector<te_tensor> views_of_stacked(const Tensor& stacked);

// The weight gradients of a call that adds to or overwrites its `outs`.
struct Targets {
  std::vector<Tensor> results;  // one for each group, undefined where not needed
  std::vector<uint8_t> accumulate;

  Targets(at::TensorList outs, at::ArrayRef<int64_t> modes);
};
// Raises NotImplementedError where two groups of one launch would write to the same memory.
void check_apart(at::TensorList outs);

}  // namespace te_torch::grouped
