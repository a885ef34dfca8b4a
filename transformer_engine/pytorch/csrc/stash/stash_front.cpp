// What users of a stash call for each group: the group to enter, the schedulers before and behind its layers, and
// tensors that are handed over by themselves. Arguments that are not plainly right are Python's to refuse
// (stash/arguments.py).
#include <ATen/ops/view_as.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/Exceptions.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "core/held_object.h"
#include "stash/stash_members.h"
#include "stash/stash_step.h"

namespace te_torch {

namespace py = pybind11;

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// ---- schedulers ----

// The identity on data that the schedulers put before and behind a group's layers: act() when its backward passes by.
struct Act : torch::CustomClassHolder {
  Act(std::shared_ptr<StashStep> of, std::shared_ptr<StashVisit> behind)
      : step(std::move(of)), visit(std::move(behind)) {}
  ~Act() override {  // on any thread, and after the interpreter
    if (!Py_IsInitialized()) {
      new std::pair(std::move(step), std::move(visit));
      return;
    }
    const py::gil_scoped_acquire gil;
    step.reset();
    visit.reset();
  }
  Act(const Act&) = delete;
  Act& operator=(const Act&) = delete;

  void act() const {
    const py::gil_scoped_acquire gil;
    try {
      if (visit != nullptr) {
        step->before_backward(*visit);
      } else {
        step->load_ahead();
      }
    } catch (py::error_already_set& error) {
      error.restore();
      throw_python_error();
    }
  }

  std::shared_ptr<StashStep> step;
  std::shared_ptr<StashVisit> visit;  // null: before a group's layers
};

struct Pass : torch::autograd::Function<Pass> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const c10::intrusive_ptr<Act>& act) {
    ctx->saved_data["act"] = c10::IValue::make_capsule(act);
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    static_cast<const Act&>(*ctx->saved_data.at("act").toCapsule()).act();
    return {grads[0], Tensor()};
  }
};

const Tensor& passed(const StashCore& core, const char* call, const py::object& x) {
  core.check_open(call);
  if (!THPVariable_Check(x.ptr())) {
    throw py::type_error(
        c10::str("PagedStash.", call, ": argument is a ", type_name(x), ", wanted the layers' tensor."));
  }
  return THPVariable_Unpack(x.ptr());
}

py::object wrapped_tensor(const Tensor& t) { return py::reinterpret_steal<py::object>(THPVariable_Wrap(t)); }

py::object pre(StashCore& core, const py::object& x) {
  const Tensor& t = passed(core, "pre_schedule", x);
  if (!is_recorded()) return x;
  const auto step = core.step_now(true);
  step->before_forward();
  if (!t.requires_grad()) return x;
  return wrapped_tensor(Pass::apply(t, c10::make_intrusive<Act>(step, nullptr)));
}

py::object post(StashCore& core, const py::object& y) {
  const Tensor& t = passed(core, "post_schedule", y);
  if (!is_recorded()) return y;
  const auto step = core.step_now(false);
  if (!t.requires_grad()) {
    step->passes_by();
    return y;
  }
  return wrapped_tensor(Pass::apply(t, c10::make_intrusive<Act>(step, step->after_forward())));
}

// ---- groups ----

const std::map<std::string, int32_t>& tails() {
  static const auto* const found = new std::map<std::string, int32_t>{
      {"keep", TE_STASH_TAIL_KEEP}, {"tile", TE_STASH_TAIL_TILE}, {"zero", TE_STASH_TAIL_ZERO}};
  return *found;
}

// What a tail is called, by a str or a class of its own (an Enum's); -1: nothing is.
int32_t tail_of(const py::object& said) {
  if (!PyUnicode_Check(said.ptr())) return -1;
  for (const auto& [name, tail] : tails()) {
    if (PyUnicode_CompareWithASCIIString(said.ptr(), name.c_str()) == 0) return tail;
  }
  return -1;
}

bool hashes(const py::object& name) {
  if (PyObject_Hash(name.ptr()) != -1) return true;
  PyErr_Clear();
  return false;
}

bool counts_rows(const Tensor& t, const at::Device& device) {
  const auto type = t.scalar_type();
  return (type == at::kInt || type == at::kLong || type == at::kByte) && t.numel() == 1 && t.device() == device;
}

// `with stash.group(name, counts):`, once: a StorageHandler. What is saved inside of it and says how many of
// its rows are alive is its own; everything else goes outward.
class StashScope {
 public:
  StashScope(std::shared_ptr<StashCore> core, py::object name, const std::optional<Tensor>& counts, int32_t tail)
      : stash_(py::cast(core)),
        core_(std::move(core)),
        name_(std::move(name)),
        tail_(tail),
        members_(std::make_shared<StashMembers>(name_, counts, core_->device)) {}

  void enter() {
    if (handle_ != nullptr) {
      throw std::runtime_error(c10::str("PagedStash: group ", std::string(py::repr(name_)),
                                        " was entered before; call stash.group() again."));
    }
    if (!is_recorded()) return;
    core_->check_open("group");
    step_ = core_->step_now(false);
    handle_ = step_->open(name_, tail_);
    members_->open(handle_);
    try {
      hooks_ = saved_hooks(py::cast(std::static_pointer_cast<StorageHandler>(members_)));
      push_hooks(hooks_);  // refused where torch takes no hooks
    } catch (...) {
      members_->close();
      step_->exit(handle_, true);
      throw;
    }
    open_ = true;
  }
  void exit(bool failed) {
    if (!open_) return;
    pop_hooks(hooks_);
    open_ = false;
    members_->close();
    step_->exit(handle_, failed);
  }
  const std::shared_ptr<StashHandle>& handle() const { return handle_; }

