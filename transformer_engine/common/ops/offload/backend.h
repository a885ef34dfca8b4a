// The operations that offloading needs of a device: streams, events, copies. The CPU implements them by plain copies,
// CUDA by asynchronous ones; machine.h determines the order of calls.
#pragma once

#include <cstdint>
#include <memory>

#include "core/arena.h"
#include "transformer_engine/offload.h"

namespace te::offload {

using pinned::kAlignment;  // of pieces in packed form, which are in slots
using pinned::round_up;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual te_stream d2h() const = 0;
  virtual te_stream h2d() const = 0;
  virtual uint64_t capture_of(te_stream stream) = 0;  // number of the capture that includes the stream, or 0
  virtual void* create_event() = 0;
  virtual void destroy_event(void* event) = 0;
  virtual void record(void* event, te_stream stream) = 0;
  virtual void wait(te_stream stream, void* event) = 0;
  virtual void wait_on_host(void* event) = 0;
  virtual void copy(void* to, const void* from, size_t bytes, te_stream stream) = 0;
  virtual void pack(const te_offload_piece* pieces, int64_t count, void* packed, te_stream stream) = 0;
  virtual void unpack(const void* packed, const te_offload_piece* pieces, int64_t count, te_stream stream) = 0;
};

namespace cuda {
std::unique_ptr<Backend> make_backend(const te_offload_options& options);
void pack(const te_offload_piece* pieces, int64_t count, void* packed, te_stream stream);
void unpack(const void* packed, const te_offload_piece* pieces, int64_t count, te_stream stream);
}  // namespace cuda

}  // namespace te::offload
