// See saved_tensor_hooks.h. saved_python.cpp has the Python classes.
#include "saved_hooks/saved_tensor_hooks.h"

#include <ATen/ops/_neg_view.h>
#include <torch/csrc/DynamicTypes.h>

#include <algorithm>

namespace te_torch {

namespace py = pybind11;

namespace {

std::string changed(uint32_t now, uint32_t version) {
  return c10::str("is at version ", now, ", and was saved at version ", version,
                  ": an in-place operation has changed it since. Clone it before that operation");
}

std::string resized(int64_t bytes) {
  return c10::str("had a storage of ", bytes, " bytes, which was resized since. Resize it after the backward");
}

[[noreturn]] void refuse(at::ScalarType dtype, at::IntArrayRef sizes, const std::string& why) {
  throw std::runtime_error(
      c10::str("pop_tensor: one of the tensors needed for the gradient, ", name_of(dtype), " ", sizes, ", ", why, "."));
}

}  // namespace

std::string type_name(py::handle object) { return py::str(py::type::of(object).attr("__name__")); }

std::string name_of(at::ScalarType dtype) {
  return py::str(py::handle(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype))));
}

// ---- PackedStorage ----

PackedStorage::PackedStorage(const Tensor& t)
    : storage_(t.storage()), key_(key_of(t)), bytes_(int64_t(storage_.nbytes())) {}

void PackedStorage::add(const SaveRequest& request) {
  if (!is_resident()) return;
  saved_.push_back(py::reinterpret_steal<py::object>(PyWeakref_NewRef(request.object, nullptr)));
  if (request.tensor.is_inference()) return;
  const auto& version = request.tensor.unsafeGetTensorImpl()->version_counter();
  watched_.emplace_back(version, version.current_version());
}

Tensor PackedStorage::back_as(const Saved& saved) {
  if (is_resident()) check();
  if (!written_.empty()) refuse(saved.dtype, saved.sizes, written_);
  return tensor_over(is_resident() ? storage_ : restore(), saved.dtype, saved.offset, saved.sizes, saved.strides);
}

std::vector<std::pair<uint32_t, uint32_t>> PackedStorage::watched() const {
  std::vector<std::pair<uint32_t, uint32_t>> found;
  for (const auto& [counter, version] : watched_) found.emplace_back(counter.current_version(), version);
  return found;
}

bool PackedStorage::marked() const {
  if (is_kept_storage(key_)) return true;
  for (size_t i = 0; i < saved_.size(); ++i) {    // a property may run code that saves more
    const py::object ref = saved_[i], t = ref();  // None after its end
    if (!t.is_none() && is_marked(t.ptr())) return true;
  }
  return false;
}

void PackedStorage::check() {
  for (const auto& [counter, version] : watched_) {
    if (written_.empty() && counter.current_version() != version)
      written_ = changed(counter.current_version(), version);
  }
  if (written_.empty() && is_resident() && int64_t(storage_.nbytes()) != bytes_) written_ = resized(bytes_);
}

void PackedStorage::let_go() {
  check();
  storage_ = c10::Storage();
  watched_.clear();
  saved_.clear();
}

// ---- packed tensors ----

Saved::Saved(std::shared_ptr<PackedStorage> packed, const Tensor& t)
    : memory(std::move(packed)),
      dtype(t.scalar_type()),
      offset(t.storage_offset()),
      sizes(t.sizes()),
      strides(t.strides()),
      conjugate(t.is_conj()),
      negative(t.is_neg()) {}

Tensor Saved::pop() const {
  Tensor t = memory->back_as(*this);
  if (conjugate) t = t.conj();
  return negative ? at::_neg_view(t) : t;
}

namespace {

// Whether the object is a parameter: of torch's class, or with the attribute _is_param.
bool is_parameter_itself(PyObject* object) {
  if (!is_plain(object)) return truth_of(PyObject_IsInstance(object, ParameterClass));
  static const auto* const name = new py::str("_is_param");
  return truth_of(PyObject_IsTrue(attribute_or_none(object, name->ptr()).ptr()));
}

bool is_parameter(PyObject* object) {
  if (is_parameter_itself(object)) return true;
  if (!THPVariable_Check(object)) {
    return py::hasattr(object, "_base") && is_parameter_itself(py::handle(object).attr("_base").ptr());
  }
  const Tensor& t = THPVariable_Unpack(object);
  return t.is_view() && is_parameter_itself(base_of(t).ptr());
}

// Whether its memory may be taken: it is a plain tensor and no parameter.
bool is_movable(PyObject* object) {
  return is_plain(object) && has_storage(THPVariable_Unpack(object)) && !is_parameter(object);
}

}  // namespace