 private:
  py::object stash_;  // what Python derives, which makes the pool
  std::shared_ptr<StashCore> core_;
  py::object name_;
  int32_t tail_;
  std::shared_ptr<StashMembers> members_;
  py::object hooks_;
  std::shared_ptr<StashStep> step_;  // in which it was entered
  std::shared_ptr<StashHandle> handle_;
  bool open_ = false;
};

// None: something is not as it should be.
std::shared_ptr<StashScope> group(const std::shared_ptr<StashCore>& core, const py::object& name,
                                  const py::object& counts, const py::object& tail) {
  const int32_t rest = tail_of(tail);
  if (core->closed || rest < 0 || !hashes(name)) return nullptr;
  std::optional<Tensor> counter;
  if (!counts.is_none()) {
    if (!THPVariable_Check(counts.ptr())) return nullptr;
    counter = THPVariable_Unpack(counts.ptr());
    if (!counts_rows(*counter, core->device)) return nullptr;
  }
  return std::make_shared<StashScope>(core, name, counter, rest);
}

// ---- tensors by themselves ----

bool is_whole(const Tensor& t, const at::Device& device, int64_t unit_rows) {
  return t.device() == device && t.layout() == at::kStrided && t.dim() != 0 && t.is_contiguous() && !t.is_neg() &&
         !t.is_conj() && t.size(0) % unit_rows == 0;
}

std::shared_ptr<StashPiece> piece_of(const Tensor& t, const Tensor& counter, int64_t unit_rows) {
  const int64_t rows = t.size(0), bytes = int64_t(t.nbytes());
  auto piece = std::make_shared<StashPiece>(t.storage(), byte_offset(t), bytes);
  // Rows without bytes are no member: there is nothing that a count could be too large for.
  if (rows == 0 || bytes != 0) {
    piece->regions.emplace_back(0, rows, rows == 0 ? 0 : bytes / rows, unit_rows, counter);
  }
  return piece;
}

// None: something is not as it should be. counts: one for all, or one each.
std::shared_ptr<StashHandle> stash(StashCore& core, const py::object& name, const py::object& tensors,
                                   const py::object& counts, const py::object& unit_rows, const py::object& tail) {
  const int32_t rest = tail_of(tail);
  if (core.closed || rest < 0 || !hashes(name) || !PyLong_CheckExact(unit_rows.ptr())) return nullptr;
  const bool shared = THPVariable_Check(counts.ptr());
  if (!PyList_Check(tensors.ptr()) && !PyTuple_Check(tensors.ptr())) return nullptr;
  if (!shared && !PyList_Check(counts.ptr()) && !PyTuple_Check(counts.ptr())) return nullptr;
  const auto size = PySequence_Fast_GET_SIZE(tensors.ptr());
  int too_large = 0;
  const int64_t unit = PyLong_AsLongLongAndOverflow(unit_rows.ptr(), &too_large);
  if (size < 1 || size > TE_STASH_MOST_MEMBERS || too_large != 0 || unit < 1) return nullptr;
  if (!shared && PySequence_Fast_GET_SIZE(counts.ptr()) != size) return nullptr;
  std::vector<std::shared_ptr<StashPiece>> pieces;
  std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> like;
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* object = PySequence_Fast_GET_ITEM(tensors.ptr(), i);
    PyObject* counter = shared ? counts.ptr() : PySequence_Fast_GET_ITEM(counts.ptr(), i);
    const bool ours = is_plain(object) || reinterpret_cast<PyObject*>(Py_TYPE(object)) == ParameterClass;
    if (!ours || !THPVariable_Check(counter)) return nullptr;
    const Tensor& t = THPVariable_Unpack(object);
    if (!is_whole(t, core.device, unit) || !counts_rows(THPVariable_Unpack(counter), core.device)) return nullptr;
    pieces.push_back(piece_of(t, THPVariable_Unpack(counter), unit));
    like.emplace_back(t.scalar_type(), t.sizes().vec());
  }
  if (torch::autograd::get_current_graph_task_id() != -1) {
    throw std::runtime_error(
        "PagedStash.stash: called inside of a backward, wanted in a forward: what a backward makes is not kept for "
        "one. "
        "Open a group around the layer whose forward saves it.");
  }
  const auto step = core.step_now(false);
  auto handle = step->handle(name, rest);
  handle->pieces = std::move(pieces);
  step->measure(*handle);
  step->note(*handle, true);
  step->start(handle);
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
                                  std::string(py::repr(object)).substr(0, 100), ", wanted what stash() returned."));
  }
  auto& handle = py::cast<StashHandle&>(object);
  if (handle.state == StashState::kGone || handle.core.lock().get() != &core)
    throw handle.refusal("PagedStash.reload()");
  const bool kept = handle.state == StashState::kKept;
  if (const auto step = handle.step.lock(); step != nullptr && !keep) step->note(handle, false);
  if (!kept) {
    handle.start_load(keep);
    handle.finish_load();
  }
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < handle.pieces.size(); ++i) {
    const auto& [dtype, sizes] = handle.like->at(i);
    const StashPiece& piece = *handle.pieces[i];
    const bool copies = kept && keep;
    const c10::Storage memory =
        copies ? bytes_over(piece.storage, piece.start, piece.bytes).clone().storage() : piece.storage;
    const int64_t first = copies ? 0 : piece.start / int64_t(c10::elementSize(dtype));
    tensors.push_back(tensor_over(memory, dtype, first, sizes, dense_strides(sizes)));
  }
  if (!keep) {
    handle.give_up();
  } else if (!kept) {
    handle.park();
  }
  return tensors;
}

}  // namespace

void register_stash_front(py::module_& m) {
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
