// See grad_gate.h. No thread waits for the GIL with a lock of this file, or of ReadyCounts.
#include "wgrad/grad_gate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/PyInterpreter.h>
#include <transformer_engine/comm.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>

#include "autograd/accumulators.h"
#include "core/held_object.h"
#include "core/torch_api.h"
#include "wgrad/main_grad_python.h"
#include "wgrad/ready_counts.h"
#include "wgrad/turns.h"

namespace te_torch {

using namespace main_grad;

namespace {

namespace impl = torch::autograd::impl;
using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;

c10::Stream stream_of(const Tensor& t) { return c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device()); }

bool is_captured(const c10::Stream& stream) {
  int32_t captured = 0;
  // The default stream is never captured, and CUDA refuses the question during a capture.
  if (void* const handle = handle_of(stream); handle != nullptr) check(te_comm_is_captured(handle, &captured));
  return captured != 0;
}

// Streams of a GPU on which products were added to a main_grad.
class ProductStreams {
 public:
  void add(const c10::Stream& stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
  }
  c10::SmallVector<c10::Stream, 2> all() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return streams_;
  }

 private:
  mutable std::mutex mutex_;
  c10::SmallVector<c10::Stream, 2> streams_;
};

// The calls of a gate. group: a BucketGroup of Python, whose methods start the reduction or raise.
struct Target {
  std::shared_ptr<ReadyCounts> counts;
  size_t number;  // of the parameter, in the group
  Tensor main_grad;
  size_t bytes;     // of the gradients' storage, while it has memory
  bool is_delayed;  // backward_dw() counts: autograd is there before it, with nothing or with another gradient
  std::shared_ptr<PyObject> group;
  std::unique_ptr<ProductStreams> products = std::make_unique<ProductStreams>();

  void call(const char* method, const Tensor* parameter) const {
    const pybind11::gil_scoped_acquire gil;
    const py::object name = owned(PyUnicode_InternFromString(method));
    const py::object argument = parameter == nullptr ? py::object() : owned(THPVariable_Wrap(*parameter));
    const THPObjectPtr result(PyObject_CallMethodObjArgs(group.get(), name.ptr(), argument.ptr(), nullptr));
    if (!result) throw_python_error();
  }

  // Whether gradients may be added: they are not being reduced, and their memory is there.
  bool may_add() const { return counts->accumulates.load() && main_grad.storage().nbytes() >= bytes; }

  // The gradient into main_grad, and out of .grad.
  void take(const Tensor& parameter) const {
    if (!may_add()) call("check_accumulates", &parameter);
    if (!parameter.grad().defined()) return;
    const bool is_added = adds(parameter);  // before the gradient is taken: it may raise
    const Tensor grad = take_grad(parameter);
    if (!grad.defined()) return;
    if (grad.layout() != at::kStrided) {
      if (!parameter.grad().defined()) parameter.mutable_grad() = grad;  // for the error
      call("refuse_layout", &parameter);
    }
    if (!is_added) return;
    const at::NoGradGuard no_grad;
    const Turns turn({{main_grad, 0, false}});
    wait_for_products();
    Tensor(main_grad).add_(grad);
  }

  // Autograd orders no stream after one whose gradient is none: that of a product.
  void wait_for_products() const {
    if (main_grad.is_cpu()) return;
    const c10::Stream current = stream_of(main_grad);
    for (const c10::Stream& stream : products->all()) {
      // Work outside of a capture is before it, and CUDA refuses to wait for it there.
      if (stream == current || (is_captured(current) && !is_captured(stream))) continue;
      c10::Event event(stream.device_type());
      event.record(stream);
      event.block(current);
    }
  }

  // A dummy stands for a gradient that is in main_grad; frameworks that wait for it say so by these marks.
  static bool adds(const Tensor& parameter) {
    const pybind11::gil_scoped_acquire gil;
    const py::object object = owned(THPVariable_Wrap(parameter));
    const Names& names = names_of_attributes();
    return !is_true(attribute(object.ptr(), names.added).ptr()) ||
           is_true(attribute(object.ptr(), names.zero_out).ptr());
  }

  void act(ReadyCounts::Outcome outcome, const Tensor& parameter) const {
    if (outcome == ReadyCounts::Outcome::kTooOften) call("refuse_count", &parameter);
    if (outcome == ReadyCounts::Outcome::kComplete) call("start_when_ready", nullptr);
  }

  // A gradient came outside of autograd's accumulator, or by it.
  void count(const Tensor& parameter) const {
    take(parameter);
    act(counts->count(number, current_stream(main_grad)), parameter);
  }

  void after_accumulation(const Tensor& parameter) const {
    const bool has_grad = parameter.grad().defined();
    if (is_delayed) {
      if (has_grad) take(parameter);
      return;
    }
    const int backward = torch::autograd::get_current_graph_task_id();
    if (!has_grad && may_add()) {
      act(counts->count_once(number, current_stream(main_grad), backward), parameter);
    } else if (!counts->come_ahead(number, backward)) {
      count(parameter);
    } else if (has_grad) {
      take(parameter);
    }
  }
};

