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

  // Calls each registered ready callback as callback(parameter, stream): the parameter's gradient was added to its
  // main_grad by work on that stream. Takes the GIL, and only if a callback is registered.
  static void ready(const Tensor& parameter, te_stream stream);
  // The GIL is held. remove_ready_callback() ignores what is not registered.
  static void add_ready_callback(PyObject* callback);
  static void remove_ready_callback(PyObject* callback);
};

using GradAccumulatorPtr =
    std::shared_ptr<GradAccumulator>;  // Python's: none for None, or a callable (grad_accumulator.cpp)

void register_grad_accumulators(pybind11::module_& m);

// A product as an object of Python. The GIL is held.
pybind11::object handle_of(std::shared_ptr<const WgradTask> product);

// What accumulate() returns, as autograd takes it: the parts of one matrix's bias are one.
c10::SmallVector<Tensor, 1> sums_of_matrices(const WgradTask& product, const std::vector<Tensor>& sums);

// Adds to the targets' tensors, which are arguments of the traced call: what parameters say was read by the forward.
GradAccumulatorPtr traced_grad_accumulator(std::vector<WeightTarget> targets);

// Python's gradient accumulators live in eager nodes alone: torch.compile and its kin cannot trace what they do.
void refuse_grad_accumulator(bool there, const char* op);

}  // namespace te_torch
