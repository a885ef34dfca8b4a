// See main_grad.h. Whoever waits for a lock here does not hold the GIL; who holds a lock may take the GIL.
#include "main_grad.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "accumulators.h"
#include "held_object.h"

namespace te_torch {

namespace py = pybind11;

namespace {

py::object owned(PyObject* reference) { return py::reinterpret_steal<py::object>(reference); }

// Never freed: a backward may run while the interpreter ends.
struct Names {
  PyObject* main_grad = PyUnicode_InternFromString("main_grad");
  PyObject* get_main_grad = PyUnicode_InternFromString("get_main_grad");
  PyObject* overwrite = PyUnicode_InternFromString("overwrite_main_grad");
  PyObject* added = PyUnicode_InternFromString("grad_added_to_main_grad");
  PyObject* zero_out = PyUnicode_InternFromString("zero_out_wgrad");
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
};

const Names& names_of_attributes() {
  static const auto* names = new Names;
  return *names;
}

// What Python answers: errors in words, and what is kept for backward_dw(). Never freed.
struct Answers {
  PyObject* check_main_grad;      // (op, name, weight, main_grad), raises where that does not fit
  PyObject* refuse_computed;      // (op, name), raises
  PyObject* is_first_microbatch;  // (op, value) -> bool, raises where it is none
  PyObject* leave;                // (store, parameters, product, with_bias)
};

Answers* answers = nullptr;

py::object called(PyObject* function, std::initializer_list<PyObject*> arguments) {
  std::array<PyObject*, 4> list{};
  std::copy(arguments.begin(), arguments.end(), list.begin());
  py::object result = owned(PyObject_Vectorcall(function, list.data(), arguments.size(), nullptr));
  if (!result) throw_python_error();
  return result;
}

// None where there is no such attribute; other errors of a property pass.
py::object attribute(PyObject* object, PyObject* name) {
  PyObject* found = nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  const int status = PyObject_GetOptionalAttr(object, name, &found);
#else
  const int status = _PyObject_LookupAttr(object, name, &found);
#endif
  if (status < 0) throw_python_error();
  return owned(found);
}

bool is_true(PyObject* object) {
  const int truth = object == nullptr ? 0 : PyObject_IsTrue(object);
  if (truth < 0) throw_python_error();
  return truth != 0;
}

py::object text(const std::string& s) {
  return owned(PyUnicode_FromStringAndSize(s.data(), static_cast<Py_ssize_t>(s.size())));
}

bool fits(const Tensor& main_grad, const Tensor& weight) {
  return main_grad.layout() == at::kStrided && main_grad.sizes() == weight.sizes() &&
         main_grad.device() == weight.device() && main_grad.is_contiguous() &&
         (main_grad.scalar_type() == at::kFloat || main_grad.scalar_type() == weight.scalar_type()) &&
         (main_grad.numel() == 0 || main_grad.storage().nbytes() != 0);
}

// Additions to one main_grad from several threads take turns. Striped, so that no parameter carries a lock; those of
// one product are taken together, in an order that is everybody's.
class Turns {
 public:
  explicit Turns(const std::vector<WeightTarget>& targets) {
    for (const WeightTarget& target : targets) {
      if (target.out.defined()) stripes_.push_back(reinterpret_cast<uintptr_t>(target.out.data_ptr()) / 256 % kLocks);
    }
    std::sort(stripes_.begin(), stripes_.end());
    stripes_.erase(std::unique(stripes_.begin(), stripes_.end()), stripes_.end());
    for (const size_t stripe : stripes_) locks()[stripe].lock();
  }
  ~Turns() {
    for (const size_t stripe : stripes_) locks()[stripe].unlock();
  }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