// The part that the accumulator's node owns. It stays there when the gate is removed, as that may happen inside of it,
// and holds nothing from then on.
class Hook : public torch::autograd::FunctionPostHook {
 public:
  Hook(Tensor parameter, Target target)
      : parameter_(std::move(parameter)), target_(std::make_shared<const Target>(std::move(target))) {}

  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (const auto target = this->target()) target->after_accumulation(parameter_);
    return outputs;
  }

  // Compiled autograd runs hooks of Python alone, each the same object in every backward.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    const auto target = this->target();
    if (target == nullptr) return;
    const pybind11::gil_scoped_acquire gil;
    if (compiled_ == nullptr) {
      const py::cpp_function run(torch::wrap_pybind_function_no_gil(
          [target, parameter = parameter_] { target->after_accumulation(parameter); }));
      compiled_ = held_object(py::handle(target->group.get()).attr("as_hook")(run).ptr());
    }
    args.add_post_hook(c10::SafePyObject(Py_NewRef(compiled_.get()), getPyInterpreter()));
  }

  std::shared_ptr<const Target> target() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return target_;
  }

  // The GIL is held.
  void remove() {
    compiled_ = nullptr;
    std::shared_ptr<const Target> removed;  // dropped without the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    removed.swap(target_);
  }

 private:
  const Tensor parameter_;
  mutable std::shared_ptr<PyObject> compiled_;  // under the GIL
  mutable std::mutex mutex_;
  std::shared_ptr<const Target> target_;
};

std::atomic<size_t> gates{0};

// The gate of Python. Nothing else holds the accumulator's node between forwards.
class GradGate {
 public:
  GradGate(const Tensor& parameter, const Tensor& main_grad, const py::object& group,
           std::shared_ptr<ReadyCounts> counts, size_t number, bool is_delayed)
      : node_(impl::grad_accumulator(parameter)), parameter_(parameter) {
    Target target{std::move(counts),       number, main_grad, main_grad.storage().nbytes(), is_delayed,
                  held_object(group.ptr())};
    auto hook = std::make_unique<Hook>(parameter, std::move(target));
    hook_ = hook.get();
    node_->add_post_hook(std::move(hook));
    ++gates;
  }
  ~GradGate() { remove(); }
  GradGate(const GradGate&) = delete;
  GradGate& operator=(const GradGate&) = delete;

  void remove() {
    if (node_ == nullptr) return;
    hook_->remove();
    node_.reset();
    --gates;
  }

  // A gradient came outside of autograd's accumulator.
  void ready() {
    if (node_ == nullptr) return;
    if (const auto target = hook_->target()) target->count(parameter_);
  }

 private:
  NodePtr node_;
  Tensor parameter_;
  Hook* hook_;
};

// The gate on a node. alone: whether nothing else hangs there that may bring or change a gradient.
std::shared_ptr<const Target> gate_on(torch::autograd::Node& node, bool& alone) {
  alone = node.pre_hooks().empty() && node.tensor_pre_hooks().empty() && node.tensor_post_acc_grad_hooks() == nullptr;
  std::shared_ptr<const Target> found;
  for (const auto& each : node.post_hooks()) {
    const auto* hook = dynamic_cast<const Hook*>(each.get());
    if (hook == nullptr) {
      alone = false;
    } else if (auto target = hook->target()) {
      alone = alone && found == nullptr;
      found = std::move(target);
    }
  }
  return found;
}

}  // namespace

void notify_gate(const Tensor& parameter, te_stream stream, bool brings_more) {
  if (gates.load() == 0) return;
  const NodePtr node = impl::try_get_grad_accumulator(parameter);
  if (node == nullptr) return;
  bool alone = false;
  const auto target = gate_on(*node, alone);
  if (target == nullptr) return;
  target->counts->note_producer(stream);
  if (!parameter.is_cpu()) target->products->add(stream_of(parameter));
  // Of gradients that would be lost the accumulator's hook raises.
  if (brings_more || !alone || target->is_delayed || !target->counts->accumulates.load()) return;
  if (parameter.grad().defined() || !is_last_edge(*node)) return;
  const int backward = torch::autograd::get_current_graph_task_id();
  target->act(target->counts->count_ahead(target->number, stream, backward), parameter);
}

void register_grad_gate(py::module_& m) {
  py::class_<GradGate>(
      m, "GradGate",
      "Adds a parameter's .grad to its main_grad after autograd's accumulator, and counts it as ready; "
      "products that add to main_grad themselves are counted before that.")
      .def(py::init<const Tensor&, const Tensor&, const py::object&, std::shared_ptr<ReadyCounts>, size_t, bool>(),
           py::arg("parameter"), py::arg("main_grad"), py::arg("group"), py::arg("counts"), py::arg("number"),
           py::arg("is_delayed"))
      .def("remove", &GradGate::remove)
      .def("ready", torch::wrap_pybind_function_no_gil(&GradGate::ready));
}

}  // namespace te_torch
