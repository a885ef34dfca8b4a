// The Python classes of the saved-tensor hooks: classes to derive, hooks to enter, and packed tensors.
#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>

#include <algorithm>

#include "core/held_object.h"
#include "saved_hooks/saved_tensor_hooks.h"

namespace te_torch {

namespace py = pybind11;

PythonHooks& python_hooks() {
  static auto* const hooks = new PythonHooks();  // never destroyed: the interpreter may end first
  return *hooks;
}

namespace {

[[noreturn]] void not_implemented(py::handle self, const char* method) {
  PyErr_SetString(PyExc_NotImplementedError,
                  (type_name(self) + ": the class does not define " + method + "(); define it.").c_str());
  throw py::error_already_set();
}

// The Python object of a derived instance, and calls of its methods. Methods that Python does not define are bound
// below.
class Derived {
 protected:
  template <class Base>
  PyObject* self(const Base* base) const {
    if (self_ == nullptr)
      self_ = py::cast(base, py::return_value_policy::reference).ptr();  // it lives as long as `base`
    return self_;
  }
  template <class Base, class... Arguments>
  py::object call(const Base* base, const py::str& method, const Arguments&... arguments) const {
    PyObject* found = PyObject_CallMethodObjArgs(self(base), method.ptr(), arguments.ptr()..., nullptr);
    if (found == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(found);
  }

 private:
  mutable PyObject* self_ = nullptr;
};

const py::str& name_of_method(const char* name) { return *new py::str(name); }

class PyPackedStorage : public PackedStorage, private Derived {
 public:
  using PackedStorage::PackedStorage;

  void add(const SaveRequest& request) override {
    static const py::str& name = name_of_method("add");
    call<PackedStorage>(this, name, py::handle(request.object));
  }
  void fetch() override {
    static const py::str& name = name_of_method("fetch");
    call<PackedStorage>(this, name);
  }
  c10::Storage restore() override {
    static const py::str& name = name_of_method("restore");
    return py::cast<Tensor>(call<PackedStorage>(this, name)).storage();
  }
  Tensor back_as(const Saved& saved) override {
    static const py::str& name = name_of_method("back_as");
    return py::cast<Tensor>(call<PackedStorage>(this, name, py::cast(saved, py::return_value_policy::reference)));
  }
};

class PyStorageHandler : public StorageHandler, private Derived {
 public:
  bool takes() const override {
    static const py::str& name = name_of_method("takes");
    return py::cast<bool>(py::getattr(self<StorageHandler>(this), name));
  }
  std::shared_ptr<PackedStorage> take(const SaveRequest& request) override {
    static const py::str& name = name_of_method("take");
    const py::object packed = call<StorageHandler>(this, name, py::handle(request.object));
    if (packed.is_none()) return nullptr;
    return {held_object(packed.ptr()), py::cast<PackedStorage*>(packed)};  // keeps the Python object alive
  }
};

// Passes tensors saved between push() and pop() to a handler.
class Hooks {
 public:
  explicit Hooks(py::object handler) : object_(std::move(handler)), handler_(py::cast<StorageHandler*>(object_)) {}

  py::object pack(const py::object& tensor) { return handler_->push(tensor, outward_); }

  static void push(const py::object& self) {
    static const auto* const top = new py::object(of_torch("_top_saved_tensors_default_hooks"));
    static const auto* const push = new py::object(of_torch("_push_saved_tensors_default_hooks"));
    static const auto* const unpack =
        new py::object(py::module_::import("transformer_engine.pytorch._C").attr("unpack_saved"));
    auto& hooks = py::cast<Hooks&>(self);
    const py::object around = (*top)(true);
    hooks.outward_ = around.is_none() ? around : python_hooks().outward_of(around);
    (*push)(self.attr("pack"), *unpack);
    hooks.pushed_ = true;
  }
  void pop() {
    static const auto* const pop = new py::object(of_torch("_pop_saved_tensors_default_hooks"));
    if (pushed_) (*pop)();
    pushed_ = false;
  }

 private:
  static py::object of_torch(const char* name) { return py::module_::import("torch._C._autograd").attr(name); }

  py::object object_;
  StorageHandler* handler_;
  py::object outward_ = py::none();
  bool pushed_ = false;
};

// `with SavedObserver(callback):` calls callback(tensor, packed object) for each tensor that this thread saves inside.
class Observer {
 public:
  explicit Observer(const py::function& callback) : callback_(held_object(callback.ptr())) {}

  void enter() { saved_observers().push_back(callback_); }
  void exit(const py::args&) {
    auto& all = saved_observers();
    const auto last = std::find(all.rbegin(), all.rend(), callback_);
    if (last != all.rend()) all.erase(std::next(last).base());
  }