 private:
  static constexpr size_t kLocks = 64;
  static std::array<std::mutex, kLocks>& locks() {
    static auto* all = new std::array<std::mutex, kLocks>;
    return *all;
  }
  c10::SmallVector<size_t, 4> stripes_;
};

// Sets of Python's that get the weights, by id, whose gradients are added to main_grad. Under the GIL; the count is
// for who does not hold it.
std::vector<PyObject*> listeners;
std::atomic<size_t> listening{0};

void tell(PyObject* weight) {
  for (PyObject* noted : listeners) {
    const py::object id = owned(PyLong_FromVoidPtr(weight));
    if (!id || PySet_Add(noted, id.ptr()) != 0) throw_python_error();
  }
}

}  // namespace

std::vector<size_t> WeightParameters::find_unasked() const {
  if (weights.size() == 1) return {};
  std::vector<Tensor> leaves = weights;
  leaves.insert(leaves.end(), biases.begin(), biases.end());
  return unwanted(leaves);
}

bool WeightParameters::asked(size_t number) const {
  return std::find(unasked.begin(), unasked.end(), number) == unasked.end();
}

std::vector<int64_t> WeightParameters::rows() const {
  std::vector<int64_t> rows;
  for (const Tensor& weight : weights) rows.push_back(weight.size(0));
  return rows;
}

std::vector<Tensor> WeightParameters::main_grads(bool ask) const {
  const Names& attributes = names_of_attributes();
  std::vector<Tensor> found(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!wanted[i] || !asked(i)) continue;
    const py::object weight = owned(THPVariable_Wrap(weights[i]));
    const py::object lazy = attribute(weight.ptr(), attributes.get_main_grad);
    if (lazy && !ask) continue;
    py::object main_grad = lazy ? called(lazy.ptr(), {}) : attribute(weight.ptr(), attributes.main_grad);
    if (!main_grad) main_grad = py::none();
    if (!THPVariable_CheckExact(main_grad.ptr()) || !fits(THPVariable_Unpack(main_grad.ptr()), weights[i])) {
      const py::object op = text(names->op), name = text(names->weights[i]);
      called(answers->check_main_grad, {op.ptr(), name.ptr(), weight.ptr(), main_grad.ptr()});
    }
    found[i] = THPVariable_Unpack(main_grad.ptr());
  }
  return found;
}

WeightTargets WeightParameters::targets(const std::vector<Tensor>& main_grads) const {
  const Names& attributes = names_of_attributes();
  WeightTargets said;
  for (size_t i = 0; i < weights.size(); ++i) {
    said.list.push_back({main_grads[i], weights[i].size(0), overwrite});
    said.tells.push_back(false);
    said.stands_in.push_back(false);
    said.zero.push_back(false);
    if (!wanted[i]) continue;
    const py::object weight = owned(THPVariable_Wrap(weights[i]));
    const bool waits = bool(attribute(weight.ptr(), attributes.added));
    said.stands_in[i] = waits;
    if (waits) said.zero[i] = is_true(attribute(weight.ptr(), attributes.zero_out).ptr());
    if (!main_grads[i].defined()) continue;
    said.tells[i] = waits;
    said.list[i].overwrite = overwrite || is_true(attribute(weight.ptr(), attributes.overwrite).ptr());
  }
  return said;
}

std::vector<Tensor> WeightParameters::accumulate(const WeightProduct& product, const WeightTargets& targets,
                                                 bool with_bias) const {
  std::vector<Tensor> sums;
  {
    std::optional<pybind11::gil_scoped_release> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    const Turns turns(targets.list);
    sums = product.accumulate(targets.list, with_bias);
  }
  const bool waits = std::find(targets.tells.begin(), targets.tells.end(), true) != targets.tells.end();
  if (waits || listening.load() != 0) {
    const pybind11::gil_scoped_acquire gil;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!targets.list[i].out.defined()) continue;
      const py::object weight = owned(THPVariable_Wrap(weights[i]));
      tell(weight.ptr());
      if (targets.tells[i] && PyObject_SetAttr(weight.ptr(), names_of_attributes().added, Py_True) != 0)
        throw_python_error();
    }
  }
  return sums;
}

c10::SmallVector<Tensor, 1> WeightParameters::stand_ins(const WeightTargets& targets,
                                                        const WeightProduct& product) const {
  const auto dummy = [&](at::IntArrayRef shape, bool zero) {
    return dummy_weight_grad(shape, product.dtype(), weights[0].device(), zero);
  };
  c10::SmallVector<Tensor, 1> all;
  if (product.matrices() > 1) {
    for (size_t i = 0; i < weights.size(); ++i) {
      all.push_back(targets.stands_in[i] ? dummy(weights[i].sizes(), targets.zero[i]) : Tensor());
    }
    return all;
  }
  std::vector<int64_t> shape = weights[0].sizes().vec();
  shape[0] = 0;
  bool zero = false;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (wanted[i] && !targets.stands_in[i]) return {Tensor()};
    shape[0] += targets.list[i].rows;
    zero = zero || targets.zero[i];
  }
  return {dummy(shape, zero)};
}

