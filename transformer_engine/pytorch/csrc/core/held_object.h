// References to Python objects that may be dropped on any thread, with or without the GIL, and after the interpreter
// has ended; and the passing of Python errors through C++.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace te_torch {

// Requires the GIL.
inline std::shared_ptr<PyObject> held_object(PyObject* object) {
  Py_INCREF(object);
  return {object, [](PyObject* held) {
            if (!Py_IsInitialized()) return;
            const pybind11::gil_scoped_acquire gil;
            Py_DECREF(held);
          }};
}

// Requires the GIL and a set error indicator.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

}  // namespace te_torch
