// An attribute of a Python object that need not be there, without the AttributeError that would be made first: that
// costs more than the rest. Under the GIL.
#pragma once

#include <Python.h>

namespace te_torch {

// found: a new reference, or null where there is no such attribute. False: a property raised, and the error is set.
inline bool optional_attribute(PyObject* object, PyObject* name, PyObject** found) {
#if PY_VERSION_HEX >= 0x030D0000
  return PyObject_GetOptionalAttr(object, name, found) >= 0;
#else
  return _PyObject_LookupAttr(object, name, found) >= 0;
#endif
}

}  // namespace te_torch
