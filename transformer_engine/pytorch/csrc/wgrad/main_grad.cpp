// See main_grad.h. No thread waits for a lock of this file with the GIL held; a thread with a lock may take the GIL.
#include "wgrad/main_grad.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "autograd/accumulators.h"
#include "core/held_object.h"
#include "wgrad/grad_gate.h"
#include "wgrad/main_grad_python.h"
#include "wgrad/turns.h"

namespace te_torch {

using namespace main_grad;

namespace {

bool fits(const Tensor& main_grad, const Tensor& weight) {
  return main_grad.layout() == at::kStrided && main_grad.sizes() == weight.sizes() &&
         main_grad.device() == weight.device() && main_grad.is_contiguous() &&
         (main_grad.scalar_type() == at::kFloat || main_grad.scalar_type() == weight.scalar_type()) &&
         (main_grad.numel() == 0 || main_grad.storage().nbytes() != 0);
}

// Sets of Python that receive the ids of weights whose gradients are added to main_grad. Changed under the GIL; the
// count is for threads without it.
std::vector<PyObject*> listeners;
std::atomic<size_t> listening{0};

void note_accumulation(PyObject* weight) {
  for (PyObject* noted : listeners) {
    const py::object id = owned(PyLong_FromVoidPtr(weight));
    if (!id || PySet_Add(noted, id.ptr()) != 0) throw_python_error();
  }
}

}  // namespace

void note_accumulations(PyObject* noted) {
  listeners.push_back(Py_NewRef(noted));
  listening.store(listeners.size());
}

void forget_accumulations(PyObject* noted) {
  const auto found = std::find(listeners.begin(), listeners.end(), noted);
  if (found == listeners.end()) return;
  listeners.erase(found);
  listening.store(listeners.size());
  Py_DECREF(noted);
}

std::vector<size_t> WeightParameters::find_unrequested() const {
  if (weights.size() == 1 || all_leaves_wanted()) return {};
  std::vector<Tensor> leaves = weights;
  leaves.insert(leaves.end(), biases.begin(), biases.end());
  return unwanted(leaves);
}

bool WeightParameters::requested(size_t number) const {
  return std::find(unrequested.begin(), unrequested.end(), number) == unrequested.end();
}

std::vector<size_t> WeightParameters::left_out() const {
  std::vector<size_t> numbers = unrequested;
  for (size_t i = 0; i < wanted.size() + wanted_biases.size(); ++i) {
    if (!(i < wanted.size() ? wanted[i] : wanted_biases[i - wanted.size()])) numbers.push_back(i);
  }
  return numbers;
}

bool WeightParameters::takes(size_t number) const { return wanted[number] && weights[number].requires_grad(); }

std::vector<Tensor> WeightParameters::main_grads(bool call_lazy) const {
  const Names& attributes = names_of_attributes();
  Attributes attributes_of;
  std::vector<Tensor> found(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!takes(i) || !requested(i)) continue;
    const py::object weight = owned(THPVariable_Wrap(weights[i]));
    attributes_of.now(weight.ptr());
    const py::object lazy = attributes_of.get(attributes.get_main_grad);
    if (lazy && !call_lazy) continue;
    py::object main_grad = lazy ? called(lazy.ptr(), {}) : attributes_of.get(attributes.main_grad);
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
  Attributes attributes_of;
  WeightTargets targets;
  targets.list.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    targets.list.push_back({main_grads[i], weights[i].size(0), overwrite});
    targets.has_added_flag.push_back(false);
    targets.stands_in.push_back(false);
    targets.zero.push_back(false);
    if (!takes(i)) continue;
    const py::object weight = owned(THPVariable_Wrap(weights[i]));
    attributes_of.now(weight.ptr());
    const bool waits = bool(attributes_of.get(attributes.added));
    targets.stands_in[i] = waits;
    if (waits) targets.zero[i] = is_true(attributes_of.get(attributes.zero_out).ptr());
    if (!main_grads[i].defined()) continue;
    targets.has_added_flag[i] = waits;
    targets.list[i].overwrite = overwrite || is_true(attributes_of.get(attributes.overwrite).ptr());
  }
  return targets;
}

