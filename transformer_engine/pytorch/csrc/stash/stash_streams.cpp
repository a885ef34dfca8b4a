// See stash_streams.h.
#include "stash/stash_streams.h"

#include <torch/csrc/Exceptions.h>
#include <transformer_engine/stash.h>

#include <algorithm>
#include <utility>

#include "core/torch_api.h"

namespace te_torch {

namespace py = pybind11;

namespace {

constexpr std::array<const char*, 3> kStreamNames{"store", "load", "compute"};

// See StashStreams.
bool is_awaited(const StashEvent& event, uint64_t capture) { return event.capture == capture; }

uint8_t bit_of(StashStreamId id) { return uint8_t(1u << int(id)); }

std::string label_of(const StashEvent& event) { return event.mark ? event.python_label : event.label.str(); }

void append(const py::object& log, StashStreamId id, const std::string& label, const std::vector<std::string>& after) {
  log.attr("append")(py::make_tuple(kStreamNames[size_t(id)], label, py::tuple(py::cast(after))));
}

}  // namespace

std::string StashLabel::str() const {
  return group ? std::string(verb) + " " + std::string(py::str(group)) : std::string(verb);
}

c10::Event StashEventPool::take(c10::DeviceType type, bool captured) {
  auto& free = free_[captured];
  if (free.empty()) return c10::Event(type);
  c10::Event event = std::move(free.back());
  free.pop_back();
  return event;
}

StashEvent::~StashEvent() {
  if (device_event.has_value() && pool != nullptr) pool->give(std::move(*device_event), capture != 0);
}

uint64_t StashStreams::capture() const {
  uint64_t number = 0;
  if (!device_.is_cpu()) check(te_stash_capture(current(), &number));
  return number;
}

StashEventPtr StashStreams::record(StashStreamId id, const c10::Stream& stream, StashLabel label, uint64_t capture) {
  auto event = std::make_shared<StashEvent>(id, std::move(label));
  event->capture = capture;
  event->pool = pool_;
  event->device_event.emplace(pool_->take(device_.type(), capture != 0));
  event->device_event->record(stream);
  return event;
}

StashEventPtr StashStreams::now(const char* label) {
  if (device_.is_cpu()) return std::make_shared<StashEvent>(StashStreamId::kCompute, StashLabel{label, {}});
  return record(StashStreamId::kCompute, current_stream(), {label, {}}, capture());
}

StashEventPtr StashStreams::run(StashStreamId id, const StashWork& work, StashLabel label,
                                std::initializer_list<const StashEventPtr*> after) {
  if (!log.is_none()) {
    std::vector<std::string> labels;
    for (const auto* event : after) {
      if (*event) labels.push_back(label_of(**event));
    }
    append(log, id, label.str(), labels);
  }
  if (device_.is_cpu()) {
    work.start(nullptr);
    return std::make_shared<StashEvent>(id, std::move(label));
  }
  const c10::impl::VirtualGuardImpl impl(device_.type());
  auto& stream = streams_[size_t(id)];
  if (!stream.has_value()) stream = impl.getStreamFromGlobalPool(device_);
  const uint64_t number = capture();
  for (const auto* event : after) {
    // Work of one stream runs in order, and also after all that the stream has waited for before.
    if (!*event || (*event)->stream == id || !is_awaited(**event, number)) continue;
    if (((*event)->waited_by & bit_of(id)) != 0) continue;
    (*event)->device_event->block(*stream);
    (*event)->waited_by |= bit_of(id);
  }
  work.start(reinterpret_cast<te_stream>(handle_of(*stream)));
  return record(id, *stream, std::move(label), number);
}

void StashStreams::wait(const StashEventPtr& event) {
  if (!log.is_none()) append(log, StashStreamId::kCompute, "wait", {label_of(*event)});
  if (event->device_event.has_value() && is_awaited(*event, capture())) event->device_event->block(current_stream());
}

te_stream StashStreams::current() const { return te_torch::current_stream(device_); }

namespace {

// Streams that a test derives: their methods get the work and return events of their own.
class PyStashStreams : public StashStreams {
 public:
  using StashStreams::StashStreams;

  StashEventPtr now(const char* label) override {
    const py::function own = py::get_override(this, "now");
    return own ? py::cast<StashEventPtr>(own(label)) : StashStreams::now(label);
  }
  StashEventPtr run(StashStreamId id, const StashWork& work, StashLabel label,
                    std::initializer_list<const StashEventPtr*> after) override {
    const py::function own = py::get_override(this, "run");
    if (!own) return StashStreams::run(id, work, std::move(label), after);
    py::list events;
    const uint64_t number = capture();
    for (const auto* event : after) {
      if (*event && is_awaited(**event, number)) events.append(*event);
    }
    return py::cast<StashEventPtr>(own(kStreamNames[size_t(id)], work, label.str(), events));
  }
  void wait(const StashEventPtr& event) override {
    const py::function own = py::get_override(this, "wait");
    if (own) {
      if (is_awaited(*event, capture())) own(event);
    } else {
      StashStreams::wait(event);
    }
  }
  uint64_t capture() const override {
    const py::function own = py::get_override(this, "capture");
    return own ? py::cast<uint64_t>(own()) : StashStreams::capture();
  }
  bool needs_segments() const override { return true; }
};

}  // namespace

void register_stash_streams(py::module_& m) {
  const auto wrapped = [](auto method) { return torch::wrap_pybind_function(method); };
  py::class_<StashEvent, StashEventPtr>(m, "StashEvent")
      .def(py::init([](const std::string& stream, py::object mark, std::string label, uint64_t capture) {
             const auto* found = std::find(kStreamNames.begin(), kStreamNames.end(), stream);
             if (found == kStreamNames.end()) {
               throw py::value_error("StashEvent: argument 'stream' is '" + stream +
                                     "', wanted 'store', 'load' or 'compute'.");
             }
             auto event = std::make_shared<StashEvent>(StashStreamId(found - kStreamNames.begin()), StashLabel{"", {}});
             event->mark = std::move(mark);
             event->python_label = std::move(label);
             event->capture = capture;
             return event;
           }),
           py::arg("stream"), py::arg("mark"), py::arg("label"), py::arg("capture") = 0)
      .def_property_readonly("stream", [](const StashEvent& e) { return kStreamNames[size_t(e.stream)]; })
      .def_readonly("capture", &StashEvent::capture)
      .def_property_readonly("label", label_of)
      .def_property_readonly("mark", [](const StashEvent& e) { return e.mark ? e.mark : py::none(); });
  py::class_<StashWork>(m, "StashWork")
      .def("__call__",
           wrapped([](const StashWork& work, int64_t stream) { work.start(reinterpret_cast<te_stream>(stream)); }))
      .def_readonly("segments", &StashWork::segments);
  py::class_<StashStreams, PyStashStreams, std::shared_ptr<StashStreams>>(m, "StashStreams")
      .def(py::init<const at::Device&>(), py::arg("device"))
      .def("current", [](const StashStreams& streams) { return reinterpret_cast<int64_t>(streams.current()); })
      .def_property_readonly("device", &StashStreams::device)
      .def_readwrite("log", &StashStreams::log);
}

}  // namespace te_torch
