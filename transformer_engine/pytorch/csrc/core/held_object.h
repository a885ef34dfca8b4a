// A reference to a Python object that may be dropped on any thread, with or without the GIL, and after the interpreter;
// and what a call into Python raised, on its way to who called the extension.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace te_torch {

// The GIL is held.
inline std::shared_ptr<PyObject> held_object(PyObject* object) {
  Py_INCREF(object);
  return {object, [](PyObject* held) {
            if (!Py_IsInitialized()) return;
            const pybind11::gil_scoped_acquire gil;
            Py_DECREF(held);
          }};
}

// The GIL is held, and Python's error indicator is set.
[[noreturn]] inline void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

}  // namespace te_torch