std::vector<Tensor> WeightParameters::accumulate(const WgradTask& product, const WeightTargets& targets,
                                                 bool with_bias) const {
  std::vector<Tensor> sums;
  {
    std::optional<pybind11::gil_scoped_release> no_gil;
    if (PyGILState_Check() != 0) no_gil.emplace();
    const Turns turns(targets.list);
    sums = accumulate_any(product, targets.list, with_bias);
  }
  const bool waits =
      std::find(targets.has_added_flag.begin(), targets.has_added_flag.end(), true) != targets.has_added_flag.end();
  if (waits || listening.load() != 0) {
    const pybind11::gil_scoped_acquire gil;
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!targets.list[i].out.defined()) continue;
      const py::object weight = owned(THPVariable_Wrap(weights[i]));
      note_accumulation(weight.ptr());
      if (targets.has_added_flag[i] && PyObject_SetAttr(weight.ptr(), names_of_attributes().added, Py_True) != 0)
        throw_python_error();
    }
  }
  const te_stream stream = current_stream(weights[0]);
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!targets.list[i].out.defined()) continue;
    GradAccumulator::ready(weights[i], stream);
    notify_gate(weights[i], stream, targets.stands_in[i]);
  }
  return sums;
}

c10::SmallVector<Tensor, 1> WeightParameters::stand_ins(const WeightTargets& targets, const WgradTask& product) const {
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
    if (takes(i) && !targets.stands_in[i]) return {Tensor()};
    shape[0] += targets.list[i].rows;
    zero = zero || targets.zero[i];
  }
  return {dummy(shape, zero)};
}

namespace {

// Never destroyed: backwards may run while the process ends.
struct Dummies {
  using Key = std::tuple<std::vector<int64_t>, at::ScalarType, at::DeviceType, int>;
  std::mutex mutex;
  std::map<Key, Tensor> buffers;
};

Dummies& dummies() {
  static auto* all = new Dummies;
  return *all;
}

}  // namespace

std::vector<Tensor> dummy_weight_grads() {
  Dummies& all = dummies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<Tensor> found;
  for (const auto& entry : all.buffers) found.push_back(entry.second.detach());
  return found;
}

void clear_dummy_weight_grads() {
  Dummies& all = dummies();
  std::map<Dummies::Key, Tensor> released;  // freed after the lock is released
  const std::lock_guard<std::mutex> lock(all.mutex);
  released.swap(all.buffers);
}

Tensor dummy_weight_grad(at::IntArrayRef shape, at::ScalarType dtype, const at::Device& device, bool zero) {
  Dummies& all = dummies();
  Tensor buffer;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    Tensor& kept = all.buffers[{shape.vec(), dtype, device.type(), device.index()}];
    if (!kept.defined()) {
      const c10::InferenceMode normal(false);  // a buffer made there would be an inference tensor for good
      kept = at::empty(shape, at::TensorOptions(device).dtype(dtype));
    }
    buffer = kept;
  }
  return zero ? buffer.zero_().detach() : buffer.detach();
}

WeightGrads ParameterGradAccumulator::take(std::shared_ptr<const WgradTask> product, bool with_bias) const {
  const WeightParameters* parameters = &parameters_;
  std::shared_ptr<WeightParameters> own;
  std::vector<size_t> unrequested = parameters_.find_unrequested();
  if (store_ != nullptr || !unrequested.empty()) {
    own = std::make_shared<WeightParameters>(parameters_);
    own->unrequested = std::move(unrequested);
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
  WeightGrads grads{parameters->stand_ins(targets, *product), sums_of_matrices(*product, sums)};
  const pybind11::gil_scoped_acquire gil;  // once, and not for each main_grad, whose Python object may lose its tensor
  targets = {};
  return grads;
}

}  // namespace te_torch
