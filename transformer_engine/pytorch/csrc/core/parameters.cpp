// Looks up a module's parameters by name, for modules with hundreds: in Python the look-up would take longer than the
// preparation of their GEMM. Requires the GIL.
#include <torch/csrc/utils/pybind.h>

namespace te_torch {

namespace py = pybind11;

namespace {

// The parameters registered under the names, or None where one is computed or of another class than `type`.
py::object registered_parameters(const py::dict& registered, const py::list& names, const py::type& type) {
  auto found = py::reinterpret_steal<py::list>(PyList_New(PyList_GET_SIZE(names.ptr())));
  if (!found) throw py::error_already_set();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names.ptr()); ++i) {
    PyObject* const one = PyDict_GetItemWithError(registered.ptr(), PyList_GET_ITEM(names.ptr(), i));
    if (one == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (one == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(one)) != type.ptr()) return py::none();
    PyList_SET_ITEM(found.ptr(), i, Py_NewRef(one));
  }
  return found;
}

}  // namespace

void register_parameters(py::module_& m) { m.def("registered_parameters", &registered_parameters); }

}  // namespace te_torch
