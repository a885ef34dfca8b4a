// What a channel does with words and rows, on the CPU (peer.cpp) or on CUDA streams (peer.cu). What the words mean is
// the channel's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transformer_engine/transformer_engine.h"

namespace te::comm {

// A word, what stands beside it, and the value that is awaited; behind the wait the word is 0 again.
struct Awaited {
  uint32_t *value, *wants, *timed;
  uint32_t wanted;
};

// lane: the copy lane of the channel, whose stream `stream` is not looked at.
class Verbs {
 public:
  virtual ~Verbs() = default;
  virtual void follow(te_stream stream) = 0;
  virtual void join(te_stream stream) = 0;
  virtual void copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
                    int64_t rows) = 0;
  virtual void set(bool lane, te_stream stream, uint32_t* value, uint32_t to) = 0;
  virtual void wait(bool lane, te_stream stream, const Awaited& what) = 0;
  virtual void poison(void* data, size_t bytes, uint32_t* failed, te_stream stream) = 0;
  // Nothing of all this is under way, or may come again with a graph.
  virtual bool idle() const = 0;
};

namespace cuda {
std::unique_ptr<Verbs> peer_verbs(int32_t device, void* words, size_t bytes);
}

}  // namespace te::comm
