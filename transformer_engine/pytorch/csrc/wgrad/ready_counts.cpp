// See ready_counts.h.
#include "wgrad/ready_counts.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace te_torch {

namespace {

std::atomic<int64_t> measured{0};  // of all groups

}  // namespace

ReadyCounts::Outcome ReadyCounts::counted(size_t number, te_stream stream) {
  is_counted_ = true;
  if (!overlaps_) return Outcome::kWaits;
  add_producer(stream);
  if (expected_.empty()) {
    ++left_[number];
    last_ = ++measured;
    return Outcome::kWaits;
  }
  --total_;
  if (--left_[number] < 0 && !may_be_unused_) return Outcome::kTooOften;
  return ready() ? Outcome::kComplete : Outcome::kWaits;
}

ReadyCounts::Outcome ReadyCounts::counted_or_held(size_t number, te_stream stream) {
  if (!is_last_microbatch.load()) {
    is_held_back_ = true;
    return Outcome::kWaits;
  }
  return counted(number, stream);
}

ReadyCounts::Outcome ReadyCounts::count(size_t number, te_stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return counted_or_held(number, stream);
}

ReadyCounts::Outcome ReadyCounts::count_ahead(size_t number, te_stream stream, int backward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!overlaps_ || !is_last_microbatch.load()) return Outcome::kWaits;
  ahead_.emplace_back(number, backward);
  return counted(number, stream);
}

bool ReadyCounts::took_ahead(size_t number, int backward) {
  const auto found = std::find(ahead_.begin(), ahead_.end(), std::pair(number, backward));
  if (found == ahead_.end()) return false;
  ahead_.erase(found);
  return true;
}

bool ReadyCounts::come_ahead(size_t number, int backward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return took_ahead(number, backward);
}

ReadyCounts::Outcome ReadyCounts::count_once(size_t number, te_stream stream, int backward) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return took_ahead(number, backward) ? Outcome::kWaits : counted_or_held(number, stream);
}

void ReadyCounts::note_producer(te_stream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  add_producer(stream);
}

void ReadyCounts::add_producer(te_stream stream) {
  if (!has_streams_) return;  // the default stream of a GPU is null too
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

void ReadyCounts::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (expected_.empty()) {
    std::fill(left_.begin(), left_.end(), 0);
  } else {
    left_ = expected_;
  }
  ahead_.clear();
  total_ = std::accumulate(left_.begin(), left_.end(), int64_t{0});
  last_ = 0;
  is_counted_ = is_held_back_ = false;
}

void ReadyCounts::expect(std::vector<int64_t> counts) {
  const std::lock_guard<std::mutex> lock(mutex_);
  TORCH_CHECK_VALUE(counts.size() == left_.size(), "ReadyCounts: argument 'counts' has ", counts.size(),
                    " numbers, wanted ", left_.size(), ".");
  expected_ = std::move(counts);
}

bool ReadyCounts::ready() const {
  if (expected_.empty() || total_ > 0) return false;
  return !may_be_unused_ || std::all_of(left_.begin(), left_.end(), [](int64_t left) { return left <= 0; });
}

bool ReadyCounts::is_ready() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return ready();
}

std::vector<int64_t> ReadyCounts::left() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return left_;
}

std::vector<te_stream> ReadyCounts::take_streams() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(streams_, {});
}

int64_t ReadyCounts::last() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_;
}

bool ReadyCounts::is_counted() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_counted_;
}

bool ReadyCounts::is_held_back() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return is_held_back_;
}

namespace {

template <std::atomic<bool> ReadyCounts::*flag>
void def_flag(pybind11::class_<ReadyCounts, std::shared_ptr<ReadyCounts>>& type, const char* name) {
  type.def_property(
      name, [](const ReadyCounts& counts) { return (counts.*flag).load(); },
      [](ReadyCounts& counts, bool value) { (counts.*flag).store(value); });
}

}  // namespace

// Streams are the raw handles that torch's cuda_stream has.
void register_ready_counts(pybind11::module_& m) {
  namespace py = pybind11;
  py::class_<ReadyCounts, std::shared_ptr<ReadyCounts>> type(
      m, "ReadyCounts", "How often the gradients of a bucket group's parameters are ready in a step.");
  type.def(py::init<size_t, bool, bool, bool>(), py::kw_only(), py::arg("parameters"), py::arg("overlaps"),
           py::arg("may_be_unused"), py::arg("has_streams"))
      .def(
          "count",
          [](ReadyCounts& counts, size_t number, uintptr_t stream) {
            return counts.count(number, reinterpret_cast<te_stream>(stream)) == ReadyCounts::Outcome::kComplete;
          },
          py::arg("number"), py::arg("stream"), "Whether this makes the group complete.")
      .def("begin", &ReadyCounts::begin)
      .def("expect", torch::wrap_pybind_function(&ReadyCounts::expect), py::arg("counts"))
      .def("take_streams",
           [](ReadyCounts& counts) {
             std::vector<uintptr_t> handles;
             for (te_stream stream : counts.take_streams()) handles.push_back(reinterpret_cast<uintptr_t>(stream));
             return handles;
           })
      .def_property_readonly("is_ready", &ReadyCounts::is_ready)
      .def_property_readonly("left", &ReadyCounts::left)
      .def_property_readonly("last", &ReadyCounts::last)
      .def_property_readonly("is_counted", &ReadyCounts::is_counted)
      .def_property_readonly("is_held_back", &ReadyCounts::is_held_back);
  def_flag<&ReadyCounts::is_last_microbatch>(type, "is_last_microbatch");
  def_flag<&ReadyCounts::accumulates>(type, "accumulates");
}

}  // namespace te_torch
