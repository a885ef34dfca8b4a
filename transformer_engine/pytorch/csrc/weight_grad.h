// Where a product's weight gradients go when the node does not just return them: to parameters that have a main_grad or
// wait for backward_dw() (main_grad.h), or to a Python callable. Eager only; the arithmetic is weight_product.h's.
#pragma once

#include <Python.h>

#include <memory>

#include "weight_product.h"

namespace te_torch {

class WeightGradSink {
 public:
  virtual ~WeightGradSink() = default;

  // In a backward, without the GIL. Returns what autograd gets.
  virtual WeightGrads take(std::shared_ptr<const WeightProduct> product, bool with_bias) const = 0;

  std::tuple<Tensor, Tensor> operator()(MatrixProduct product, bool with_bias) const {
    WeightGrads grads = take(std::make_shared<const MatrixProduct>(std::move(product)), with_bias);
    return {std::move(grads.weights.at(0)), std::move(grads.biases.at(0))};
  }
};

using Sink = std::shared_ptr<const WeightGradSink>;

// None for None; a sink of main_grad.h, or callable(product, with_bias) -> (dweight or None, dbias or None), which is
// called under the GIL. Takes the GIL itself.
Sink sink_of(PyObject* sink);

// Sinks live in eager nodes alone: torch.compile and its kin cannot trace what they do.
void refuse_sink(bool there, const char* op);

}  // namespace te_torch
