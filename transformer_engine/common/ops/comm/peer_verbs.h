// The operations of a channel on words and rows, on the CPU (peer_cpu.cpp) or on CUDA streams (peer.cu).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transformer_engine/transformer_engine.h"

namespace te::comm {

// One rank's view of one peer at one slot. The owner's streams await `arrived` and `freed`, which the peer's streams
// set. wants_*: the value that the owner waits for, or has waited for while the word has that value; 0 for none. With
// kSeen the watching thread has seen this wait, so that two waits for the same value are not taken for one long wait.
struct alignas(64) Line {
  uint32_t arrived, expected_arrived;
  uint32_t freed, expected_freed;
};
constexpr uint32_t kSeen = 1U << 31;  // never in an awaited word
constexpr uint32_t kFree = 1;         // the value of `freed`

// A word, and its companion word.
struct Awaited {
  uint32_t *value, *expected;
};

// Adjacent elements of a list: std::span, which CUDA files do not have.
template <class T>
struct Part {
  const T* first;
  size_t count;
  const T* begin() const { return first; }
  const T* end() const { return first + count; }
  size_t size() const { return count; }
};

// on_copy_stream: on the copy stream of the channel instead of `stream`. Several words are one operation of a stream.
// Order: streams may share a queue of the device, in which a wait blocks all work that was enqueued after it. So a wait
// is enqueued after all work of this rank that has to happen before it can end, through the peers too: pushes and the
// words of a call before its waits, and a wait for a free slot directly before the first push there, after the
// computation of the rows.
class Verbs {
 public:
  virtual ~Verbs() = default;
  virtual void follow(te_stream stream) = 0;
  virtual void join(int32_t slot, te_stream stream) = 0;
  virtual void copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
                    int64_t rows) = 0;
  // The same into this rank's own slot, concurrently with the copy stream; wait_own: later work of `stream` waits for
  // it.
  virtual void copy_own(int32_t slot, void* target, size_t target_pitch, const void* source, size_t source_pitch,
                        size_t row_bytes, int64_t rows) = 0;
  virtual void wait_own(int32_t slot, te_stream stream) = 0;
  virtual void set(bool on_copy_stream, te_stream stream, Part<uint32_t*> values, uint32_t to) = 0;
  // For all words to have the value `wanted`. They are 0 afterwards.
  virtual void wait(bool on_copy_stream, te_stream stream, Part<Awaited> all, uint32_t wanted) = 0;
  virtual void poison(void* data, size_t bytes, const uint32_t* failed, te_stream stream) = 0;
  // None of these operations is in flight, or can be repeated by a graph.
  virtual bool idle() const = 0;
};

namespace cuda {
std::unique_ptr<Verbs> peer_verbs(int32_t device, void* words, size_t bytes);
}

}  // namespace te::comm
