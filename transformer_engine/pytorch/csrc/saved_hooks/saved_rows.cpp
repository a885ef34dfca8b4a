// The live rows of saved tensors: announced by the saving node, or declared for the memory (mark_pageable). No counter
// is read here.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <map>

#include "autograd/trailing_rows.h"
#include "saved_hooks/saved_tensor_hooks.h"

namespace te_torch {

namespace {

namespace py = pybind11;

// rows, bytes: of the declared tensor, so that a view of the same memory with other rows is recognized.
struct Declared {
  int64_t rows = 0;
  size_t bytes = 0;
  LiveRows live;
};

Storages<std::map<int64_t, Declared>>& declared() {  // by offset in bytes
  static auto* const known = new Storages<std::map<int64_t, Declared>>();
  return *known;
}

constexpr const char* kOp = "mark_pageable";

Tensor plain(const py::object& object, const char* name) {
  if (is_plain(object.ptr())) {
    Tensor t = py::cast<Tensor>(object);
    if (has_storage(t)) return t;
  }
  throw py::type_error(c10::str(kOp, ": argument '", name, "' is a ", type_name(object),
                                ", wanted a plain torch.Tensor with memory of its own; declare the parts of a "
                                "quantized tensor one by one."));
}

bool counts(at::ScalarType dtype) {
  return dtype == at::kByte || dtype == at::kChar || dtype == at::kShort || dtype == at::kInt || dtype == at::kLong;
}

[[noreturn]] void refuse(const std::string& text) { throw py::value_error(c10::str(kOp, ": ", text)); }

void declare(const py::object& tensor, const py::object& counter, const py::object& unit) {
  const Tensor t = plain(tensor, "tensor"), c = plain(counter, "counter");
  if (t.dim() != 1 && t.dim() != 2) {
    refuse(
        c10::str("argument 'tensor' has shape ", t.sizes(),
                 ", wanted one or two dimensions, so that its rows are unambiguous; pass tensor.flatten(0, -2), or the "
                 "rows that are counted."));
  }
  if (!t.is_contiguous()) {
    refuse(c10::str("argument 'tensor' ", t.sizes(), " has strides ", t.strides(),
                    ", wanted a contiguous tensor, so that its live rows are the first bytes of its memory; pass "
                    "contiguous()."));
  }
  int beyond = 0;
  int64_t unit_rows = PyLong_CheckExact(unit.ptr()) ? PyLong_AsLongLongAndOverflow(unit.ptr(), &beyond) : 0;
  if (beyond > 0) unit_rows = INT64_MAX;
  if (unit_rows < 1) {
    refuse(c10::str("argument 'unit_rows' is ", std::string(py::repr(unit)).substr(0, 100),
                    ", wanted an int of 1 or more."));
  }
  if (t.size(0) % unit_rows != 0) {
    refuse(c10::str("argument 'tensor' has ", t.size(0), " rows, wanted a multiple of 'unit_rows', ", unit_rows,
                    ": the counter counts units of that many rows."));
  }
  if (!counts(c.scalar_type()) || c.numel() != 1 || c.device() != t.device()) {
    refuse(c10::str("argument 'counter' is ", name_of(c.scalar_type()), " ", c.sizes(), " on ", c.device(),
                    ", wanted one integer on ", t.device(), ", where the tensor is."));
  }
  declared().at(t.storage())[byte_offset(t)] = {t.size(0), t.nbytes(), {detached(c), unit_rows}};
}

}  // namespace

const LiveRows* live_rows(const Tensor& t, bool is_plain) {
  if (trailing_rows(t) == kAllRows) return nullptr;
  if (const LiveRows* announced = AnnouncedRows::of(t)) return announced;
  if (!is_plain || !has_storage(t)) return nullptr;
  const auto* of_storage = declared().find(key_of(t));
  if (of_storage == nullptr) return nullptr;
  const auto found = of_storage->find(byte_offset(t));
  if (found == of_storage->end() || t.dim() == 0 || !t.is_contiguous()) return nullptr;
  const Declared& d = found->second;
  return t.size(0) == d.rows && t.nbytes() == d.bytes ? &d.live : nullptr;
}

void register_saved_rows(py::module_& m) {
  m.def("declare_rows", torch::wrap_pybind_function(declare));
  m.def("live_rows", [](const py::object& object) -> py::object {
    if (!THPVariable_Check(object.ptr())) return py::none();
    const LiveRows* live = live_rows(py::cast<Tensor>(object), is_plain(object.ptr()));
    return live == nullptr ? py::object(py::none()) : py::make_tuple(live->counter, live->unit_rows);
  });
}

}  // namespace te_torch
