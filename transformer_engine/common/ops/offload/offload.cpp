// offload, contract and CPU path (the specification): the same state machine with synchronous copies.
#include "transformer_engine/offload.h"

#include <algorithm>
#include <cstring>

#include "core/device.h"
#include "core/parallel_for.h"
#include "ops/offload/machine.h"

struct te_offload_engine : te::offload::Engine {
  using Engine::Engine;
};
struct te_offload_layer : te::offload::Layer {
  using Layer::Layer;
};

namespace te::offload {

namespace cpu {

void copy(void* to, const void* from, size_t bytes) {
  constexpr size_t kBlock = size_t(1) << 20;
  parallel_for(int64_t((bytes + kBlock - 1) / kBlock), [&](int64_t block) {
    const size_t first = size_t(block) * kBlock;
    std::memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first,
                std::min(kBlock, bytes - first));
  });
}

// Calls each(piece, its offset in packed form).
template <class Each>
void for_packed(const te_offload_piece* pieces, int64_t count, Each&& each) {
  size_t offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    each(pieces[i], offset);
    offset += round_up(pieces[i].bytes, kAlignment);
  }
}

void pack(const te_offload_piece* pieces, int64_t count, void* packed) {
  for_packed(pieces, count, [&](const te_offload_piece& piece, size_t offset) {
    copy(static_cast<char*>(packed) + offset, piece.data, piece.bytes);
  });
}

void unpack(const void* packed, const te_offload_piece* pieces, int64_t count) {
  for_packed(pieces, count, [&](const te_offload_piece& piece, size_t offset) {
    copy(piece.data, static_cast<const char*>(packed) + offset, piece.bytes);
  });
}

// Streams are names alone, since all work runs in the order of the host.
class HostBackend : public Backend {
 public:
  explicit HostBackend(te_stream stream) : stream_(stream) {}
  te_stream d2h() const override { return stream_ != nullptr ? stream_ : const_cast<char*>(&names_[0]); }
  te_stream h2d() const override { return stream_ != nullptr ? stream_ : const_cast<char*>(&names_[1]); }
  uint64_t capture_of(te_stream) override { return 0; }
  void* create_event() override { return this; }
  void destroy_event(void*) override {}
  void record(void*, te_stream) override {}
  void wait(te_stream, void*) override {}
  void wait_on_host(void*) override {}
  void copy(void* to, const void* from, size_t bytes, te_stream) override { cpu::copy(to, from, bytes); }
  void pack(const te_offload_piece* pieces, int64_t count, void* packed, te_stream) override {
    cpu::pack(pieces, count, packed);
  }
  void unpack(const void* packed, const te_offload_piece* pieces, int64_t count, te_stream) override {
    cpu::unpack(packed, pieces, count);
  }

 private:
  te_stream stream_;
  char names_[2] = {};
};

}  // namespace cpu

namespace {

constexpr const char* kStates[] = {"not_offloaded", "offload_started", "offload_finished", "reload_started"};

void check_count(const char* op, const void* pieces, int64_t count, const char* argument = "pieces") {
  if (count < 0) bad_argument(op, "count", count, "a number >= 0");
  if (pieces == nullptr && count != 0) bad_argument(op, argument, "NULL", concat(count, " of them"));
}

void check_free(const char* op, const te_offload_piece* pieces, int64_t count, const void* packed) {
  check_count(op, pieces, count);
  for (int64_t i = 0; i < count; ++i) {
    if (pieces[i].data == nullptr && pieces[i].bytes != 0) bad_argument(op, "pieces", "NULL", "memory");
  }
  if (packed == nullptr && count != 0) bad_argument(op, "packed", "NULL", "memory");
}

std::unique_ptr<Backend> make_backend(const te_offload_options& options) {
  if (options.device == TE_DEVICE_CPU) return std::make_unique<cpu::HostBackend>(options.stream);
#if defined(TE_WITH_CUDA)
  return cuda::make_backend(options);
#else
  no_cuda("te_offload_engine_create");
#endif
}

// Runs body(engine or layer) under the engine's lock.
template <class Body>
te_status with_engine(const char* op, const te_offload_engine* engine, Body&& body) {
  return c_guard([&] {
    auto& found = const_cast<te_offload_engine&>(object(op, "engine", engine));
    const std::lock_guard<std::mutex> lock(found.mutex);
    body(found);
  });
}

template <class Body>
te_status with_layer(const char* op, te_offload_layer* layer, Body&& body) {
  return c_guard([&] {
    auto& found = object(op, "layer", layer);
    const std::lock_guard<std::mutex> lock(found.engine().mutex);
    body(op, found);
  });
}

}  // namespace

}  // namespace te::offload

