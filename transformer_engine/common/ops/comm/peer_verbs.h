// What a channel does with words and rows, on the CPU (peer_cpu.cpp) or on CUDA streams (peer.cu). What the words mean
// is the channel's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transformer_engine/transformer_engine.h"

namespace te::comm {

// One rank's view of one peer at one slot; its owner's streams await `arrived` and `freed`, which the peer's streams
// set. wants_*: what the owner waits for, or has waited for while the word is that, and 0 for nothing; with kSeen the
// watching thread has seen this wait, so that two waits for the same are not one long wait.
struct alignas(64) Line {
  uint32_t arrived, wants_arrived;
  uint32_t freed, wants_freed;
};
constexpr uint32_t kSeen = 1U << 31;  // in no word that is awaited
constexpr uint32_t kFree = 1;         // a word of freed

// A word, what stands beside it, and the value that is awaited.
struct Awaited {
  uint32_t *value, *wants;
  uint32_t wanted;
};

// lane: the copy lane of the channel, whose stream `stream` is not looked at. Several words are one operation of a
// stream.
// Order. Streams may share a queue of the device, in which a wait holds up all that was enqueued behind it. So a wait
// is enqueued behind everything of this rank that has to happen before it can end, through the peers too: pushes and
// the words of a call before its waits, and a wait for a free slot directly ahead of the first push there, behind what
// computes the rows.
class Verbs {
 public:
  virtual ~Verbs() = default;
  virtual void follow(te_stream stream) = 0;
  virtual void join(int32_t slot, te_stream stream) = 0;
  virtual void copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
                    int64_t rows) = 0;
  // The same into this rank's own slot, beside the lane; wait_own: what `stream` has from here on comes behind it.
  virtual void copy_own(int32_t slot, void* target, size_t target_pitch, const void* source, size_t source_pitch,
                        size_t row_bytes, int64_t rows) = 0;
  virtual void wait_own(int32_t slot, te_stream stream) = 0;
  virtual void set(bool lane, te_stream stream, const std::vector<uint32_t*>& values, uint32_t to) = 0;
  // The words are 0 behind it.
  virtual void wait(bool lane, te_stream stream, const std::vector<Awaited>& all) = 0;
  virtual void poison(void* data, size_t bytes, const uint32_t* failed, te_stream stream) = 0;
  // Nothing of all this is under way, or may come again with a graph.
  virtual bool idle() const = 0;
};

namespace cuda {
std::unique_ptr<Verbs> peer_verbs(int32_t device, void* words, size_t bytes);
}

}  // namespace te::comm
