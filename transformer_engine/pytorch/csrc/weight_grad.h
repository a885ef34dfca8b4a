// Where a product's weight gradient goes when the node does not just return it: to a Python callable that accumulates
// it into main_grad or stores it for backward_dw(). Eager only; the arithmetic stays in weight_product.h and the gemm
// room.
#pragma once

#include <Python.h>

#include <memory>

#include "weight_product.h"

namespace te_torch {

class WeightGradSink {
 public:
  explicit WeightGradSink(PyObject* callable);  // a new reference; the GIL is held
  ~WeightGradSink();
  WeightGradSink(const WeightGradSink&) = delete;
  WeightGradSink& operator=(const WeightGradSink&) = delete;

  // callable(product, with_bias) -> (dweight or None, dbias or None), under the GIL.
  std::tuple<Tensor, Tensor> operator()(WeightProduct product, bool with_bias) const;

 private:
  PyObject* callable_;
};

using Sink = std::shared_ptr<const WeightGradSink>;

Sink sink_of(PyObject* callable);  // none for None; takes the GIL itself

// Sinks live in eager nodes alone: torch.compile and its kin cannot trace what they do.
void refuse_sink(bool there, const char* op);

}  // namespace te_torch