extern "C" {

using namespace te::offload;
using te::bad_argument;
using te::c_guard;
using te::check_place;
using te::object;

const char* te_offload_state_name(te_offload_state state) {
  return state >= 0 && state <= TE_OFFLOAD_RELOAD_STARTED ? kStates[state] : nullptr;
}

te_status te_offload_engine_create(te_offload_options options, te_offload_engine** out) {
  return c_guard([&] {
    const char* op = "te_offload_engine_create";
    check_place(op, "out", out);
    if (options.device < TE_DEVICE_CPU) bad_argument(op, "options.device", options.device, "-1 or an ordinal");
    *out = new te_offload_engine(options, make_backend(options));
  });
}

te_status te_offload_engine_destroy(te_offload_engine* engine) {
  return c_guard([&] {
    const char* op = "te_offload_engine_destroy";
    const int64_t layers = object(op, "engine", engine).layers;
    if (layers != 0) bad_argument(op, "engine", te::concat("in use by ", layers, " layers"), "one without");
    delete engine;
  });
}

te_status te_offload_reserve(te_offload_engine* engine, size_t bytes) {
  return with_engine("te_offload_reserve", engine,
                     [&](te_offload_engine& e) { e.arena().reserve("te_offload_reserve", bytes); });
}

te_status te_offload_trim(te_offload_engine* engine) {
  return with_engine("te_offload_trim", engine, [](te_offload_engine& e) { e.arena().trim(); });
}

te_status te_offload_release_captured(te_offload_engine* engine) {
  return with_engine("te_offload_release_captured", engine,
                     [](te_offload_engine& e) { e.release_captured("te_offload_release_captured"); });
}

te_status te_offload_get_usage(const te_offload_engine* engine, te_offload_usage* out) {
  return with_engine("te_offload_get_usage", engine, [&](te_offload_engine& e) {
    check_place("te_offload_get_usage", "out", out);
    *out = e.usage();
  });
}

te_status te_offload_streams(const te_offload_engine* engine, te_stream* d2h, te_stream* h2d) {
  return with_engine("te_offload_streams", engine, [&](te_offload_engine& e) {
    check_place("te_offload_streams", "d2h", d2h);
    check_place("te_offload_streams", "h2d", h2d);
    *d2h = e.backend().d2h();
    *h2d = e.backend().h2d();
  });
}

te_status te_offload_get_trace(const te_offload_engine* engine, int64_t first, int64_t most, te_offload_step* steps,
                               int64_t* count) {
  return with_engine("te_offload_get_trace", engine, [&](te_offload_engine& e) {
    const char* op = "te_offload_get_trace";
    if (first < 0) bad_argument(op, "first", first, "a number >= 0");
    if (most < 0) bad_argument(op, "most", most, "a number >= 0");
    if (most != 0) check_place(op, "steps", steps);
    check_place(op, "count", count);
    *count = int64_t(e.trace().size());
    for (int64_t i = 0; i < most && first + i < *count; ++i) steps[i] = e.trace()[size_t(first + i)];
  });
}

te_status te_offload_layer_create(te_offload_engine* engine, int32_t retain, te_offload_layer** out) {
  return with_engine("te_offload_layer_create", engine, [&](te_offload_engine& e) {
    check_place("te_offload_layer_create", "out", out);
    *out = new te_offload_layer(e, retain != 0);
  });
}

te_status te_offload_layer_destroy(te_offload_layer* layer) {
  const te_status status = with_layer("te_offload_layer_destroy", layer, [](const char*, te_offload_layer& l) {
    if (l.state() != TE_OFFLOAD_NOT_OFFLOADED) l.reset(l.last_stream());
  });
  if (layer == nullptr) return status;
  const std::lock_guard<std::mutex> lock(layer->engine().mutex);
  delete layer;
  return status;
}

te_offload_state te_offload_layer_state(const te_offload_layer* layer) {
  return layer == nullptr ? TE_OFFLOAD_NOT_OFFLOADED : layer->state();
}

te_status te_offload_mark(te_offload_layer* layer, te_stream stream, int64_t* mark) {
  return with_layer("te_offload_mark", layer, [&](const char* op, te_offload_layer& l) {
    check_place(op, "mark", mark);
    *mark = l.mark(op, stream);
  });
}

te_status te_offload_prepare(te_offload_layer* layer, const size_t* sizes, int64_t count, te_stream stream,
                             size_t* staging) {
  return with_layer("te_offload_prepare", layer, [&](const char* op, te_offload_layer& l) {
    check_count(op, sizes, count, "sizes");
    check_place(op, "staging", staging);
    *staging = l.prepare(op, sizes, count, stream);
  });
}

te_status te_offload_staging(te_offload_layer* layer, size_t* staging) {
  return with_layer("te_offload_staging", layer, [&](const char* op, te_offload_layer& l) {
    check_place(op, "staging", staging);
    *staging = l.staging_bytes();
  });
}

te_status te_offload_start(te_offload_layer* layer, const te_offload_piece* pieces, const int64_t* marks, int64_t count,
                           void* staging, te_stream stream) {
  return with_layer("te_offload_start", layer, [&](const char* op, te_offload_layer& l) {
    check_count(op, pieces, count);
    l.start(op, pieces, marks, count, staging, stream);
  });
}

te_status te_offload_join(te_offload_layer* layer, te_stream stream) {
  return with_layer("te_offload_join", layer, [&](const char* op, te_offload_layer& l) { l.join(op, stream); });
}

te_status te_offload_release(te_offload_layer* layer, te_stream stream) {
  return with_layer("te_offload_release", layer, [&](const char* op, te_offload_layer& l) { l.release(op, stream); });
}

te_status te_offload_start_reload(te_offload_layer* layer, const te_offload_piece* pieces, int64_t count, void* staging,
                                  te_stream stream) {
  return with_layer("te_offload_start_reload", layer, [&](const char* op, te_offload_layer& l) {
    check_count(op, pieces, count);
    l.start_reload(op, pieces, count, staging, stream);
  });
}

te_status te_offload_wait_reload(te_offload_layer* layer, te_stream stream) {
  return with_layer("te_offload_wait_reload", layer,
                    [&](const char* op, te_offload_layer& l) { l.wait_reload(op, stream); });
}

te_status te_offload_park(te_offload_layer* layer, te_stream stream) {
  return with_layer("te_offload_park", layer, [&](const char* op, te_offload_layer& l) { l.park(op, stream); });
}

te_status te_offload_reset(te_offload_layer* layer, te_stream stream) {
  return with_layer("te_offload_reset", layer, [&](const char*, te_offload_layer& l) { l.reset(stream); });
}

size_t te_offload_packed_bytes(const size_t* sizes, int64_t count) {
  size_t total = 0;
  for (int64_t i = 0; sizes != nullptr && i < count; ++i) total += round_up(sizes[i], kAlignment);
  return total;
}

te_status te_offload_pack(const te_offload_piece* pieces, int64_t count, void* packed, int32_t device,
                          te_stream stream) {
  return c_guard([&] {
    using namespace te;
    check_free("te_offload_pack", pieces, count, packed);
    const te_tensor where{packed, 1, 1, 1, TE_UINT8, device};
    TE_ON_DEVICE_OF("te_offload_pack", where, cpu::pack(pieces, count, packed),
                    cuda::pack(pieces, count, packed, stream));
  });
}

te_status te_offload_unpack(const void* packed, const te_offload_piece* pieces, int64_t count, int32_t device,
                            te_stream stream) {
  return c_guard([&] {
    using namespace te;
    check_free("te_offload_unpack", pieces, count, packed);
    const te_tensor where{const_cast<void*>(packed), 1, 1, 1, TE_UINT8, device};
    TE_ON_DEVICE_OF("te_offload_unpack", where, cpu::unpack(packed, pieces, count),
                    cuda::unpack(packed, pieces, count, stream));
  });
}

}  // extern "C"
