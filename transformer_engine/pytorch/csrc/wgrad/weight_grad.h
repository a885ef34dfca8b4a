// Where a product's weight gradients go when the node does not just return them: to parameters that have a main_grad or
// wait for backward_dw() (main_grad.h), or to a Python callable; under torch.compile to main_grads that the forward was
// given. The arithmetic is weight_product.h's.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "wgrad/weight_product.h"

namespace te_torch {

class WeightGradSink {
 public:
  virtual ~WeightGradSink() = default;

  // In a backward, without the GIL. Returns what autograd gets.
  virtual WeightGrads take(std::shared_ptr<const WeightProduct> product, bool with_bias) const = 0;
  // Whether take() computes the product, and does not leave it to a later call.
  virtual bool computes_now() const { return false; }
};

using Sink = std::shared_ptr<WeightGradSink>;  // Python's: none for None, or a callable (weight_grad.cpp)

void register_sinks(pybind11::module_& m);

// What accumulate() returns, as autograd takes it: the parts of one matrix's bias are one.
c10::SmallVector<Tensor, 1> sums_of_matrices(const WeightProduct& product, const std::vector<Tensor>& sums);

// Adds to the targets' tensors, which are arguments of the traced call: what parameters say was read by the forward.
Sink traced_sink(std::vector<WeightTarget> targets);

// Python's sinks live in eager nodes alone: torch.compile and its kin cannot trace what they do.
void refuse_sink(bool there, const char* op);

}  // namespace te_torch
