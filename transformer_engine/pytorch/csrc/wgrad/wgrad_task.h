// The weight gradient of a linear layer, its third GEMM, as an object: computed now, added to given buffers, or stored
// for later.
#pragma once

#include "gemm/product.h"

namespace te_torch {

// One entry a matrix of the product; undefined where no gradient is wanted.
struct WeightGrads {
  c10::SmallVector<Tensor, 1> weights, biases;
};

// Consecutive rows of a product's weight gradients, and where they go.
struct WeightTarget {
  Tensor out;  // contiguous, of these rows; undefined: not wanted
  int64_t rows = 0;
  bool overwrite = false;  // =, not +=
};

// Weight gradients that are computed now or later.
class TE_EXPORT WgradTask {
 public:
  virtual ~WgradTask() = default;

  virtual WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const = 0;
  // Writes the gradients to targets, which cover all rows of the product in order. Returns the part of the bias's
  // gradient of each target, also without an `out`; empty unless `with_bias`.
  virtual std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const = 0;
  // The plain tensors that it reads: changing these in place changes the gradients.
  virtual std::vector<Tensor> reads() const = 0;
  virtual at::ScalarType dtype() const = 0;
  virtual size_t matrices() const { return 1; }  // whose rows the targets are, or a target each
};

// accumulate() for targets that may have the other 16-bit type than the operands (a main_grad of the weight's dtype,
// under autocast to the other one): the sum is taken in float32 and rounded once.
std::vector<Tensor> accumulate_any(const WgradTask& product, at::ArrayRef<WeightTarget> targets, bool with_bias);

// Of one matrix: dweight[N, K] = dy^T x, dbias[N] = the column sums of dy.
class TE_EXPORT MatrixWgrad : public WgradTask {
 public:
  Operand dy, x;
  Tensor dbias;  // summed already, where dy is FP8 and the bias needs a gradient

  MatrixWgrad(Operand dy_, Operand x_, Tensor dbias_, at::ScalarType dtype, bool split)
      : dy(std::move(dy_)), x(std::move(x_)), dbias(std::move(dbias_)), dtype_(dtype), split_(split) {}

  WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const override;
  // into: memory for the weight's gradient, in the direct dispatch mode alone; undefined: a new tensor.
  WeightGrads compute_at(const DispatchMode& dispatch, bool with_bias, const Tensor& into) const;
  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override;
  std::vector<Tensor> reads() const override;
  at::ScalarType dtype() const override { return dtype_; }

 private:
  // Rows [first, first + rows) of it into out, += or =. Returns these rows' part of the bias's gradient, or nothing.
  Tensor accumulate_rows(const DispatchMode& dispatch, Tensor& out, int64_t first, int64_t rows, bool with_bias,
                         bool overwrite) const;
  Tensor column_sums(const DispatchMode& dispatch, int64_t first, int64_t rows) const;

  at::ScalarType dtype_;
  bool split_;
};

}  // namespace te_torch
