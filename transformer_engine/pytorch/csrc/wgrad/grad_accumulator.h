// A GradAccumulator receives the weight gradients of a GEMM that the node does not just return.
// - main_grad.h: parameters that have a main_grad, or wait for backward_dw().
// - Here: a Python callable; under torch.compile, main_grads that are arguments of the forward.
// - wgrad_task.h computes.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "wgrad/wgrad_task.h"

namespace te_torch {

class GradAccumulator {
 public:
  virtual ~GradAccumulator() = default;

  // Called in a backward, without the GIL. Returns the gradients for autograd.
  virtual WeightGrads take(std::shared_ptr<const WgradTask> product, bool with_bias) const = 0;
  // Whether take() computes the product instead of leaving it to a later call.
  virtual bool computes_now() const { return false; }
  // Whether it takes the gradients of several weights at once.
  virtual bool takes_groups() const { return true; }

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

// The result of accumulate() in the form of autograd: the parts of one matrix's bias as one tensor.
c10::SmallVector<Tensor, 1> sums_of_matrices(const WgradTask& product, const std::vector<Tensor>& sums);

// Adds to the targets' tensors, which are arguments of the traced call: the forward has read the parameters'
// attributes.
GradAccumulatorPtr traced_grad_accumulator(std::vector<WeightTarget> targets);

// Refuses a gradient accumulator of Python, which torch.compile and the like cannot trace.
void refuse_grad_accumulator(bool has_accumulator, const char* op);

}  // namespace te_torch
