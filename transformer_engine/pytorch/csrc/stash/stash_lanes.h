// The streams that a stash copies on, and who waits for whom. What is copied, and behind what, is stash_calls.h's.
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

namespace te_torch {

struct StashPiece;

enum class StashLane : uint8_t { kStore, kLoad, kCompute };

// What is given to a lane, for who reads a log: a verb, and of which group, where there is one.
struct StashWords {
  const char* verb;
  pybind11::object group;

  std::string str() const;
};

// Events that were waited for are recorded again. Those of captures are a graph's: they are kept by themselves.
class StashEvents {
 public:
  c10::Event take(c10::DeviceType type, bool captured);
  void give(c10::Event event, bool captured) { free_[captured].push_back(std::move(event)); }

 private:
  std::array<std::vector<c10::Event>, 2> free_;
};

// A place in a lane: what was given to it so far.
struct StashPoint {
  StashPoint(StashLane in, StashWords words) : lane(in), what(std::move(words)) {}
  ~StashPoint();
  StashPoint(const StashPoint&) = delete;
  StashPoint& operator=(const StashPoint&) = delete;

  StashLane lane;
  StashWords what;
  std::string said;  // by lanes of Python, instead of `what`
  bool captured = false;
  bool over = false;                // whatever waits for it is behind it
  uint8_t passed = 0;               // lanes that are behind it, one bit each
  std::optional<c10::Event> event;  // none: nothing has to be waited for
  std::shared_ptr<StashEvents> events;
  pybind11::object mark;  // of lanes of Python
};
using StashPointPtr = std::shared_ptr<StashPoint>;

// A copy that is to be started on a stream. pieces: memory that it reads or writes.
struct StashWork {
  std::function<void(te_stream)> start;
  std::vector<std::shared_ptr<StashPiece>> pieces;  // for lanes of Python alone
};

// A capture waits for points of its own alone, and so does what is outside of captures: what was given before a capture
// is done when its graph is replayed, and a graph has joined its lanes when it ends. Where several graphs are captured
// one behind the other, end_capture() says so before each ends: they are replayed in this order.
//
// Work runs in the lane that it is given to, behind the points named with it, and gives a point itself. On the CPU it
// runs at once. Tests derive lanes in Python.
class StashLanes {
 public:
  explicit StashLanes(const at::Device& device) : device_(indexed(device)) {}
  virtual ~StashLanes() = default;
  StashLanes(const StashLanes&) = delete;
  StashLanes& operator=(const StashLanes&) = delete;

  virtual StashPointPtr now(const char* what);  // what the current stream has been given so far
  // Points may be null.
  virtual StashPointPtr run(StashLane lane, const StashWork& work, StashWords what,
                            std::initializer_list<const StashPointPtr*> behind);
  virtual void wait(const StashPointPtr& point);  // the current stream waits for it
  void end_capture();                             // its lanes are joined: no later capture waits for a point of it
  virtual bool wants_pieces() const { return false; }

  te_stream current() const;
  const at::Device& device() const { return device_; }
  pybind11::object log = pybind11::none();  // told each call, where it is a list

 private:
  c10::Stream current_stream() const { return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_); }
  StashPointPtr point(StashLane lane, const c10::Stream& stream, StashWords what, bool captured);

 protected:
  const StashPointPtr& noted(const StashPointPtr& point);  // of a capture's, for its end

 private:
  at::Device device_;
  std::array<std::optional<c10::Stream>, 2> streams_;
  std::vector<std::weak_ptr<StashPoint>> captured_;
  std::shared_ptr<StashEvents> events_ = std::make_shared<StashEvents>();
};

}  // namespace te_torch
