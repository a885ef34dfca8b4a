// The streams that a stash copies on, and the events between them. stash_calls.h decides what is copied and which
// events a copy waits for.
#pragma once

#include <c10/core/Event.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/common.h"
#include "stash/stash_segments.h"

namespace te_torch {

enum class StashStreamId : uint8_t { kStore, kLoad, kCompute };

// The name of a piece of work in the log: a verb, and the group where there is one.
struct StashLabel {
  const char* verb;
  pybind11::object group;

  std::string str() const;
};

// Device events to record again after their last wait. Events of captures belong to a graph and are pooled apart.
class StashEventPool {
 public:
  c10::Event take(c10::DeviceType type, bool captured);
  void give(c10::Event event, bool captured) { free_[captured].push_back(std::move(event)); }

 private:
  std::array<std::vector<c10::Event>, 2> free_;
};

// Marks the end of the work that a stream had been given when it was recorded.
struct StashEvent {
  StashEvent(StashStreamId id, StashLabel name) : stream(id), label(std::move(name)) {}
  ~StashEvent();
  StashEvent(const StashEvent&) = delete;
  StashEvent& operator=(const StashEvent&) = delete;

  StashStreamId stream;
  StashLabel label;
  std::string python_label;                // of streams derived in Python, in place of `label`
  uint64_t capture = 0;                    // number of the capture that it was recorded in, 0: outside of captures
  uint8_t waited_by = 0;                   // streams that have waited for it, one bit each
  std::optional<c10::Event> device_event;  // none on a CPU
  std::shared_ptr<StashEventPool> pool;
  pybind11::object mark;  // of streams derived in Python
};
using StashEventPtr = std::shared_ptr<StashEvent>;

// A copy to start on a stream. segments: the memory that it reads or writes.
struct StashWork {
  std::function<void(te_stream)> start;
  StashSegments segments;  // filled for streams derived in Python alone
};

// - run() starts work on one of the streams after the events passed to it, and returns an event of its own. On a CPU
//   the work runs at once.
// - Inside a capture, only events of the same capture are waited for, and outside of captures only events of no
//   capture: CUDA refuses any other wait, and none is needed. A graph's replay comes after everything enqueued before
//   it; graphs captured one after another are replayed in that order, and each one joins its copies before it ends.
// - Tests derive streams in Python.
class StashStreams {
 public:
  explicit StashStreams(const at::Device& device) : device_(indexed(device)) {}
  virtual ~StashStreams() = default;
  StashStreams(const StashStreams&) = delete;
  StashStreams& operator=(const StashStreams&) = delete;

  virtual StashEventPtr now(const char* label);  // after the work of the current stream so far
  // Events may be null.
  virtual StashEventPtr run(StashStreamId id, const StashWork& work, StashLabel label,
                            std::initializer_list<const StashEventPtr*> after);
  virtual void wait(const StashEventPtr& event);  // the current stream waits for it
  virtual uint64_t capture() const;               // number of the current stream's capture, 0: of none
  virtual bool needs_segments() const { return false; }

  te_stream current() const;
  const at::Device& device() const { return device_; }
  pybind11::object log = pybind11::none();  // where it is a list, each call is appended

 private:
  c10::Stream current_stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }
  StashEventPtr record(StashStreamId id, const c10::Stream& stream, StashLabel label, uint64_t capture);

  at::Device device_;
  std::array<std::optional<c10::Stream>, 2> streams_;
  std::shared_ptr<StashEventPool> pool_ = std::make_shared<StashEventPool>();
};

}  // namespace te_torch
