// Where a product's weight gradients go when the node does not just return them: to parameters that have a main_grad or
// wait for backward_dw() (main_grad.h), or to a Python callable; under torch.compile to main_grads that the forward was
// given. The arithmetic is wgrad_task.h's.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "wgrad/wgrad_task.h"

namespace te_torch {

class GradAccumulator {
 public:
  virtual ~GradAccumulator() = default;

  // In a backward, without the GIL. Returns what autograd gets.
  virtual WeightGrads take(std::shared_ptr<const WgradTask> product, bool with_bias) const = 0;
  // Whether take() computes the product, and does not leave it to a later call.
  virtual bool computes_now() const { return false; }
};

using GradAccumulatorPtr =
    std::shared_ptr<GradAccumulator>;  // Python's: none for None, or a callable (grad_accumulator.cpp)

void register_grad_accumulators(pybind11::module_& m);

// What accumulate() returns, as autograd takes it: the parts of one matrix's bias are one.
c10::SmallVector<Tensor, 1> sums_of_matrices(const WgradTask& product, const std::vector<Tensor>& sums);

// Adds to the targets' tensors, which are arguments of the traced call: what parameters say was read by the forward.
GradAccumulatorPtr traced_grad_accumulator(std::vector<WeightTarget> targets);

// Python's gradient accumulators live in eager nodes alone: torch.compile and its kin cannot trace what they do.
void refuse_grad_accumulator(bool there, const char* op);

}  // namespace te_torch
