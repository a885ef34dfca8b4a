// Two compute streams of a device, which runs of a product take by turns: tiles of the next run fill the last wave of
// the one before. Both wait for what the calling stream has before the first run, and it waits for both behind the last
// one, in a capture too; so memory is the calling stream's before and behind, and no allocation has to know of the
// other one. What a run allocates for itself is its own stream's.
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

  // From here on this thread's current stream is the next run's.
  void turn();
  // The waits of a run are enqueued: those that follow read what they are for. Not of one that has none, nor of the
  // last.
  void arrived();
  // The current stream is that of before the first turn. Nothing where there was none.
  void end();

 private:
  void change_to(const c10::Stream& stream) const;

  const c10::Stream side_;
  std::optional<c10::Stream> here_;  // while there are turns
  bool beside_ = false;              // whose turn it is
  bool before_ = false;              // a run has noted what arrived
  c10::Event fork_, arrived_, join_;
};

}  // namespace te_torch
