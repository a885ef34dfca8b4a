// What the bindings of grouped products share: checks that name an argument, operands as te_grouped_gemm reads them.
// Plain products are in gemm/grouped_gemm.cpp, those of FP8 operands in gemm/grouped_gemm_fp8.cpp.
#pragma once

#include <transformer_engine/grouped_gemm.h>

#include <string>
#include <vector>

#include "core/common.h"

namespace te_torch::grouped {

inline constexpr const char* kOp = "grouped_linear";

// Offsets of `groups` groups of rows on rows' device.
void check_offsets(const Tensor& offsets, const Tensor& rows, size_t groups);
// How many groups offsets are of; named where they are of none.
size_t groups_of(const Tensor& offsets);
// Where weight gradients [n, k] go: one of `outs` for each of `how` that is not negative; of float32 or rows' dtype, of
// FP8 rows any float.
void check_targets(const Tensor& rows, const c10::SymInt& n, const c10::SymInt& k, at::TensorList outs,
                   at::ArrayRef<int64_t> how, size_t groups);

// Tensors for the length of one call, those that a kernel cannot read (addresses and pitches of 16 bytes) as copies.
// What somebody else holds, which may be hundreds, is not held twice.
class Operands {
 public:
  te_tensor add(const Tensor& t, const char* argument);
  te_tensor add_bytes(const Tensor& t, te_dtype dtype, const char* argument);  // an FP8 matrix
  std::vector<te_tensor> add_biases(at::TensorList biases);
  // Behind the launch, which says what it is; of copies, over that.
  void note() const;

 private:
  const Tensor& ready(const Tensor& t, const char* argument);

  std::vector<Tensor> held_;
  size_t copied_ = 0;
  std::string names_;  // of the arguments that were copied
};

// One for each group, absent where a result is undefined: that group's is not wanted.
std::vector<te_tensor> views_of_results(const std::vector<Tensor>& results);

void launch(const te_grouped_gemm_problem& problem, const Operands& operands, const Tensor& like);

// The weight gradients of a call that adds to, or writes over, its `outs`.
struct Targets {
  std::vector<Tensor> results;  // one for each group; undefined ones are not wanted
  std::vector<uint8_t> accumulate;

  Targets(at::TensorList outs, at::ArrayRef<int64_t> how);
};
// Of what one launch would write at once.
void check_apart(at::TensorList outs);

}  // namespace te_torch::grouped
