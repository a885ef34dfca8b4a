// Reads an optional attribute of a Python object without creating an AttributeError, which would cost more than the
// read. Requires the GIL.
#pragma once

#include <Python.h>

namespace te_torch {

// found: a new reference, or null without such an attribute. Returns false where a property raised; the error is set.
inline bool optional_attribute(PyObject* object, PyObject* name, PyObject** found) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyObject_GetOptionalAttr(object, name, found) >= 0;
#else
  return _PyObject_LookupAttr(object, name, found) >= 0;
#endif
}

}  // namespace te_torch
