// The calls of PagedStash that run for every group: group(), the schedulers around its layers, stash() and reload().
// They return null for arguments that need a closer look; stash/arguments.py accepts or refuses those.
#include <ATen/ops/view_as.h>
#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/Exceptions.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "autograd/saved_leaves.h"
#include "core/held_object.h"
#include "stash/stash_step.h"
#include "stash/stash_tensors.h"

namespace te_torch {

namespace py = pybind11;

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- schedulers ----

// What a scheduler does in the backward.
struct ScheduleAction : torch::CustomClassHolder {
  ScheduleAction(std::shared_ptr<StashStep> in, std::shared_ptr<StashScheduleScope> after)
      : step(std::move(in)), scope(std::move(after)) {}
  ~ScheduleAction() override {  // on any thread, and possibly after the interpreter has ended
    if (!Py_IsInitialized()) {
      new std::pair(std::move(step), std::move(scope));  // leaked: no Python object may be destroyed now
      return;
    }
    const py::gil_scoped_acquire gil;
    step.reset();
    scope.reset();
  }
  ScheduleAction(const ScheduleAction&) = delete;
  ScheduleAction& operator=(const ScheduleAction&) = delete;

  void run() const {
    const py::gil_scoped_acquire gil;
    try {
      if (scope != nullptr) {
        step->before_backward(*scope);
      } else {
        step->load_ahead();
      }
    } catch (py::error_already_set& error) {
      error.restore();
      throw_python_error();
    }
  }

  std::shared_ptr<StashStep> step;
  std::shared_ptr<StashScheduleScope> scope;  // null: of pre_schedule()
};

// The identity on data that a scheduler returns; its backward runs the action.
struct ScheduleNode : torch::autograd::Function<ScheduleNode> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const c10::intrusive_ptr<ScheduleAction>& action) {
    ctx->saved_data["action"] = c10::IValue::make_capsule(action);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static_cast<const ScheduleAction&>(*ctx->saved_data.at("action").toCapsule()).run();
    return {grads[0], Tensor()};
  }
};

const Tensor& checked_tensor(const StashCore& core, const char* call, const py::object& x) {
  core.check_open(call);
  if (!THPVariable_Check(x.ptr())) {
    throw py::type_error(c10::str("PagedStash.", call, ": the argument is a ", type_name(x), ", wanted a tensor."));
  }
  return THPVariable_Unpack(x.ptr());
}

py::object wrapped_tensor(const Tensor& t) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(t)); }

py::object pre(StashCore& core, const py::object& x) {
  const Tensor& t = checked_tensor(core, "pre_schedule", x);
  if (!is_recorded()) return x;
  const auto step = core.step_of_call(true);
  step->before_forward();
  if (!t.requires_grad()) return x;
  return wrapped_tensor(ScheduleNode::apply(t, c10::make_intrusive<ScheduleAction>(step, nullptr)));
}

py::object post(StashCore& core, const py::object& y) {
  const Tensor& t = checked_tensor(core, "post_schedule", y);
  if (!is_recorded()) return y;
  const auto step = core.step_of_call(false);
  if (!t.requires_grad()) {
    step->discard_scope();
    return y;
  }
  return wrapped_tensor(ScheduleNode::apply(t, c10::make_intrusive<ScheduleAction>(step, step->after_forward())));
}

// ---- groups ----

const std::map<std::string, int32_t>& tails() {
  static const auto* const found = new std::map<std::string, int32_t>{
      {"keep", TE_STASH_TAIL_KEEP}, {"tile", TE_STASH_TAIL_TILE}, {"zero", TE_STASH_TAIL_ZERO}};
  return *found;
}

// By name, a str or a subclass of it such as an Enum's; -1 for an unknown name.
int32_t tail_of(const py::object& tail_name) {
  if (!PyUnicode_Check(tail_name.ptr())) return -1;
  for (const auto& [name, tail] : tails()) {
    if (PyUnicode_CompareWithASCIIString(tail_name.ptr(), name.c_str()) == 0) return tail;
  }
  return -1;
}

bool is_hashable(const py::object& name) {
  if (PyObject_Hash(name.ptr()) != -1) return true;
  PyErr_Clear();
  return false;
}

bool is_counter(const Tensor& t, const at::Device& device) {
  const auto type = t.scalar_type();
  return (type == at::kInt || type == at::kLong || type == at::kByte) && t.numel() == 1 && t.device() == device;
}