Tensor dummy_weight_grad(at::IntArrayRef shape, at::ScalarType dtype, const at::Device& device, bool zero) {
  using Key = std::tuple<std::vector<int64_t>, at::ScalarType, at::DeviceType, int>;
  static auto* mutex = new std::mutex;
  static auto* buffers = new std::map<Key, Tensor>;
  Tensor buffer;
  {
    const std::lock_guard<std::mutex> lock(*mutex);
    Tensor& kept = (*buffers)[{shape.vec(), dtype, device.type(), device.index()}];
    if (!kept.defined()) {
      const c10::InferenceMode normal(false);  // a buffer made there would be an inference tensor for good
      kept = at::empty(shape, at::TensorOptions(device).dtype(dtype));
    }
    buffer = kept;
  }
  return zero ? buffer.zero_().detach() : buffer.detach();
}

WeightGrads ParameterSink::take(std::shared_ptr<const WeightProduct> product, bool with_bias) const {
  const WeightParameters* parameters = &parameters_;
  std::shared_ptr<WeightParameters> own;
  std::vector<size_t> unasked = parameters_.find_unasked();
  if (store_ != nullptr || !unasked.empty()) {
    own = std::make_shared<WeightParameters>(parameters_);
    own->unasked = std::move(unasked);
    parameters = own.get();
  }
  if (store_ != nullptr) {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object left = pybind11::cast(std::move(own)), work = handle_of(std::move(product));
    called(answers->leave, {store_.get(), left.ptr(), work.ptr(), with_bias ? Py_True : Py_False});
    return {{Tensor()}, {Tensor()}};
  }
  WeightTargets targets;
  {
    const pybind11::gil_scoped_acquire gil;
    targets = parameters->targets(parameters->main_grads(true));
  }
  const std::vector<Tensor> sums = parameters->accumulate(*product, targets, with_bias);
  return {parameters->stand_ins(targets, *product), sums_of_matrices(*product, sums)};
}

namespace {

// A module's product by the names of its parameters. Holds none of these: they are looked up at each call.
class WeightGradProduct {
 public:
  WeightGradProduct(std::vector<py::str> weights, std::vector<py::str> biases)
      : weights_(std::move(weights)), biases_(std::move(biases)) {
    for (auto* list : {&weights_, &biases_}) {
      for (py::str& name : *list) {
        PyObject* interned = name.release().ptr();
        PyUnicode_InternInPlace(&interned);
        name = py::reinterpret_steal<py::str>(interned);
      }
    }
  }

  // None where no weight wants a gradient.
  std::shared_ptr<ParameterSink> sink(const py::object& module, bool fused, const py::object& first,
                                      const py::object& store) {
    const py::object registered = attribute(module.ptr(), names_of_attributes().parameters);
    WeightParameters p;
    bool any = false;
    for (const py::str& name : weights_) {
      p.weights.push_back(parameter(module.ptr(), registered.ptr(), name));
      p.wanted.push_back(p.weights.back().requires_grad());
      any = any || p.wanted.back();
    }
    if (!any) return {};
    p.names = named(Py_TYPE(module.ptr()));
    p.fused = fused;
    p.overwrite = first.ptr() == Py_True;
    if (first.ptr() != Py_True && first.ptr() != Py_False && !first.is_none()) {
      p.overwrite = is_true(called(answers->is_first_microbatch, {text(p.names->op).ptr(), first.ptr()}).ptr());
    }
    for (size_t i = 0; i < weights_.size(); ++i) {
      if (!p.wanted[i] || p.weights[i].is_leaf()) continue;
      called(answers->refuse_computed, {text(p.names->op).ptr(), weights_[i].ptr()});
    }
    for (const py::str& name : biases_) p.biases.push_back(parameter(module.ptr(), registered.ptr(), name));
    if (fused) p.main_grads(false);  // what can be known to be wrong is said before anything has run
    return std::make_shared<ParameterSink>(std::move(p), store.is_none() ? nullptr : held_object(store.ptr()));
  }

 private:
  static Tensor parameter(PyObject* module, PyObject* registered, const py::str& name) {
    PyObject* found =
        registered != nullptr && PyDict_Check(registered) ? PyDict_GetItemWithError(registered, name.ptr()) : nullptr;
    if (found != nullptr && THPVariable_Check(found)) return THPVariable_Unpack(found);
    const py::object other = owned(PyObject_GetAttr(module, name.ptr()));  // computed, by a parametrization
    if (!other) throw_python_error();
    TORCH_CHECK_TYPE(THPVariable_Check(other.ptr()), "'", std::string(name), "' is a ", Py_TYPE(other.ptr())->tp_name,
                     ", wanted a Tensor.");
    return THPVariable_Unpack(other.ptr());
  }

  std::shared_ptr<const WeightNames> named(PyTypeObject* type) {
    if (type != type_) {  // a parametrization changes it
      auto names = std::make_shared<WeightNames>();
      names->op = std::string(py::str(py::handle(reinterpret_cast<PyObject*>(type)).attr("__name__")));
      for (const py::str& name : weights_) names->weights.emplace_back(name);
      names_ = std::move(names);
      type_ = type;
    }
    return names_;
  }

