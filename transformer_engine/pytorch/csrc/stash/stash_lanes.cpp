// See stash_lanes.h.
#include "stash/stash_lanes.h"

#include <torch/csrc/Exceptions.h>
#include <transformer_engine/comm.h>

#include <algorithm>
#include <utility>

#include "core/torch_api.h"
#include "stash/stash_members.h"

namespace te_torch {

namespace py = pybind11;

namespace {

constexpr std::array<const char*, 3> kLanes{"store", "load", "compute"};

bool captures(const c10::Stream& stream) {
  int32_t found = 0;
  check(te_comm_is_captured(reinterpret_cast<te_stream>(handle_of(stream)), &found));
  return found != 0;
}

uint8_t bit_of(StashLane lane) { return uint8_t(1u << int(lane)); }

std::string words_of(const StashPoint& point) { return point.mark ? point.said : point.what.str(); }

void note(const py::object& log, StashLane lane, const std::string& what, const std::vector<std::string>& behind) {
  log.attr("append")(py::make_tuple(kLanes[size_t(lane)], what, py::tuple(py::cast(behind))));
}

}  // namespace

std::string StashWords::str() const {
  return group ? std::string(verb) + " " + std::string(py::str(group)) : std::string(verb);
}

c10::Event StashEvents::take(c10::DeviceType type, bool captured) {
  auto& free = free_[captured];
  if (free.empty()) return c10::Event(type);
  c10::Event event = std::move(free.back());
  free.pop_back();
  return event;
}

StashPoint::~StashPoint() {
  if (event.has_value() && events != nullptr) events->give(std::move(*event), captured);
}

StashPointPtr StashLanes::point(StashLane lane, const c10::Stream& stream, StashWords what, bool captured) {
  auto made = std::make_shared<StashPoint>(lane, std::move(what));
  made->captured = captured;
  made->events = events_;
  made->event.emplace(events_->take(device_.type(), captured));
  made->event->record(stream);
  return noted(made);
}

const StashPointPtr& StashLanes::noted(const StashPointPtr& point) {
  if (point != nullptr && point->captured) {
    if (captured_.size() % 256 == 255) std::erase_if(captured_, [](const auto& ref) { return ref.expired(); });
    captured_.push_back(point);
  }
  return point;
}

void StashLanes::end_capture() {
  for (const auto& ref : captured_) {
    if (const auto point = ref.lock()) point->over = true;
  }
  captured_.clear();
}

StashPointPtr StashLanes::now(const char* what) {
  if (device_.is_cpu()) return std::make_shared<StashPoint>(StashLane::kCompute, StashWords{what, {}});
  const c10::Stream stream = current_stream();
  return point(StashLane::kCompute, stream, {what, {}}, captures(stream));
}

StashPointPtr StashLanes::run(StashLane lane, const StashWork& work, StashWords what,
                              std::initializer_list<const StashPointPtr*> behind) {
  if (!log.is_none()) {
    std::vector<std::string> whom;
    for (const auto* p : behind) {
      if (*p) whom.push_back(words_of(**p));
    }
    note(log, lane, what.str(), whom);
  }
  if (device_.is_cpu()) {
    work.start(nullptr);
    return std::make_shared<StashPoint>(lane, std::move(what));
  }
  const c10::impl::VirtualGuardImpl impl(device_.type());
  auto& stream = streams_[size_t(lane)];
  if (!stream.has_value()) stream = impl.getStreamFromGlobalPool(device_);
  const bool captured = captures(impl.getStream(device_));
  for (const auto* p : behind) {
    // In one lane it is behind it anyway, and behind what the lane has waited for before.
    if (!*p || (*p)->lane == lane || (*p)->captured != captured || (*p)->over) continue;
    if (((*p)->passed & bit_of(lane)) != 0) continue;
    (*p)->event->block(*stream);
    (*p)->passed |= bit_of(lane);
  }
  work.start(reinterpret_cast<te_stream>(handle_of(*stream)));
  return point(lane, *stream, std::move(what), captured);
}

void StashLanes::wait(const StashPointPtr& point) {
  if (!log.is_none()) note(log, StashLane::kCompute, "wait", {words_of(*point)});
  if (!point->event.has_value() || point->over) return;
  const c10::Stream stream = current_stream();
  if (point->captured == captures(stream)) point->event->block(stream);
}

te_stream StashLanes::current() const { return te_torch::current_stream(device_); }

namespace {

// Lanes that a test derives: told what a lane is given, they give a point of their own.
class PyLanes : public StashLanes {
 public:
  using StashLanes::StashLanes;

  StashPointPtr now(const char* what) override {
    const py::function own = py::get_override(this, "now");
    return own ? noted(py::cast<StashPointPtr>(own(what))) : StashLanes::now(what);
  }
  StashPointPtr run(StashLane lane, const StashWork& work, StashWords what,
                    std::initializer_list<const StashPointPtr*> behind) override {
    const py::function own = py::get_override(this, "run");
    if (!own) return StashLanes::run(lane, work, std::move(what), behind);
    py::list points;
    for (const auto* p : behind) {
      if (*p && !(*p)->over) points.append(*p);
    }
    return noted(py::cast<StashPointPtr>(own(kLanes[size_t(lane)], work, what.str(), points)));
  }
  void wait(const StashPointPtr& point) override {
    const py::function own = py::get_override(this, "wait");
    if (own) {
      if (!point->over) own(point);
    } else {
      StashLanes::wait(point);
    }
  }
  bool wants_pieces() const override { return true; }
};

}  // namespace

void register_stash_lanes(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashPoint, StashPointPtr>(m, "StashPoint")
      .def(py::init([](const std::string& lane, py::object mark, std::string what, bool captured) {
             const auto* found = std::find(kLanes.begin(), kLanes.end(), lane);
             if (found == kLanes.end()) throw py::value_error("StashPoint: there is no lane " + lane + ".");
             auto point = std::make_shared<StashPoint>(StashLane(found - kLanes.begin()), StashWords{"", {}});
             point->mark = std::move(mark);
             point->said = std::move(what);
             point->captured = captured;
             return point;
           }),
           py::arg("lane"), py::arg("mark"), py::arg("what"), py::arg("captured") = false)
      .def_property_readonly("lane", [](const StashPoint& p) { return kLanes[size_t(p.lane)]; })
      .def_property_readonly("what", words_of)
      .def_property_readonly("mark", [](const StashPoint& p) { return p.mark ? p.mark : py::none(); });
  py::class_<StashWork>(m, "StashWork")
      .def("__call__",
           wrapped([](const StashWork& work, int64_t stream) { work.start(reinterpret_cast<te_stream>(stream)); }))
      .def_readonly("pieces", &StashWork::pieces);
  py::class_<StashLanes, PyLanes, std::shared_ptr<StashLanes>>(m, "StashLanes")
      .def(py::init<const at::Device&>(), py::arg("device"))
      .def("current", [](const StashLanes& lanes) { return reinterpret_cast<int64_t>(lanes.current()); })
      .def_property_readonly("device", &StashLanes::device)
      .def_readwrite("log", &StashLanes::log);
}

}  // namespace te_torch
