// See stash_step.h.
#include "stash/stash_step.h"

#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>
#include <utility>

namespace te_torch {

namespace py = pybind11;

namespace {

std::string repr_of(const py::object& name) { return std::string(py::repr(name)); }

constexpr int64_t kEndless = 1024;  // microbatches of one group in one step

thread_local int64_t probe_now = 0;  // number of the probe that runs on this thread, 0: none
thread_local int64_t probe_depth = 0;
thread_local std::vector<std::weak_ptr<StashCore>> used;

void note_used(const std::shared_ptr<StashCore>& core) {
  std::erase_if(used, [&](const auto& ref) { return ref.expired() || ref.lock() == core; });
  used.insert(used.begin(), core);
}

}  // namespace

std::shared_ptr<StashCalls> StashCore::ensure_pool() {
  if (calls == nullptr && sized && !closed) py::cast(shared_from_this()).attr("_make_pool")();
  return calls;
}

void StashCore::check_open(const char* call) const {
  if (closed) throw std::runtime_error(c10::str("PagedStash.", call, ": the stash is closed; make another one."));
}

std::shared_ptr<StashStep> StashCore::step_of_call(bool begins) {
  const auto new_outside = [&](StashStepKind kind) {
    probe = probe_now;
    return outside = std::make_shared<StashStep>(weak_from_this(), false, kind);
  };
  if (probe_now != 0) return outside != nullptr && probe == probe_now ? outside : new_outside(StashStepKind::kProbe);
  if (outside != nullptr && probe == 0 && outside->in_scope()) return outside;
  if (!begins || !schedule->ended()) return step;
  return outside != nullptr && probe == 0 ? outside : new_outside(StashStepKind::kOutside);
}

std::vector<std::shared_ptr<StashCore>> stashes_used() {
  std::vector<std::shared_ptr<StashCore>> found;
  for (const auto& ref : used) {
    if (auto core = ref.lock()) found.push_back(std::move(core));
  }
  return found;
}

bool StashStep::is_current(const StashCore* core) const { return core != nullptr && core->step.get() == this; }

void StashStep::keep(StashHandle& handle) const {
  handle.scheduled = true;  // its load is not recorded
  const auto owner = core();
  const bool pool = owner != nullptr && !owner->closed && (owner->calls != nullptr || owner->sized);
  handle.leaves_in_step =
      kind_ == StashStepKind::kProbe && pool && py::cast<bool>(owner->python_schedule.attr("leaves")(handle.name));
}

void StashStep::forget_records() {
  records_ = false;
  trace = py::list();
  sizes = py::dict();
}

void StashStep::end() {
  leaving_.reset();
  std::exchange(scheduled_, {}).clear();  // a destructor may call back into this step
  for (const auto& handle : handles()) {
    if (handle->state != StashState::kKept && handle->state != StashState::kBack) handle->finish();
  }
}

std::vector<std::shared_ptr<StashHandle>> StashStep::handles() const {
  std::vector<std::shared_ptr<StashHandle>> found;
  for (const auto& ref : handles_) {
    if (auto handle = ref.lock()) found.push_back(std::move(handle));
  }
  return found;
}

std::vector<std::shared_ptr<StashHandle>> StashStep::scheduled() const {
  std::vector<std::shared_ptr<StashHandle>> found;
  for (const auto& [key, handle] : scheduled_) found.push_back(handle);
  return found;
}

std::shared_ptr<StashHandle> StashStep::new_handle(const py::object& name, int32_t tail) {
  const int64_t number = microbatches_[name]++;
  if (records_ && number == kEndless) stash_python().endless(shared_from_this());
  auto handle = std::make_shared<StashHandle>(name, py::make_tuple(name, number), tail, weak_from_this(), core_);
  if (handles_.size() >= sweep_at_) {
    std::erase_if(handles_, [](const auto& ref) { return ref.expired(); });
    sweep_at_ = std::max<size_t>(64, 2 * handles_.size());
  }
  handles_.push_back(handle);
  return handle;
}

// ---- groups ----

std::shared_ptr<StashHandle> StashStep::open_group(const py::object& name, int32_t tail) {
  if (opened_ != nullptr) {
    throw std::runtime_error(c10::str("PagedStash: group ", repr_of(name), " is opened inside of group ",
                                      repr_of(opened_->name),
                                      ", wanted one after the other; close the first group before."));
  }
  if (scope_ != nullptr && scope_->handle != nullptr) {
    throw std::runtime_error(c10::str("PagedStash: group ", repr_of(name), " is opened after group ",
                                      repr_of(scope_->handle->name),
                                      " between one pre_schedule and its post_schedule, wanted one group there; call "
                                      "post_schedule and pre_schedule between the two."));
  }
  if (scope_ == nullptr) free_leaving();
  opened_ = new_handle(name, tail);
  if (!any_group && kind_ == StashStepKind::kScheduled) note_used(core());
  any_group = true;
  return opened_;
}

void StashStep::close_group(const std::shared_ptr<StashHandle>& handle, bool failed) {
  opened_.reset();
  if (failed) {
    scope_.reset();
  } else if (scope_ != nullptr) {
    scope_->handle = handle;
  } else if (kind_ != StashStepKind::kScheduled) {
    keep(*handle);
  } else {
    record_size(*handle);
    record_operation(*handle, true);
    store(handle);
  }
}

void StashStep::store(const std::shared_ptr<StashHandle>& handle) {
  const auto owner = core();
  const auto calls = owner == nullptr || kind_ != StashStepKind::kScheduled ? nullptr : owner->ensure_pool();
  if (calls == nullptr || handle->segments.empty()) return;
  free_leaving();
  handle->store(calls);
  if (handle->state != StashState::kStored) return;
  names.append(handle->name);
  if (handle->stored->capture != 0) owner->captured_names = names;
  leaving_ = handle;
  if (owner->low_water != 0 && owner->schedule->known) stash_python().evict_farthest(shared_from_this(), calls);
}

void StashStep::record_size(const StashHandle& handle) {
  if (handle.segments.empty()) return;
  any_counted = true;
  if (records_) sizes[handle.key] = stash_python().size_of(handle.segments);
}

void StashStep::record_operation(StashHandle& handle, bool store) {
  if (!records_ || handle.scheduled || handle.traced == store || (handle.segments.empty() && store)) return;
  handle.traced = store;
  trace.append(stash_python().operation(store, handle.key));
}

void StashStep::free_leaving() {
  if (const auto handle = std::exchange(leaving_, nullptr)) handle->free_originals();
}

void StashStep::restore(StashHandle& handle) {
  if (handle.state != StashState::kStored && handle.state != StashState::kAway && handle.state != StashState::kComing) {
    return;
  }
  free_leaving();
  if (handle.state == StashState::kAway) record_operation(handle, false);
  handle.finish_load();
}

void StashStep::read_originals(StashHandle& handle) {
  if (leaving_.get() != &handle) return;
  leaving_.reset();
  record_operation(handle, false);
  handle.cancel();
}

void StashStep::release(StashHandle& handle) {
  if (leaving_.get() == &handle) leaving_.reset();
  if (handle.state != StashState::kComing) record_operation(handle, false);  // else its load is recorded already
  handle.release();
}

// ---- schedulers ----

void StashStep::before_forward() {
  if (scope_ != nullptr) {
    throw std::runtime_error("PagedStash.pre_schedule: called twice, wanted post_schedule after the first call.");
  }
  free_leaving();
  scope_ = std::make_shared<StashScheduleScope>();
}

std::shared_ptr<StashScheduleScope> StashStep::after_forward() {
  auto scope = std::exchange(scope_, nullptr);
  if (scope == nullptr || scope->handle == nullptr) {
    throw std::runtime_error(
        "PagedStash.post_schedule: no group was closed since the last call, wanted pre_schedule, a group and "
        "post_schedule in this order.");
  }
  const auto owner = core();
  const auto& handle = scope->handle;
  if (kind_ != StashStepKind::kScheduled) {
    keep(*handle);
    return scope;
  }
  handle->scheduled = true;
  scope->entry = owner->schedule->forward(handle->name);
  handle->key = scope->entry.key;
  scheduled_[handle->key] = handle;
  record_size(*handle);
  if (records_) trace.append(scope->entry.entry);
  const StashEntry following = owner->schedule->next();
  const bool backward_next = following.entry && !following.forward;
  if (!backward_next || !equal(following.key, handle->key)) store(handle);  // else its own backward is next
  if (backward_next) load_ahead();
  return scope;
}

void StashStep::before_backward(const StashScheduleScope& scope) {
  const auto owner = core();
  if (kind_ == StashStepKind::kOutside && owner != nullptr && owner->outside.get() == this) {
    owner->schedule->refuse_backward(scope.handle->name);
  }
  if (!is_current(owner.get())) return;  // an autograd graph of an earlier step has no entry in this one
  owner->schedule->backward(scope.entry);
  if (records_) trace.append(scope.entry.entry.attr("turned"));
  free_leaving();
  scope.handle->finish_load();
}

void StashStep::load_ahead() {
  const auto owner = core();
  if (!is_current(owner.get())) return;
  const StashEntry following = owner->schedule->next();
  if (!following.entry || following.forward) return;
  const auto found = scheduled_.find(following.key);
  if (found != scheduled_.end() && found->second->state == StashState::kAway) found->second->start_load();
}

void register_stash_step(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashStep, std::shared_ptr<StashStep>>(m, "StashStep")
      .def(py::init([](const std::shared_ptr<StashCore>& stash, bool records) {
             return std::make_shared<StashStep>(stash, records);
           }),
           py::arg("stash"), py::arg("records"))
      .def_property_readonly("stash", &StashStep::core)
      .def_property_readonly("records", &StashStep::records)
      .def("forget_records", &StashStep::forget_records)
      .def_readonly("any_group", &StashStep::any_group)
      .def_readonly("any_counted", &StashStep::any_counted)
      .def_readonly("trace", &StashStep::trace)
      .def_readonly("sizes", &StashStep::sizes)
      .def_readonly("names", &StashStep::names)
      .def_property_readonly("handles", &StashStep::handles)
      .def_property_readonly("scheduled", &StashStep::scheduled)
      .def("new_handle",
           wrapped([](StashStep& s, const py::object& name, int32_t tail) { return s.new_handle(name, tail); }),
           py::arg("name"), py::arg("tail") = 2)
      .def("end", wrapped([](StashStep& s) { s.end(); }))
      .def("free_leaving", wrapped([](StashStep& s) { s.free_leaving(); }));
  py::class_<StashCore, std::shared_ptr<StashCore>>(m, "StashCore")
      .def(py::init<const at::Device&>(), py::arg("device"))
      .def_readonly("device", &StashCore::device)
      .def_readwrite("streams", &StashCore::streams)
      .def_readwrite("_pool", &StashCore::calls)
      .def_property(
          "step", [](const StashCore& core) { return core.step; },
          [](StashCore& core, std::shared_ptr<StashStep> step) {
            core.step = std::move(step);
            core.outside.reset();
          })
      .def_property(
          "schedule", [](const StashCore& core) { return core.python_schedule; },
          [](StashCore& core, py::object schedule) {
            core.schedule = py::cast<std::shared_ptr<StashSchedule>>(schedule);
            core.python_schedule = std::move(schedule);
          })
      .def_readwrite("_captured_names", &StashCore::captured_names)
      .def_readwrite("low_water", &StashCore::low_water)
      .def_readwrite("_sized", &StashCore::sized)
      .def_readwrite("_closed", &StashCore::closed)
      .def("ensure_pool", wrapped([](StashCore& core) { return core.ensure_pool(); }))
      .def("_check_open", wrapped([](const StashCore& core, const char* call) { core.check_open(call); }));
  m.def("stashes_used", stashes_used);
  // Between a call with true and one with false, this thread runs a probe.
  m.def("set_stash_probe", [](bool begins) {
    static std::atomic<int64_t> probes{0};
    if (begins && probe_depth++ == 0) probe_now = ++probes;
    if (!begins && --probe_depth == 0) probe_now = 0;
  });
}

}  // namespace te_torch
