// A reference to a Python object that may be dropped on any thread, with or without the GIL, and after the interpreter.
#pragma once

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

}  // namespace te_torch
