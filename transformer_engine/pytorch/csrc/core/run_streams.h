// Two compute streams that the runs of a GEMM use in turn, so that tiles of the next run fill the last wave of the run
// before.
// - Both streams wait for the calling stream before the first run, and it waits for both after the last one, also in a
//   capture. Memory allocated outside of the runs belongs to the calling stream, memory allocated in a run to its
//   stream.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <optional>

namespace te_torch {

class RunStreams {
 public:
  explicit RunStreams(const c10::Device& device);
  RunStreams(const RunStreams&) = delete;
  RunStreams& operator=(const RunStreams&) = delete;

  // Makes the next run's stream the current one of this thread.
  void turn();
  // Called after the waits of a run were enqueued, as later runs read the same data. Not called for a run without
  // waits, nor for the last one.
  void arrived();
  // Joins the streams and restores the current one. Does nothing without a turn().
  void end();

 private:
  void change_to(const c10::Stream& stream) const;

  const c10::Stream side_;
  std::optional<c10::Stream> caller_;  // between turn() and end()
  bool on_side_ = false;               // whether the current run is on side_
  bool has_arrived_ = false;           // arrived_ was recorded
  c10::Event fork_, arrived_, join_;
};

}  // namespace te_torch