KeptTensor::KeptTensor(PyObject* object) {
  tensor_ =
      is_plain(object) ? detached(THPVariable_Unpack(object)) : py::cast<Tensor>(py::handle(object).attr("detach")());
  if (!tensor_.is_inference()) version_ = uint32_t(tensor_._version());
  if (is_movable(object)) bytes_ = tensor_.storage().nbytes();
}

const Tensor& KeptTensor::pop() const {
  if (version_.has_value() && uint32_t(tensor_._version()) != *version_) {
    refuse(tensor_.scalar_type(), tensor_.sizes(), changed(uint32_t(tensor_._version()), *version_));
  }
  if (bytes_.has_value() && tensor_.storage().nbytes() != *bytes_) {
    refuse(tensor_.scalar_type(), tensor_.sizes(), resized(int64_t(*bytes_)));
  }
  return tensor_;
}

bool keeps_leaf(const Tensor& leaf) {
  const py::gil_scoped_acquire gil;
  if (!saved_observers().empty()) return false;
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(leaf));
  return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == ParameterClass;
}

// ---- StorageHandler ----

py::object StorageHandler::push(py::handle object, py::handle outward) {
  if (!is_plain(object.ptr())) {
    if (py::hasattr(object, "prepare_for_saving") && !is_parameter(object.ptr())) {
      return python_hooks().composed(py::cast(this), object, outward);
    }
    if (!THPVariable_Check(object.ptr())) {
      throw py::type_error("push_tensor: argument 'tensor' is a " + type_name(object) + ", wanted a torch.Tensor.");
    }
  }
  std::shared_ptr<PackedStorage> memory;
  const Tensor& t = THPVariable_Unpack(object.ptr());
  const SaveRequest request(t, object.ptr());
  if (takes() && is_movable(object.ptr())) memory = memory_of(request);
  py::object packed;
  if (memory != nullptr) {
    memory->add(request);
    packed = py::cast(std::make_unique<Saved>(std::move(memory), t));
  } else if (!outward.is_none()) {
    return outward(object);
  } else {
    packed = py::cast(std::make_unique<KeptTensor>(object.ptr()));
  }
  if (!saved_observers().empty()) {
    const auto all = saved_observers();  // a copy: a call may remove an observer
    for (const auto& observer : all) py::handle(observer.get())(object, packed);
  }
  return packed;
}

std::vector<std::shared_ptr<PyObject>>& saved_observers() {
  thread_local std::vector<std::shared_ptr<PyObject>> all;
  return all;
}

std::shared_ptr<PackedStorage> StorageHandler::memory_of(const SaveRequest& request) {
  const auto* key = key_of(request.tensor);
  if (is_marked(request.object))
    keep_storage(request.tensor.storage());  // the tensor with the mark may end before the storage
  const auto find = [&] {
    return std::find_if(memory_.begin(), memory_.end(), [&](const auto& entry) { return entry.first == key; });
  };
  auto found = find();
  std::shared_ptr<PackedStorage> memory = found == memory_.end() ? nullptr : found->second.lock();
  if (memory != nullptr && memory->is_resident()) return memory;  // else a new storage may have the same address
  memory = is_kept_storage(key) ? nullptr : take(request);
  if (memory == nullptr) return memory;
  found = find();
  if (found != memory_.end() && !found->second.expired()) {
    found->second = memory;
    return memory;
  }
  memory_.erase(
      std::remove_if(memory_.begin(), memory_.end(), [](const auto& entry) { return entry.second.expired(); }),
      memory_.end());
  memory_.emplace_back(key, memory);
  return memory;
}

std::vector<std::shared_ptr<PackedStorage>> StorageHandler::taken() const {
  std::vector<std::shared_ptr<PackedStorage>> found;
  for (const auto& entry : memory_) {
    if (auto memory = entry.second.lock()) found.push_back(std::move(memory));
  }
  return found;
}

}  // namespace te_torch
