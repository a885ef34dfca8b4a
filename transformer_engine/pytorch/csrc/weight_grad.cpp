// See weight_grad.h. Python exceptions raised by the callable reach whoever called backward() unchanged.
#include "weight_grad.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

namespace te_torch {

namespace {

Tensor tensor_or_none(PyObject* object) {
  if (object == Py_None) return Tensor();
  TORCH_CHECK(THPVariable_Check(object), "weight gradient: the sink returned a ", Py_TYPE(object)->tp_name,
              ", wanted a Tensor or None.");
  return THPVariable_Unpack(object);
}

}  // namespace

WeightGradSink::WeightGradSink(PyObject* callable) : callable_(callable) { Py_INCREF(callable_); }

WeightGradSink::~WeightGradSink() {
  if (!Py_IsInitialized()) return;  // the interpreter is gone, and the object with it
  const pybind11::gil_scoped_acquire gil;
  Py_DECREF(callable_);
}

std::tuple<Tensor, Tensor> WeightGradSink::operator()(WeightProduct product, bool with_bias) const {
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object handle = pybind11::cast(std::make_shared<WeightProduct>(std::move(product)));
  const THPObjectPtr result(
      PyObject_CallFunctionObjArgs(callable_, handle.ptr(), with_bias ? Py_True : Py_False, nullptr));
  if (!result) {
    python_error error;
    error.persist();
    throw error;
  }
  TORCH_CHECK(PyTuple_Check(result.get()) && PyTuple_GET_SIZE(result.get()) == 2,
              "weight gradient: the sink returned a ", Py_TYPE(result.get())->tp_name, ", wanted a pair.");
  return {tensor_or_none(PyTuple_GET_ITEM(result.get(), 0)), tensor_or_none(PyTuple_GET_ITEM(result.get(), 1))};
}

Sink sink_of(PyObject* callable) {
  if (callable == Py_None) return {};
  const pybind11::gil_scoped_acquire gil;
  return std::make_shared<const WeightGradSink>(callable);
}

void refuse_sink(bool there, const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(!there, op,
                              ": fuse_wgrad_accumulation and delay_wgrad_compute work on plain tensors in eager mode, "
                              "not under torch.compile, FakeTensorMode, functorch or with tensor subclasses; build the "
                              "module without them there.");
}

}  // namespace te_torch