// `with stash.group(name, counts):`, to be entered once. Saved tensors without live rows go to the hooks around it.
class StashScope {
 public:
  StashScope(std::shared_ptr<StashCore> core, py::object name, const std::optional<Tensor>& counts, int32_t tail)
      : stash_(py::cast(core)),
        core_(std::move(core)),
        name_(std::move(name)),
        tail_(tail),
        tensors_(std::make_shared<StashTensors>(name_, counts, core_->device, core_->warned_uncounted)) {}

  void enter() {
    if (handle_ != nullptr) {
      throw std::runtime_error(c10::str("PagedStash: group ", std::string(py::repr(name_)),
                                        " was entered before; call stash.group() again."));
    }
    if (!is_recorded()) return;
    core_->check_open("group");
    step_ = core_->step_of_call(false);
    handle_ = step_->open_group(name_, tail_);
    tensors_->open(handle_);
    try {
      hooks_ = saved_hooks(py::cast(std::static_pointer_cast<StorageHandler>(tensors_)));
      const bool first = at::SavedTensorDefaultHooks::get_tls_state().stack.empty();
      push_hooks(hooks_);                                            // throws where torch allows no hooks
      outer_keeps_ = set_keeps_leaf(first ? &keeps_leaf : nullptr);  // weights need no Python object each
    } catch (...) {
      tensors_->close();
      step_->close_group(handle_, true);
      throw;
    }
    open_ = true;
  }
  void exit(bool failed) {
    if (!open_) return;
    set_keeps_leaf(outer_keeps_);
    pop_hooks(hooks_);
    open_ = false;
    tensors_->close();
    step_->close_group(handle_, failed);
  }
  const std::shared_ptr<StashHandle>& handle() const { return handle_; }

 private:
  py::object stash_;  // the PagedStash, which makes the pool
  std::shared_ptr<StashCore> core_;
  py::object name_;
  int32_t tail_;
  std::shared_ptr<StashTensors> tensors_;
  py::object hooks_;
  std::shared_ptr<StashStep> step_;  // that it was entered in
  std::shared_ptr<StashHandle> handle_;
  KeepsLeaf outer_keeps_ = nullptr;
  bool open_ = false;
};

// None for arguments that stash/arguments.py has to look at.
std::shared_ptr<StashScope> group(const std::shared_ptr<StashCore>& core, const py::object& name,
                                  const py::object& counts, const py::object& tail) {
  const int32_t rest = tail_of(tail);
  if (core->closed || rest < 0 || !is_hashable(name)) return nullptr;
  std::optional<Tensor> counter;
  if (!counts.is_none()) {
    if (!THPVariable_Check(counts.ptr())) return nullptr;
    counter = THPVariable_Unpack(counts.ptr());
    if (!is_counter(*counter, core->device)) return nullptr;
  }
  return std::make_shared<StashScope>(core, name, counter, rest);
}

// ---- stash() and reload() ----

bool is_stashable(const Tensor& t, const at::Device& device, int64_t unit_rows) {
  return t.device() == device && t.layout() == at::kStrided && t.dim() != 0 && t.is_contiguous() && !t.is_neg() &&
         !t.is_conj() && t.size(0) % unit_rows == 0;
}

std::shared_ptr<StashSegment> segment_of(const Tensor& t, const Tensor& counter, int64_t unit_rows) {
  const int64_t rows = t.size(0), bytes = int64_t(t.nbytes());
  auto segment = std::make_shared<StashSegment>(t.storage(), byte_offset(t), bytes);
  // Rows of 0 bytes are no region: no count is too large for them.
  if (rows == 0 || bytes != 0) {
    segment->regions.emplace_back(0, rows, rows == 0 ? 0 : bytes / rows, unit_rows, counter);
  }
  return segment;
}

