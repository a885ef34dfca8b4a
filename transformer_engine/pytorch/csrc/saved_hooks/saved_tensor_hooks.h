// Saved-tensor hooks of this library. Inside of its context a StorageHandler is offered each saved tensor and decides
// which storages it takes; the backward gets the saved tensor back as the view that it was. Python derives the two
// classes that have virtual functions. Tensors of several parts, and hooks of other libraries, are in Python
// (saved/standing.py). Called with the GIL held.
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

// A torch.Tensor, and no class of its own.
inline bool is_plain(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass; }

// What a view is a view of.
inline pybind11::object base_of(const Tensor& view) {
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(view._base()));
}

std::string type_name(pybind11::handle object);  // type(object).__name__
std::string name_of(at::ScalarType dtype);       // as Python shows it: torch.float32

// How many of a tensor's rows are alive, or null: all of them count. What the node that saves it announces itself comes
// first; plain: what was declared of its memory counts too. The word stands until somebody declares or announces more.
const LiveRows* live_rows(const Tensor& t, bool plain);

// Memory that is never moved (saved/marks.py).
bool is_marked(PyObject* object);  // whether it carries the mark, or what it is a view of does
void keep_storage(const c10::Storage& storage);
bool stays(const c10::StorageImpl* key);

// A tensor that is saved, and its rows, asked for once.
class SaveRequest {
 public:
  SaveRequest(const Tensor& t, PyObject* python) : tensor(t), object(python) {}
  const LiveRows* live() const {
    if (!asked_) live_ = live_rows(tensor, true);
    asked_ = true;
    return live_;
  }

  const Tensor& tensor;
  PyObject* object;

 private:
  mutable bool asked_ = false;
  mutable const LiveRows* live_ = nullptr;
};

class Saved;

// A storage that a client took, whole, for all saved tensors that lie in it; it lives as long as one of them is wanted.
// The device memory is held, and every saved tensor's version watched, until the client has a copy and calls let_go().
class PackedStorage {
 public:
  explicit PackedStorage(const Tensor& t);
  virtual ~PackedStorage() = default;
  PackedStorage(const PackedStorage&) = delete;
  PackedStorage& operator=(const PackedStorage&) = delete;

  virtual void add(const SaveRequest& offered);  // one more saved tensor lies in it
  virtual void fetch() {}  // a backward is about to read it: the client may start to bring it back
  // As many bytes as the storage had, with what was in them. Asked for behind let_go() alone, once for each saved
  // tensor and backward.
  virtual c10::Storage restore() = 0;
  virtual Tensor back_as(const Saved& saved);  // the memory as a saved tensor lay in it

  bool there() const { return bool(storage_); }
  bool away() const { return !there() && written_.empty(); }  // the client's copy is what can be read
  const c10::Storage& storage() const { return storage_; }
  const c10::StorageImpl* key() const { return key_; }
  int64_t bytes() const { return bytes_; }
  const std::string& written() const { return written_; }
  void set_written(std::string why) { written_ = std::move(why); }
  // Of the saved tensors the versions now, and those at which they were saved.
  std::vector<std::pair<uint32_t, uint32_t>> watched() const;

  bool marked() const;  // whether it was, at any time until now
  void check();         // notes the first tensor that was written to, or freed, since it was saved
  void let_go();        // the client has a copy that is complete: the device memory is not ours any more

 private:
  c10::Storage storage_;
  const c10::StorageImpl* key_;
  int64_t bytes_;
  std::vector<pybind11::object> saved_;  // weak references to tensors, which may be marked until they have left
  std::vector<std::pair<c10::VariableVersion, uint32_t>> watched_;
  std::string written_;  // why nothing of it can be read any more
};

// Where a saved tensor lies in memory that was taken. Holds no tensor, so that no cycle can come of it.
class Saved {
 public:
  Saved(std::shared_ptr<PackedStorage> memory, const Tensor& t);
  Tensor pop() const;

  std::shared_ptr<PackedStorage> memory;
  at::ScalarType dtype;
  int64_t offset;
  at::DimVector sizes, strides;
  bool conjugate, negative;  // of the view: memory has the values without
};

// A tensor that stays where it is. torch looks at no version of what hooks hold, so this does. That a parameter's
// memory is away in between, sharded, is its owner's.
class KeptTensor {
 public:
  explicit KeptTensor(PyObject* object);
  const Tensor& pop() const;

 private:
  Tensor tensor_;
  std::optional<uint32_t> version_;
  std::optional<size_t> bytes_;
};

// What is saved together, as one layer's tensors are. A storage is offered once, with the first tensor in it; others
// share what was taken, until it is let go. Not offered: parameters, what is marked, and classes of tensors that have
// no memory to take; a quantized tensor is offered part by part.
class StorageHandler {
 public:
  StorageHandler() = default;
  virtual ~StorageHandler() = default;
  StorageHandler(const StorageHandler&) = delete;
  StorageHandler& operator=(const StorageHandler&) = delete;

  virtual bool takes() const { return true; }  // whether anything can be taken now
  // What stands for the tensor's storage from now on; null: it is no concern of this client. What this raises is raised
  // by the operation that saves.
  virtual std::shared_ptr<PackedStorage> take(const SaveRequest& offered) = 0;

  // What stands for a tensor that is saved. outward: who has it where this client does not take it; None: it stays.
  pybind11::object push(pybind11::handle object, pybind11::handle outward);
  // What is shared still, or was when it was taken, and is wanted by somebody; the oldest first.
  std::vector<std::shared_ptr<PackedStorage>> taken() const;
  void forget() { memory_.clear(); }

 private:
  std::shared_ptr<PackedStorage> memory_of(const SaveRequest& offered);

  std::vector<std::pair<const c10::StorageImpl*, std::weak_ptr<PackedStorage>>> memory_;
};

// What the hook asks of Python.
struct PythonHooks {
  pybind11::object phase;       // _internal/recompute_phase.py's, of this thread
  pybind11::object mark;        // name of the attribute that marks what stays
  pybind11::object composed;    // (client, tensor, outward): what stands for a tensor of several parts
  pybind11::object outward_of;  // (hooks): who is asked next, behind a client that is entered inside of them
  pybind11::object pop;         // (saved, fetch): what stands for a tensor, and is Python's
};
PythonHooks& python_hooks();

// Of this thread: called (tensor, saved) for each tensor that a client takes, or that stays, with what stands for it.
std::vector<std::shared_ptr<PyObject>>& saved_observers();

// What a question to Python came to; its error is thrown.
inline bool truth_of(int answer) {
  if (answer < 0) throw pybind11::error_already_set();
  return answer != 0;
}

// None where there is none.
inline pybind11::object attribute_or_none(PyObject* object, PyObject* name) {
  PyObject* found = nullptr;
  if (!optional_attribute(object, name, &found)) throw pybind11::error_already_set();
  return found == nullptr ? pybind11::none() : pybind11::reinterpret_steal<pybind11::object>(found);
}

// Whether what runs here is recorded for a backward and kept until then, so that a client may take of it: not without
// gradients, in a backward, or inside of a checkpoint.
bool is_recorded();

// A client as the innermost hooks of torch (_C.SavedHooks): made, entered, left.
pybind11::object saved_hooks(pybind11::object client);
void push_hooks(const pybind11::object& hooks);
void pop_hooks(const pybind11::object& hooks);

// What comes back for what stands for a tensor; fetch: what is away is brought back first, all parts of it at once.
pybind11::object pop_saved(pybind11::handle saved, bool fetch);

}  // namespace te_torch
