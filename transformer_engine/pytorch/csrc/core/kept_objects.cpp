// Compares attributes and memory of many objects with those of an earlier time, by one call: results of checks of these
// objects are valid while they are equal. In Python the comparison would take longer than the checks.
// - Everything is called under the GIL.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "core/common.h"
#include "core/python_attribute.h"

namespace te_torch {

namespace py = pybind11;

namespace {

// The attribute of that name in an object's __dict__, or null. Borrowed.
PyObject* own_attribute(PyObject* dict, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

py::object dict_of(PyObject* object) {
  PyObject* dict = PyObject_GenericGetDict(object, nullptr);
  if (dict == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(dict);
}

const void* address_of(const Tensor& t) { return t.has_storage() ? t.const_data_ptr() : nullptr; }

class KeptObjects {
 public:
  // names: attributes in the object's __dict__, present or missing. memory: tensors whose addresses are compared.
  void add(const py::object& object, const py::list& names, std::vector<Tensor> memory) {
    Entry kept{object, {}, {}};
    const py::object dict = dict_of(object.ptr());
    for (const py::handle& name : names) {
      PyObject* interned = Py_NewRef(name.ptr());
      PyUnicode_InternInPlace(&interned);
      kept.attributes.emplace_back(py::reinterpret_steal<py::object>(interned),
                                   py::reinterpret_borrow<py::object>(own_attribute(dict.ptr(), interned)));
    }
    for (Tensor& t : memory) {
      const void* address = address_of(t);
      kept.memory.emplace_back(std::move(t), address);
    }
    kept_.push_back(std::move(kept));
  }

  // The number of the first object from `first` on that differs, or -1.
  int64_t changed(size_t first) const {
    for (size_t i = first; i < kept_.size(); ++i) {
      if (!kept_[i].holds()) return static_cast<int64_t>(i);
    }
    return -1;
  }

 private:
  struct Entry {
    py::object object;
    std::vector<std::pair<py::object, py::object>> attributes;
    std::vector<std::pair<Tensor, const void*>> memory;

    bool holds() const {
      for (const auto& [tensor, address] : memory) {
        if (address_of(tensor) != address) return false;
      }
      if (attributes.empty()) return true;
      const py::object dict = dict_of(object.ptr());
      for (const auto& [name, value] : attributes) {
        if (own_attribute(dict.ptr(), name.ptr()) != value.ptr()) return false;
      }
      return true;
    }
  };
  std::vector<Entry> kept_;
};

Tensor& tensor_of(PyObject* object) {
  if (!THPVariable_Check(object)) throw py::type_error("wanted a list of tensors.");
  return const_cast<Tensor&>(THPVariable_Unpack(object));
}

// The number of the first parameter that needs no gradient, or -1.
int64_t first_frozen(const py::list& parameters) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters.ptr()); ++i) {
    if (!tensor_of(PyList_GET_ITEM(parameters.ptr(), i)).requires_grad()) return i;
  }
  return -1;
}

// .grad of each becomes none, and the attribute False where there is one.
void drop_grads(const py::list& parameters, const py::str& added) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters.ptr()); ++i) {
    PyObject* const parameter = PyList_GET_ITEM(parameters.ptr(), i);
    const Tensor& tensor = tensor_of(parameter);
    if (tensor.grad().defined()) tensor.mutable_grad().reset();
    PyObject* mark = nullptr;
    if (!optional_attribute(parameter, added.ptr(), &mark)) throw py::error_already_set();
    if (mark == nullptr) continue;
    Py_DECREF(mark);
    if (PyObject_SetAttr(parameter, added.ptr(), Py_False) != 0) throw py::error_already_set();
  }
}

}  // namespace

void register_kept_objects(py::module_& m) {
  py::class_<KeptObjects>(m, "KeptObjects",
                          "Objects whose attributes and memory were looked at once: whether they are the same.")
      .def(py::init<>())
      .def("add", torch::wrap_pybind_function(&KeptObjects::add), py::arg("object"), py::arg("names"),
           py::arg("memory"), "names: attributes in its __dict__. memory: tensors whose addresses stay.")
      .def("changed", torch::wrap_pybind_function(&KeptObjects::changed), py::arg("first") = 0,
           "The number of the first object from `first` on that differs, or -1.");
  m.def("first_frozen", torch::wrap_pybind_function(first_frozen), py::arg("parameters"));
  m.def("drop_grads", torch::wrap_pybind_function(drop_grads), py::arg("parameters"), py::arg("added"));
}

}  // namespace te_torch