// None for arguments that stash/arguments.py has to look at. counts: one for all tensors, or one each.
std::shared_ptr<StashHandle> stash(StashCore& core, const py::object& name, const py::object& tensors,
                                   const py::object& counts, const py::object& unit_rows, const py::object& tail) {
  const int32_t rest = tail_of(tail);
  if (core.closed || rest < 0 || !is_hashable(name) || !PyLong_CheckExact(unit_rows.ptr())) return nullptr;
  const bool shared = THPVariable_Check(counts.ptr());
  if (!PyList_Check(tensors.ptr()) && !PyTuple_Check(tensors.ptr())) return nullptr;
  if (!shared && !PyList_Check(counts.ptr()) && !PyTuple_Check(counts.ptr())) return nullptr;
  const auto size = PySequence_Fast_GET_SIZE(tensors.ptr());
  int too_large = 0;
  const int64_t unit = PyLong_AsLongLongAndOverflow(unit_rows.ptr(), &too_large);
  if (size < 1 || size > TE_STASH_MOST_MEMBERS || too_large != 0 || unit < 1) return nullptr;
  if (!shared && PySequence_Fast_GET_SIZE(counts.ptr()) != size) return nullptr;
  StashSegments segments;
  std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> like;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* object = PySequence_Fast_GET_ITEM(tensors.ptr(), i);
    PyObject* counter = shared ? counts.ptr() : PySequence_Fast_GET_ITEM(counts.ptr(), i);
    const bool plain = is_plain(object) || reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass;
    if (!plain || !THPVariable_Check(counter)) return nullptr;
    const Tensor& t = THPVariable_Unpack(object);
    if (!is_stashable(t, core.device, unit) || !is_counter(THPVariable_Unpack(counter), core.device)) return nullptr;
    segments.push_back(segment_of(t, THPVariable_Unpack(counter), unit));
    like.emplace_back(t.scalar_type(), t.sizes().vec());
  }
  if (torch::autograd::get_current_graph_task_id() != -1) {
    throw std::runtime_error(
        "PagedStash.stash: called inside of a backward, wanted a call in a forward: no later backward reads what a "
        "backward makes. Open a group around the layer whose forward saves the tensors.");
  }
  const auto step = core.step_of_call(false);
  auto handle = step->new_handle(name, rest);
  handle->segments = std::move(segments);
  step->record_size(*handle);
  step->record_operation(*handle, true);
  step->store(handle);
  step->free_leaving();
  handle->like = std::move(like);
  return handle;
}

std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return strides;
}

std::vector<Tensor> reload(const StashCore& core, const py::object& object, bool keep) {
  core.check_open("reload");
  const bool is_handle = py::isinstance<StashHandle>(object);
  if (!is_handle || !py::cast<const StashHandle&>(object).like.has_value()) {
    throw py::type_error(c10::str("PagedStash.reload: argument 'handle' is ",
                                  std::string(py::repr(object)).substr(0, 100),
                                  ", wanted a handle that stash() returned."));
  }
  auto& handle = py::cast<StashHandle&>(object);
  if (handle.state == StashState::kGone || handle.stash.lock().get() != &core) {
    throw handle.gone_error("reload()");
  }
  const bool kept = handle.state == StashState::kKept;
  if (const auto step = handle.owner.lock(); step != nullptr && !keep) step->record_operation(handle, false);
  if (!kept) {
    handle.start_load(keep);
    handle.finish_load();
  }
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < handle.segments.size(); ++i) {
    const auto& [dtype, sizes] = handle.like->at(i);
    const StashSegment& segment = *handle.segments[i];
    const bool copies = kept && keep;
    const c10::Storage memory =
        copies ? bytes_over(segment.storage, segment.start, segment.bytes).clone().storage() : segment.storage;
    const int64_t first = copies ? 0 : segment.start / int64_t(c10::elementSize(dtype));
    tensors.push_back(tensor_over(memory, dtype, first, sizes, dense_strides(sizes)));
  }
  if (!keep) {
    handle.finish();
  } else if (!kept) {
    handle.detach_buffers();
  }
  return tensors;
}

}  // namespace

void register_stash_api(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashScope, std::shared_ptr<StashScope>>(m, "StashScope")
      .def("__enter__", wrapped([](const py::object& self) {
             py::cast<StashScope&>(self).enter();
             return self;
           }))
      .def("__exit__", wrapped([](StashScope& self, const py::object& type, const py::object&, const py::object&) {
             self.exit(!type.is_none());
           }))
      .def_property_readonly("handle", &StashScope::handle);
  m.attr("stash_tails") = py::cast(tails());
  m.def("stash_group", wrapped(group));
  m.def("stash_pre", wrapped(pre));
  m.def("stash_post", wrapped(post));
  m.def("stash_tensors", wrapped(stash));
  m.def("stash_reload", wrapped(reload));
}

}  // namespace te_torch
