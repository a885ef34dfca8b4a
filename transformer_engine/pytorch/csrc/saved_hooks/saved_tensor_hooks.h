// Saved-tensor hooks of this library. Inside of its context a StorageHandler gets a request for each saved tensor and
// decides which storages it takes; the backward gets the tensor back as the same view. Python derives the two classes
// with virtual functions. Tensors of several parts and hooks of other libraries are handled in Python
// (saved/saved_tensor_hooks.py). Requires the GIL.
#pragma once

#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "autograd/saved.h"
#include "core/python_attribute.h"
#include "saved_hooks/saved_storages.h"

namespace te_torch {

using at::Tensor;

// Whether it is a torch.Tensor itself, and no subclass.
inline bool is_plain(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass; }

// The base of a view.
inline pybind11::object base_of(const Tensor& view) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(view._base()));
}

std::string type_name(pybind11::handle object);  // type(object).__name__
std::string name_of(at::ScalarType dtype);       // as in Python: torch.float32

// The live rows of a tensor; null: all of them. An announcement of the saving node comes first, then, for a plain
// tensor, a declaration for its memory (mark_pageable). Valid until the next announcement or declaration.
const LiveRows* live_rows(const Tensor& t, bool plain);

// Marks of memory that is never moved (saved/marks.py).
bool is_marked(PyObject* object);  // whether it or its base has the mark
void keep_storage(const c10::Storage& storage);
bool is_kept_storage(const c10::StorageImpl* key);

// A tensor to save, and its live rows, looked up once.
class SaveRequest {
 public:
  SaveRequest(const Tensor& t, PyObject* python) : tensor(t), object(python) {}
  const LiveRows* live() const {
    if (!looked_up_) live_ = live_rows(tensor, true);
    looked_up_ = true;
    return live_;
  }

  const Tensor& tensor;
  PyObject* object;

 private:
  mutable bool looked_up_ = false;
  mutable const LiveRows* live_ = nullptr;
};

class Saved;

// A storage that a handler took, with all saved tensors in it; it lives as long as one of these. Holds the device
// memory and watches the versions of the saved tensors until the handler has a copy and calls let_go().
class PackedStorage {
 public:
  explicit PackedStorage(const Tensor& t);
  virtual ~PackedStorage() = default;
  PackedStorage(const PackedStorage&) = delete;
  PackedStorage& operator=(const PackedStorage&) = delete;

  virtual void add(const SaveRequest& request);  // adds a saved tensor in the same storage
  virtual void fetch() {}                        // called before a backward reads it: the handler may start a copy back
  // A storage of the same bytes. Called after let_go(), once for each saved tensor and backward.
  virtual c10::Storage restore() = 0;
  virtual Tensor back_as(const Saved& saved);  // a saved tensor in the restored memory

  bool is_resident() const { return bool(storage_); }
  bool is_away() const { return !is_resident() && written_.empty(); }  // only the handler's copy can be read
  const c10::Storage& storage() const { return storage_; }
  const c10::StorageImpl* key() const { return key_; }
  int64_t bytes() const { return bytes_; }
  const std::string& written() const { return written_; }
  void set_written(std::string why) { written_ = std::move(why); }
  // For each saved tensor, its version now and when it was saved.
  std::vector<std::pair<uint32_t, uint32_t>> watched() const;

  bool marked() const;  // whether a saved tensor has the mark, or had it before
  void check();         // notes the first tensor that was modified or freed since it was saved
  void let_go();        // releases the device memory: the handler has a complete copy

 private:
  c10::Storage storage_;
  const c10::StorageImpl* key_;
  int64_t bytes_;
  std::vector<pybind11::object> saved_;  // weak references to tensors, which may be marked until let_go()
  std::vector<std::pair<c10::VariableVersion, uint32_t>> watched_;
  std::string written_;  // the reason why it cannot be read any more
};