  std::vector<py::str> weights_, biases_;
  std::shared_ptr<const WeightNames> names_;
  PyTypeObject* type_ = nullptr;  // to be compared alone
};

// One a parameter: the rows of the matrices that are its.
std::vector<Tensor> cut(at::TensorList matrices, const std::vector<int64_t>& rows) {
  if (matrices.size() == rows.size()) return matrices.vec();
  std::vector<Tensor> parts;
  for (const Tensor& matrix : matrices) {
    std::vector<int64_t> sizes;
    for (int64_t left = matrix.size(0); left > 0 && parts.size() + sizes.size() < rows.size(); left -= sizes.back()) {
      sizes.push_back(rows[parts.size() + sizes.size()]);
    }
    const std::vector<Tensor> own = matrix.split_with_sizes(sizes);
    parts.insert(parts.end(), own.begin(), own.end());
  }
  return parts;
}

}  // namespace

void register_main_grad(py::module_& m) {
  py::class_<WeightGradProduct>(m, "WeightGradProduct")
      .def(py::init<std::vector<py::str>, std::vector<py::str>>(), py::arg("weights"), py::arg("biases"))
      .def("sink", torch::wrap_pybind_function(&WeightGradProduct::sink), py::arg("module"), py::arg("fused"),
           py::arg("is_first_microbatch"), py::arg("store"));
  register_sinks(m);
  py::class_<ParameterSink, WeightGradSink, std::shared_ptr<ParameterSink>>(m, "ParameterSink");
  py::class_<WeightParameters, std::shared_ptr<WeightParameters>>(m, "WeightParameters")
      .def_property_readonly("op", [](const WeightParameters& p) { return p.names->op; })
      .def_property_readonly("names", [](const WeightParameters& p) { return p.names->weights; })
      .def_readonly("weights", &WeightParameters::weights)
      .def_readonly("biases", &WeightParameters::biases)
      .def_readonly("fused", &WeightParameters::fused)
      .def_property_readonly(
          "unasked", [](const WeightParameters& p) { return p.unasked; },
          "Numbers of the weights, then biases, whose gradients the backward did not bring.")
      .def("main_grads", torch::wrap_pybind_function([](const WeightParameters& p) { return p.main_grads(true); }))
      .def("accumulate", torch::wrap_pybind_function([](const WeightParameters& p, const WeightProduct& product,
                                                        const std::vector<OptionalTensor>& main_grads, bool with_bias) {
             std::vector<Tensor> given;
             for (const OptionalTensor& main_grad : main_grads) given.push_back(main_grad.value_or(Tensor()));
             return p.accumulate(product, p.targets(given), with_bias);
           }))
      .def("compute", torch::wrap_pybind_function_no_gil(
                          [](const WeightParameters& p, const WeightProduct& product, bool with_bias) {
                            const WeightGrads grads = product.compute(Route(Direct{}), with_bias);
                            const std::vector<int64_t> rows = p.rows();
                            return std::make_tuple(cut(grads.weights, rows),
                                                   with_bias ? cut(grads.biases, rows) : std::vector<Tensor>());
                          }));
  m.def(
      "answer_weight_grads",
      [](const py::function& check_main_grad, const py::function& refuse_computed,
         const py::function& is_first_microbatch, const py::function& leave) {
        answers = new Answers{check_main_grad.inc_ref().ptr(), refuse_computed.inc_ref().ptr(),
                              is_first_microbatch.inc_ref().ptr(), leave.inc_ref().ptr()};
      },
      py::kw_only(), py::arg("check_main_grad"), py::arg("refuse_computed"), py::arg("is_first_microbatch"),
      py::arg("leave"));
  m.def("note_accumulations", [](const py::set& noted) {
    listeners.push_back(noted.inc_ref().ptr());
    listening.store(listeners.size());
  });
  m.def("forget_accumulations", [](const py::set& noted) {
    const auto found = std::find(listeners.begin(), listeners.end(), noted.ptr());
    if (found == listeners.end()) return;
    listeners.erase(found);
    listening.store(listeners.size());
    noted.dec_ref();
  });
  m.def("dummy_weight_grad", torch::wrap_pybind_function_no_gil(
                                 [](const std::vector<int64_t>& shape, at::ScalarType dtype, const at::Device& device,
                                    bool zero) { return dummy_weight_grad(shape, dtype, device, zero); }));
}

}  // namespace te_torch