 private:
  std::shared_ptr<PyObject> callback_;
};

// Whether the innermost hooks are those of the non-reentrant torch.utils.checkpoint. It numbers the saved tensors and
// matches them by number in its second run, inside of the backward, where a handler takes nothing. If a handler took
// some tensors of the first run, the numbers would differ and gradients would be computed from other tensors. With
// other hooks inside of the checkpoint's, it sees none of these tensors.
bool in_torch_checkpoint() {
  const auto hooks = at::SavedTensorDefaultHooks::get_hooks(true);
  if (!hooks.has_value()) return false;
  static const auto* const name = new py::str("__qualname__");
  const py::object name_of_hook = attribute_or_none(hooks->first.ptr(getPyInterpreter()), name->ptr());
  return py::isinstance<py::str>(name_of_hook) &&
         py::cast<std::string>(name_of_hook).rfind("_checkpoint_hook.", 0) == 0;
}

}  // namespace

bool is_recorded() {
  if (!c10::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() != -1) return false;
  return !py::cast<bool>(python_hooks().phase.attr("enabled")) && !in_torch_checkpoint();
}

py::object saved_hooks(py::object handler) { return py::cast(Hooks(std::move(handler))); }
void push_hooks(const py::object& hooks) { Hooks::push(hooks); }
void pop_hooks(const py::object& hooks) { py::cast<Hooks&>(hooks).pop(); }

py::object pop_saved(py::handle saved, bool fetch) {
  static const py::handle saved_type = py::type::of<Saved>().release(),
                          kept_type = py::type::of<KeptTensor>().release();
  const py::handle type(reinterpret_cast<PyObject*>(Py_TYPE(saved.ptr())));
  if (type.is(saved_type)) {
    auto& s = py::cast<Saved&>(saved);
    if (fetch) s.memory->fetch();
    return py::cast(s.pop());
  }
  if (type.is(kept_type)) return py::cast(py::cast<KeptTensor&>(saved).pop());
  return python_hooks().pop(saved, fetch);
}

void register_saved_python(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  auto packed = py::class_<PackedStorage, PyPackedStorage, std::shared_ptr<PackedStorage>>(m, "PackedStorage");
  packed.def(py::init<const Tensor&>(), py::arg("tensor"))
      .def("add",
           [](PackedStorage& self, const py::object& t) {
             self.PackedStorage::add({py::cast<Tensor>(t), t.ptr()});
           })
      .def("fetch", [](PackedStorage& self) { self.PackedStorage::fetch(); })
      .def("restore", [](const py::object& self) { not_implemented(self, "restore"); })
      .def("back_as",
           wrapped([](PackedStorage& self, const Saved& saved) { return self.PackedStorage::back_as(saved); }))
      .def("check", &PackedStorage::check)
      .def("let_go", &PackedStorage::let_go)
      .def("give_up",
           [](PackedStorage& self, const std::string& why) {
             self.let_go();
             self.set_written(why);
           })
      .def_property_readonly("tensor",
                             [](const PackedStorage& self) -> std::optional<Tensor> {
                               if (!self.is_resident()) return std::nullopt;
                               return bytes_over(self.storage(), 0, int64_t(self.storage().nbytes()));
                             })
      .def_property_readonly("key", [](const PackedStorage& self) { return reinterpret_cast<uintptr_t>(self.key()); })
      .def_property_readonly("bytes", &PackedStorage::bytes)
      .def_property_readonly("watched", &PackedStorage::watched)
      .def_property_readonly("written", &PackedStorage::written)
      .def_property_readonly("away", &PackedStorage::is_away)
      .def_property_readonly("stays", &PackedStorage::marked);
  packed.attr("status") = "kept";
  packed.attr("back") = "";
  py::class_<Saved>(m, "Saved")
      .def_readonly("memory", &Saved::memory)
      .def_readonly("dtype", &Saved::dtype)
      .def_readonly("offset", &Saved::offset)
      .def_property_readonly("shape",
                             [](const Saved& s) { return std::vector<int64_t>(s.sizes.begin(), s.sizes.end()); })
      .def_property_readonly("strides",
                             [](const Saved& s) { return std::vector<int64_t>(s.strides.begin(), s.strides.end()); })
      .def_property_readonly("status", [](const Saved& s) -> py::object { return py::cast(s.memory).attr("status"); })
      .def_property_readonly("back", [](const Saved& s) -> py::object { return py::cast(s.memory).attr("back"); })
      .def("fetch", [](const Saved& s) { s.memory->fetch(); })
      .def("pop", wrapped([](const Saved& s) { return s.pop(); }));
  auto kept =
      py::class_<KeptTensor>(m, "Kept").def("fetch", [](const KeptTensor&) {}).def("pop", [](const KeptTensor& k) {
        return k.pop();
      });
  kept.attr("status") = "kept";
  kept.attr("back") = "";
  py::class_<StorageHandler, PyStorageHandler, std::shared_ptr<StorageHandler>>(m, "StorageHandler")
      .def(py::init<>())
      .def_property_readonly("takes", [](const StorageHandler&) { return true; })
      .def("take", [](const py::object& self, const py::object&) { not_implemented(self, "take"); })
      .def_property_readonly("taken", &StorageHandler::taken)
      .def("push", wrapped([](StorageHandler& self, const py::object& tensor, const py::object& outward) {
             return self.push(tensor, outward);
           }),
           py::arg("tensor"), py::arg("outward") = py::none())
      .def("forget", &StorageHandler::forget);
  py::class_<Hooks>(m, "SavedHooks")
      .def(py::init<py::object>(), py::arg("client"))
      .def("pack", wrapped([](Hooks& self, const py::object& tensor) { return self.pack(tensor); }))
      .def("push", [](const py::object& self) { Hooks::push(self); })
      .def("pop", &Hooks::pop);
  m.def("unpack_saved", wrapped([](const py::object& saved) { return pop_saved(saved, true); }));
  m.def("pop_saved", wrapped([](const py::object& saved) { return pop_saved(saved, false); }));
  py::class_<Observer>(m, "SavedObserver")
      .def(py::init<const py::function&>(), py::arg("callback"))
      .def("__enter__", &Observer::enter)
      .def("__exit__", &Observer::exit);
  m.def("is_recorded", is_recorded);
  m.def("set_saved_hooks",
        [](py::object phase, py::object mark, py::object composed, py::object outward_of, py::object pop) {
          auto& hooks = python_hooks();
          hooks.phase = std::move(phase);
          hooks.mark = std::move(mark);
          hooks.composed = std::move(composed);
          hooks.outward_of = std::move(outward_of);
          hooks.pop = std::move(pop);
        });
}

}  // namespace te_torch