// A saved tensor in a storage that was taken. Holds no tensor, so that it cannot be a part of a reference cycle.
class Saved {
 public:
  Saved(std::shared_ptr<PackedStorage> memory, const Tensor& t);
  Tensor pop() const;

  std::shared_ptr<PackedStorage> memory;
  at::ScalarType dtype;
  int64_t offset;
  at::DimVector sizes, strides;
  bool conjugate, negative;  // bits of the view; the memory has the values without them
};

// A tensor that stays in place. Checks its version, as torch does not for tensors held by hooks. A parameter's memory
// may be freed in between by a sharding framework.
class KeptTensor {
 public:
  explicit KeptTensor(PyObject* object);
  const Tensor& pop() const;

 private:
  Tensor tensor_;
  std::optional<uint32_t> version_;
  std::optional<size_t> bytes_;
};

// Handles tensors that are saved together, as one layer's are.
// - take() is called once for a storage, with the first tensor in it; later tensors share the result until let_go().
// - Not called for parameters, marked tensors, and tensor classes without a storage; once for each part of a quantized
//   tensor.
class StorageHandler {
 public:
  StorageHandler() = default;
  virtual ~StorageHandler() = default;
  StorageHandler(const StorageHandler&) = delete;
  StorageHandler& operator=(const StorageHandler&) = delete;

  virtual bool takes() const { return true; }  // whether it can take storages now
  // Takes the tensor's storage, or returns null. An error is raised by the operation that saves the tensor.
  virtual std::shared_ptr<PackedStorage> take(const SaveRequest& request) = 0;

  // The packed object of a saved tensor. outward: packs a tensor that this handler does not take; None: the tensor
  // stays.
  pybind11::object push(pybind11::handle object, pybind11::handle outward);
  // The storages that were taken and still have a reader, the oldest first.
  std::vector<std::shared_ptr<PackedStorage>> taken() const;
  void forget() { memory_.clear(); }

 private:
  std::shared_ptr<PackedStorage> memory_of(const SaveRequest& request);

  std::vector<std::pair<const c10::StorageImpl*, std::weak_ptr<PackedStorage>>> memory_;
};

// Python functions and objects of the hooks.
struct PythonHooks {
  pybind11::object phase;       // of _internal/recompute_phase.py, of this thread
  pybind11::object mark;        // name of the attribute that marks memory to stay
  pybind11::object composed;    // (handler, tensor, outward): packs a tensor of several parts
  pybind11::object outward_of;  // (hooks): the `outward` of a handler that is entered inside of these hooks
  pybind11::object pop;         // (saved, fetch): unpacks an object of a Python class
};
PythonHooks& python_hooks();

// Observers of this thread: called with (tensor, packed object) for each tensor that a handler takes or that stays.
std::vector<std::shared_ptr<PyObject>>& saved_observers();

// The result of a Python predicate; throws its error.
inline bool truth_of(int answer) {
  if (answer < 0) throw pybind11::error_already_set();
  return answer != 0;
}

// The attribute, or None.
inline pybind11::object attribute_or_none(PyObject* object, PyObject* name) {
  PyObject* found = nullptr;
  if (!optional_attribute(object, name, &found)) throw pybind11::error_already_set();
  return found == nullptr ? pybind11::none() : pybind11::reinterpret_steal<pybind11::object>(found);
}

// Whether saved tensors are kept until a backward, so that a handler may take them: false without gradients, in a
// backward, and inside of a checkpoint.
bool is_recorded();

// A handler as torch's innermost hooks (_C.SavedHooks): creates, enters and leaves them.
pybind11::object saved_hooks(pybind11::object handler);
void push_hooks(const pybind11::object& hooks);
void pop_hooks(const pybind11::object& hooks);

// Whether a handler without hooks around it keeps a leaf as it is: a parameter, while there are no observers. Without
// the GIL too.
bool keeps_leaf(const Tensor& leaf);

// Unpacks a saved tensor. fetch: calls fetch() for all its parts before the first is read.
pybind11::object pop_saved(pybind11::handle saved, bool fetch);

}  // namespace te_torch
