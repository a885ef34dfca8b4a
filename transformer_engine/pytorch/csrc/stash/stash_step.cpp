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

std::string shown(const py::object& name) { return std::string(py::repr(name)); }

constexpr int64_t kEndless = 1024;  // microbatches of one group in one step

thread_local int64_t probe_now = 0;  // number of the probe that runs on this thread, 0: none
thread_local int64_t probe_depth = 0;
thread_local std::vector<std::weak_ptr<StashCore>> used;

void note_used(const std::shared_ptr<StashCore>& core) {
  std::erase_if(used, [&](const auto& ref) { return ref.expired() || ref.lock() == core; });
  used.insert(used.begin(), core);
}

}  // namespace

StashPython& stash_python() {
  static auto* const python = new StashPython();  // which outlives the interpreter
  return *python;
}

std::shared_ptr<StashCalls> StashCore::calls_now() {
  if (calls == nullptr && sized && !closed) py::cast(shared_from_this()).attr("_make_pool")();
  return calls;
}

void StashCore::check_open(const char* call) const {
  if (closed) throw std::runtime_error(c10::str("PagedStash.", call, ": the stash is closed; make another one."));
}

std::shared_ptr<StashStep> StashCore::step_now(bool begins) {
  const auto made = [&](StashRun run) {
    probe = probe_now;
    return aside = std::make_shared<StashStep>(weak_from_this(), false, run);
  };
  if (probe_now != 0) return aside != nullptr && probe == probe_now ? aside : made(StashRun::kProbe);
  if (aside != nullptr && probe == 0 && aside->visits()) return aside;
  if (!begins || !schedule->over()) return step;
  return aside != nullptr && probe == 0 ? aside : made(StashRun::kAside);
}

std::vector<std::shared_ptr<StashCore>> stashes_used() {
  std::vector<std::shared_ptr<StashCore>> found;
  for (const auto& ref : used) {
    if (auto core = ref.lock()) found.push_back(std::move(core));
  }
  return found;
}

bool StashStep::runs(const StashCore* core) const { return core != nullptr && core->step.get() == this; }

void StashStep::stay(StashHandle& handle) const {
  handle.scheduled = true;  // no load of it is noted
  const auto owner = core();
  const bool pool = owner != nullptr && !owner->closed && (owner->calls != nullptr || owner->sized);
  handle.leaves =
      run_ == StashRun::kProbe && pool && py::cast<bool>(owner->python_schedule.attr("leaves")(handle.name));
}

void StashStep::forget_records() {
  records_ = false;
  trace = py::list();
  sizes = py::dict();
}

