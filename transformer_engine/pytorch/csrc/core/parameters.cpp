// Looks up a module's parameters by name, for modules with hundreds: in Python the look-up would take longer than the
// preparation of their GEMM. Requires the GIL.
#include <torch/csrc/utils/pybind.h>

namespace te_torch {

namespace py = pybind11;

namespace {

// The value of a name among the next two entries, or null. Parameters mostly have the order of their names, with at
// most a bias between two, and a look-up takes longer.
PyObject* next_of(const py::dict& registered, Py_ssize_t* next, PyObject* name) {
  PyObject *key = nullptr, *value = nullptr;
  for (int tries = 0; tries < 2 && PyDict_Next(registered.ptr(), next, &key, &value) != 0; ++tries) {
    const bool comparable = PyUnicode_CheckExact(key) && PyUnicode_CheckExact(name);
    if (key == name || (comparable && PyUnicode_Compare(key, name) == 0)) return value;
  }
  return nullptr;
}

// The parameters registered under the names, or None where one is computed or of another class than `type`.
py::object registered_parameters(const py::dict& registered, const py::list& names, const py::type& type) {
  auto found = py::reinterpret_steal<py::list>(PyList_New(PyList_GET_SIZE(names.ptr())));
  if (!found) throw py::error_already_set();
  Py_ssize_t next = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names.ptr()); ++i) {
    PyObject* const name = PyList_GET_ITEM(names.ptr(), i);
    PyObject* one = next_of(registered, &next, name);
    if (one == nullptr) one = PyDict_GetItemWithError(registered.ptr(), name);
    if (one == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (one == nullptr || reinterpret_cast<PyObject*>(Py_TYPE(one)) != type.ptr()) return py::none();
    PyList_SET_ITEM(found.ptr(), i, Py_NewRef(one));
  }
  return found;
}

}  // namespace

void register_parameters(py::module_& m) { m.def("registered_parameters", &registered_parameters); }

}  // namespace te_torch
