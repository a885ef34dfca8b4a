// The Python side of main_grad.cpp: attributes of parameters by interned names, functions of Python, errors passed on.
// - Everything is called under the GIL.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <string>

#include "core/python_attribute.h"

namespace te_torch::main_grad {

namespace py = pybind11;

inline py::object owned(PyObject* reference) { return py::reinterpret_steal<py::object>(reference); }

// Never freed: a backward may run while the interpreter ends.
struct Names {
  PyObject* main_grad = PyUnicode_InternFromString("main_grad");
  PyObject* get_main_grad = PyUnicode_InternFromString("get_main_grad");
  PyObject* overwrite = PyUnicode_InternFromString("overwrite_main_grad");
  PyObject* added = PyUnicode_InternFromString("grad_added_to_main_grad");
  PyObject* zero_out = PyUnicode_InternFromString("zero_out_wgrad");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
};

inline const Names& names_of_attributes() {
  static const auto* names = new Names;
  return *names;
}

// Functions of Python: they raise errors, and store products for backward_dw(). Never freed.
struct Answers {
  PyObject* check_main_grad;      // (op, name, weight, main_grad), raises where that does not fit
  PyObject* refuse_computed;      // (op, name), raises
  PyObject* is_first_microbatch;  // (op, value) -> bool, raises where it is none
  PyObject* leave;                // (store, parameters, product, with_bias)
};

inline Answers* answers = nullptr;

inline py::object called(PyObject* function, std::initializer_list<PyObject*> arguments) {
  std::array<PyObject*, 4> list{};
  std::copy(arguments.begin(), arguments.end(), list.begin());
  py::object result = owned(PyObject_Vectorcall(function, list.data(), arguments.size(), nullptr));
  if (!result) throw_python_error();
  return result;
}

// None if there is no such attribute; other errors of a property are raised.
inline py::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = nullptr;
  if (!optional_attribute(object, name, &found)) throw_python_error();
  return owned(found);
}

// attribute() for hundreds of parameters. It reads an object's __dict__ alone if their class has none of the names and
// looks attributes up as object does.
class Attributes {
 public:
  void now(PyObject* object) {
    object_ = object;
    if (Py_TYPE(object) != type_) {
      type_ = Py_TYPE(object);
      plain_ = is_plain(type_);
    }
    own_ = plain_ ? owned(PyObject_GenericGetDict(object, nullptr)) : py::object();
    if (plain_ && !own_) throw_python_error();
  }
  py::object get(PyObject* name) const {
    if (!plain_) return attribute(object_, name);
    PyObject* found = PyDict_GetItemWithError(own_.ptr(), name);
    if (found == nullptr && PyErr_Occurred() != nullptr) throw_python_error();
    return py::reinterpret_borrow<py::object>(found);
  }

 private:
  static bool is_plain(PyTypeObject* type) {
    if (type->tp_getattro != PyObject_GenericGetAttr || type->tp_dictoffset == 0) return false;
    const Names& names = names_of_attributes();
    for (PyObject* name : {names.main_grad, names.get_main_grad, names.overwrite, names.added, names.zero_out}) {
      if (attribute(reinterpret_cast<PyObject*>(type), name)) return false;
    }
    return true;
  }

  PyTypeObject* type_ = nullptr;  // of the object before, to be compared alone
  bool plain_ = false;
  PyObject* object_ = nullptr;
  py::object own_;
};

inline bool is_true(PyObject* object) {
  const int truth = object == nullptr ? 0 : PyObject_IsTrue(object);
  if (truth < 0) throw_python_error();
  return truth != 0;
}

inline py::object text(const std::string& s) {
  return owned(PyUnicode_FromStringAndSize(s.data(), static_cast<Py_ssize_t>(s.size())));
}

}  // namespace te_torch::main_grad
