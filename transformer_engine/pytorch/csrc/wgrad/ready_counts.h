// How often the gradients of a bucket group's parameters are ready in a step: the group's reduction starts when each is
// as often as in the first step. Gates (grad_gate.h) and register_grad_ready() count.
// - Gates call it on the threads of a backward, without the GIL. No call waits for the GIL.
#pragma once

#include <pybind11/pybind11.h>
#include <transformer_engine/transformer_engine.h>

#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

namespace te_torch {

class ReadyCounts {
 public:
  enum class Outcome { kWaits, kComplete, kTooOften };

  // overlaps: whether reductions start inside a backward. may_be_unused: whether a parameter may be ready more or less
  // often than in the first step. has_streams: whether gradients are made on streams of a GPU.
  ReadyCounts(size_t parameters, bool overlaps, bool may_be_unused, bool has_streams)
      : overlaps_(overlaps), may_be_unused_(may_be_unused), has_streams_(has_streams), left_(parameters) {}

  // A gradient of the parameter was added to its main_grad by work on that stream.
  Outcome count(size_t number, te_stream stream);
  // The same for what autograd's accumulator of the parameter would report later in that backward, which autograd has
  // numbered: come_ahead() gives true once for it. A backward that raises before leaves it behind.
  Outcome count_ahead(size_t number, te_stream stream, int backward);
  bool come_ahead(size_t number, int backward);
  // count(), unless come_ahead().
  Outcome count_once(size_t number, te_stream stream, int backward);
  // The group's reduction waits for that stream.
  void note_producer(te_stream stream);

  // A step begins: it counts down from the numbers of expect(), or before that up from 0.
  void begin();
  void expect(std::vector<int64_t> counts);

  bool is_ready() const;
  // How often each is still to be ready; before expect(), how often it was.
  std::vector<int64_t> left() const;
  // The streams of the gradients since the last call.
  std::vector<te_stream> take_streams();
  // When a parameter was last ready before expect(), as a number that rises over all groups; 0: not in this step.
  int64_t last() const;
  bool is_counted() const;    // a gradient of a synchronized backward is there
  bool is_held_back() const;  // one of a microbatch before the last is there

  std::atomic<bool> is_last_microbatch{true};
  std::atomic<bool> accumulates{true};  // whether gradients may be added: they are neither being reduced nor reduced

 private:
  // Under the lock.
  Outcome counted(size_t number, te_stream stream);
  Outcome counted_or_held(size_t number, te_stream stream);
  bool took_ahead(size_t number, int backward);
  void add_producer(te_stream stream);
  bool ready() const;

  const bool overlaps_, may_be_unused_, has_streams_;
  mutable std::mutex mutex_;
  std::vector<int64_t> expected_;  // empty: to be measured
  std::vector<int64_t> left_;
  std::vector<std::pair<size_t, int>> ahead_;  // parameter, backward
  int64_t total_ = 0, last_ = 0;
  bool is_counted_ = false, is_held_back_ = false;
  std::vector<te_stream> streams_;
};

void register_ready_counts(pybind11::module_& m);

}  // namespace te_torch