void StashStep::over() {
  leaving_.reset();
  std::exchange(scheduled_, {}).clear();  // what frees a group may come back here
  for (const auto& handle : handles()) {
    if (handle->state != StashState::kKept && handle->state != StashState::kBack) handle->give_up();
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

std::shared_ptr<StashHandle> StashStep::handle(const py::object& name, int32_t tail) {
  const int64_t number = microbatches_[name]++;
  if (records_ && number == kEndless) stash_python().endless(shared_from_this());
  auto made = std::make_shared<StashHandle>(name, py::make_tuple(name, number), tail, weak_from_this(), core_);
  if (handles_.size() >= sweep_at_) {
    std::erase_if(handles_, [](const auto& ref) { return ref.expired(); });
    sweep_at_ = std::max<size_t>(64, 2 * handles_.size());
  }
  handles_.push_back(made);
  return made;
}

// ---- groups ----

std::shared_ptr<StashHandle> StashStep::open(const py::object& name, int32_t tail) {
  if (opened_ != nullptr) {
    throw std::runtime_error(c10::str("PagedStash: group ", shown(name), " is opened inside of group ",
                                      shown(opened_->name), ", wanted one behind the other: a tensor is one group's."));
  }
  if (visit_ != nullptr && visit_->handle != nullptr) {
    throw std::runtime_error(c10::str("PagedStash: group ", shown(name), " is opened behind group ",
                                      shown(visit_->handle->name),
                                      " between one pre_schedule and its post_schedule, wanted one group there."));
  }
  if (visit_ == nullptr) free_leaving();
  opened_ = handle(name, tail);
  if (!passed && run_ == StashRun::kStep) note_used(core());
  passed = true;
  return opened_;
}

void StashStep::exit(const std::shared_ptr<StashHandle>& handle, bool failed) {
  opened_.reset();
  if (failed) {
    visit_.reset();
  } else if (visit_ != nullptr) {
    visit_->handle = handle;
  } else if (run_ != StashRun::kStep) {
    stay(*handle);
  } else {
    measure(*handle);
    note(*handle, true);
    start(handle);
  }
}

void StashStep::start(const std::shared_ptr<StashHandle>& handle) {
  const auto owner = core();
  const auto calls = owner == nullptr || run_ != StashRun::kStep ? nullptr : owner->calls_now();
  if (calls == nullptr || handle->pieces.empty()) return;
  free_leaving();
  handle->store(calls);
  if (handle->state != StashState::kStored) return;
  names.append(handle->name);
  leaving_ = handle;
  if (owner->low_water != 0 && owner->schedule->known) stash_python().evict_farthest(shared_from_this(), calls);
}

void StashStep::measure(const StashHandle& handle) {
  if (handle.pieces.empty()) return;
  counted = true;
  if (records_) sizes[handle.key] = stash_python().size_of(handle.pieces);
}

void StashStep::note(StashHandle& handle, bool store) {
  if (!records_ || handle.scheduled || handle.noted == store || (handle.pieces.empty() && store)) return;
  handle.noted = store;
  trace.append(stash_python().operation(store, handle.key));
}

void StashStep::free_leaving() {
  if (const auto handle = std::exchange(leaving_, nullptr)) handle->free();
}

void StashStep::wanted(StashHandle& handle) {
  if (handle.state != StashState::kStored && handle.state != StashState::kAway && handle.state != StashState::kComing) {
    return;
  }
  free_leaving();
  if (handle.state == StashState::kAway) note(handle, false);
  handle.finish_load();
}

void StashStep::read(StashHandle& handle) {
  if (leaving_.get() != &handle) return;
  leaving_.reset();
  note(handle, false);
  handle.stay();
}

void StashStep::dropped(StashHandle& handle) {
  if (leaving_.get() == &handle) leaving_.reset();
  if (handle.state != StashState::kComing) note(handle, false);  // nothing came back of it, or nobody wanted that
  handle.let_go();
}

// ---- schedulers ----

void StashStep::before_forward() {
  if (visit_ != nullptr) {
    throw std::runtime_error("PagedStash.pre_schedule: called twice, wanted post_schedule behind the first one.");
  }
  free_leaving();
  visit_ = std::make_shared<StashVisit>();
}

std::shared_ptr<StashVisit> StashStep::after_forward() {
  auto visit = std::exchange(visit_, nullptr);
  if (visit == nullptr || visit->handle == nullptr) {
    throw std::runtime_error(
        "PagedStash.post_schedule: no group was closed since the last one, wanted pre_schedule, a group and "
        "post_schedule in this order.");
  }
  const auto owner = core();
  const auto& handle = visit->handle;
  if (run_ != StashRun::kStep) {
    stay(*handle);
    return visit;
  }
  handle->scheduled = true;
  visit->entry = owner->schedule->forward(handle->name);
  handle->key = visit->entry.key;
  scheduled_[handle->key] = handle;
  measure(*handle);
  if (records_) trace.append(visit->entry.entry);
  const StashEntry following = owner->schedule->next();
  const bool turns = following.entry && !following.forward;
  if (!turns || !equal(following.key, handle->key)) start(handle);  // else its own backward is next: it is kept
  if (turns) load_ahead();
  return visit;
}

void StashStep::before_backward(const StashVisit& visit) {
  const auto owner = core();
  if (run_ == StashRun::kAside && owner != nullptr && owner->aside.get() == this) {
    owner->schedule->refuse_backward(visit.handle->name);
  }
  if (!runs(owner.get())) return;  // a graph of a step that is over: no entry of the one that runs
  owner->schedule->backward(visit.entry);
  if (records_) trace.append(visit.entry.entry.attr("turned"));
  free_leaving();
  visit.handle->finish_load();
}

void StashStep::load_ahead() {
  const auto owner = core();
  if (!runs(owner.get())) return;
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
      .def_readonly("passed", &StashStep::passed)
      .def_readonly("counted", &StashStep::counted)
      .def_readonly("trace", &StashStep::trace)
      .def_readonly("sizes", &StashStep::sizes)
      .def_readonly("names", &StashStep::names)
      .def_property_readonly("handles", &StashStep::handles)
      .def_property_readonly("scheduled", &StashStep::scheduled)
      .def("handle", wrapped([](StashStep& s, const py::object& name, int32_t tail) { return s.handle(name, tail); }),
           py::arg("name"), py::arg("tail") = 2)
      .def("over", wrapped([](StashStep& s) { s.over(); }))
      .def("free_leaving", wrapped([](StashStep& s) { s.free_leaving(); }));
  py::class_<StashCore, std::shared_ptr<StashCore>>(m, "StashCore")
      .def(py::init<const at::Device&>(), py::arg("device"))
      .def_readonly("device", &StashCore::device)
      .def_readwrite("lanes", &StashCore::lanes)
      .def_readwrite("_pool", &StashCore::calls)
      .def_property(
          "step", [](const StashCore& core) { return core.step; },
          [](StashCore& core, std::shared_ptr<StashStep> step) {
            core.step = std::move(step);
            core.aside.reset();
          })
      .def_readwrite("_captured", &StashCore::captured)
      .def_property(
          "schedule", [](const StashCore& core) { return core.python_schedule; },
          [](StashCore& core, py::object schedule) {
            core.schedule = py::cast<std::shared_ptr<StashSchedule>>(schedule);
            core.python_schedule = std::move(schedule);
          })
      .def_readwrite("low_water", &StashCore::low_water)
      .def_readwrite("_sized", &StashCore::sized)
      .def_readwrite("_closed", &StashCore::closed)
      .def("pool_now", wrapped([](StashCore& core) { return core.calls_now(); }))
      .def("_check_open", wrapped([](const StashCore& core, const char* call) { core.check_open(call); }));
  m.def("set_stash_python",
        [](py::object entry, py::object operation, py::object size_of, py::object evict_farthest, py::object endless) {
          stash_python() = {std::move(entry), std::move(operation), std::move(size_of), std::move(evict_farthest),
                            std::move(endless)};
        });
  m.def("stashes_used", stashes_used);
  // From true to false, what this thread runs is a probe's.
  m.def("set_stash_probe", [](bool begins) {
    static std::atomic<int64_t> probes{0};
    if (begins && probe_depth++ == 0) probe_now = ++probes;
    if (!begins && --probe_depth == 0) probe_now = 0;
  });
}

}  // namespace te_torch
