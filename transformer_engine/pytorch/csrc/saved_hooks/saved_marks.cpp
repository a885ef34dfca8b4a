// The mark of tensors whose memory must not be moved: an attribute that any code may set. It is looked up when the
// tensor is saved.
#include <torch/csrc/utils/pybind.h>

#include "saved_hooks/saved_tensor_hooks.h"

namespace te_torch {

namespace py = pybind11;

namespace {

Storages<bool>& marked_storages() {
  static auto* const known = new Storages<bool>();
  return *known;
}

bool carries_mark(PyObject* object) {
  const py::object mark = attribute_or_none(object, python_hooks().mark.ptr());
  return !mark.is_none() && truth_of(PyObject_IsTrue(mark.ptr()));
}

}  // namespace

bool is_marked(PyObject* object) {
  if (carries_mark(object)) return true;
  if (is_plain(object)) {
    const Tensor& t = THPVariable_Unpack(object);
    return t.is_view() && carries_mark(base_of(t).ptr());
  }
  static const auto* const name = new py::str("_base");
  const py::object base = attribute_or_none(object, name->ptr());
  return !base.is_none() && carries_mark(base.ptr());
}

void keep_storage(const c10::Storage& storage) { marked_storages().at(storage) = true; }

bool is_kept_storage(const c10::StorageImpl* key) { return marked_storages().find(key) != nullptr; }

void register_saved_marks(py::module_& m) {
  m.def("is_marked", [](const py::object& object) { return is_marked(object.ptr()); });
  m.def("keep_storages", [](const std::vector<Tensor>& tensors) {
    for (const Tensor& t : tensors) {
      if (has_storage(t)) keep_storage(t.storage());
    }
  });
  m.def("has_storage", [](const Tensor& t) { return has_storage(t); });
}

}  // namespace te_torch
