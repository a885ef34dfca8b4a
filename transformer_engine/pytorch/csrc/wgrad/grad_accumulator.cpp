// See grad_accumulator.h. backward() raises the Python exceptions of a callable unchanged.
#include "wgrad/grad_accumulator.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>

#include "core/held_object.h"

namespace te_torch {

namespace {

Tensor tensor_or_none(PyObject* object) {
  if (object == Py_None) return Tensor();
  TORCH_CHECK(THPVariable_Check(object), "weight gradient: the gradient accumulator returned a ",
              Py_TYPE(object)->tp_name, ", wanted a Tensor or None.");
  return THPVariable_Unpack(object);
}

class CallableAccumulator : public GradAccumulator {
 public:
  explicit CallableAccumulator(PyObject* callable) : callable_(held_object(callable)) {}

  WeightGrads take(std::shared_ptr<const WgradTask> product, bool with_bias) const override {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object handle = handle_of(std::move(product));
    const THPObjectPtr result(
        PyObject_CallFunctionObjArgs(callable_.get(), handle.ptr(), with_bias ? Py_True : Py_False, nullptr));
    if (!result) throw_python_error();
    TORCH_CHECK(PyTuple_Check(result.get()) && PyTuple_GET_SIZE(result.get()) == 2,
                "weight gradient: the gradient accumulator returned a ", Py_TYPE(result.get())->tp_name,
                ", wanted a pair.");
    return {{tensor_or_none(PyTuple_GET_ITEM(result.get(), 0))}, {tensor_or_none(PyTuple_GET_ITEM(result.get(), 1))}};
  }
  bool takes_groups() const override { return false; }  // it returns one pair of tensors

 private:
  std::shared_ptr<PyObject> callable_;
};

class TracedAccumulator : public GradAccumulator {
 public:
  explicit TracedAccumulator(std::vector<WeightTarget> targets) : targets_(std::move(targets)) {}

  WeightGrads take(std::shared_ptr<const WgradTask> product, bool with_bias) const override {
    const std::vector<Tensor> sums = accumulate_any(*product, targets_, with_bias);
    return {{Tensor()}, sums_of_matrices(*product, sums)};
  }

 private:
  std::vector<WeightTarget> targets_;
};

}  // namespace

c10::SmallVector<Tensor, 1> sums_of_matrices(const WgradTask& product, const std::vector<Tensor>& sums) {
  if (sums.empty()) return {Tensor()};
  if (product.matrices() > 1) return {sums.begin(), sums.end()};
  return {sums.size() == 1 ? sums[0] : at::cat(sums)};
}

GradAccumulatorPtr traced_grad_accumulator(std::vector<WeightTarget> targets) {
  return std::make_shared<TracedAccumulator>(std::move(targets));
}

pybind11::object handle_of(std::shared_ptr<const WgradTask> product) {
  return pybind11::cast(std::const_pointer_cast<WgradTask>(std::move(product)));  // whose Python methods are const
}

namespace {

// Changed under the GIL; the count is for threads without it.
std::vector<PyObject*> ready_callbacks;
std::atomic<size_t> ready_callback_count{0};

}  // namespace

void GradAccumulator::ready(const Tensor& parameter, te_stream stream) {
  if (ready_callback_count.load() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  const THPObjectPtr object(THPVariable_Wrap(parameter)), number(PyLong_FromVoidPtr(stream));
  if (!object || !number) throw_python_error();
  std::vector<pybind11::object> callbacks;  // a callback may remove itself
  for (PyObject* callback : ready_callbacks)
    callbacks.push_back(pybind11::reinterpret_borrow<pybind11::object>(callback));
  for (const pybind11::object& callback : callbacks) {
    const THPObjectPtr result(PyObject_CallFunctionObjArgs(callback.ptr(), object.get(), number.get(), nullptr));
    if (!result) throw_python_error();
  }
}

void GradAccumulator::add_ready_callback(PyObject* callback) {
  ready_callbacks.push_back(Py_NewRef(callback));
  ready_callback_count.store(ready_callbacks.size());
}

void GradAccumulator::remove_ready_callback(PyObject* callback) {
  const auto equal = [&](PyObject* registered) {
    const int same = PyObject_RichCompareBool(registered, callback, Py_EQ);  // bound methods are new objects each time
    if (same < 0) throw_python_error();
    return same == 1;
  };
  const auto found = std::find_if(ready_callbacks.begin(), ready_callbacks.end(), equal);
  if (found == ready_callbacks.end()) return;
  PyObject* removed = *found;
  ready_callbacks.erase(found);
  ready_callback_count.store(ready_callbacks.size());
  Py_DECREF(removed);
}

// A callable(product, with_bias) -> (dweight or None, dbias or None) is a GradAccumulator too, called under the GIL.
void register_grad_accumulators(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<GradAccumulator, std::shared_ptr<GradAccumulator>>(m, "GradAccumulator")
      .def(py::init([](const py::function& callable) -> std::shared_ptr<GradAccumulator> {
        return std::make_shared<CallableAccumulator>(callable.ptr());
      }));
  py::implicitly_convertible<py::function, GradAccumulator>();
  m.def("add_ready_callback", torch::wrap_pybind_function([](const py::object& callback) {
          TORCH_CHECK_TYPE(PyCallable_Check(callback.ptr()) != 0, "add_ready_callback: argument 'callback' is a ",
                           Py_TYPE(callback.ptr())->tp_name, ", wanted a callable(parameter, stream).");
          GradAccumulator::add_ready_callback(callback.ptr());
        }),
        py::arg("callback"));
  m.def("remove_ready_callback", torch::wrap_pybind_function([](const py::object& callback) {
          GradAccumulator::remove_ready_callback(callback.ptr());
        }),
        py::arg("callback"));
}

void refuse_grad_accumulator(bool has_accumulator, const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_accumulator, op,
                              ": fuse_wgrad_accumulation and delay_wgrad_compute work on plain tensors in eager mode, "
                              "not under FakeTensorMode, functorch or with tensor subclasses; build the "
                              "module without them there.");
}

}  // namespace te_torch
