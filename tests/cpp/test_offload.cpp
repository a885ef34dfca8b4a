// offload through the C API, on every device here: bytes come back as they left, each state takes its own calls alone,
// and the six waits: with one of them left out, the trace has two accesses that nothing orders.
// Mutant: drop the RELOADED wait of Layer::wait_reload (machine.h) and EveryWaitOrdersSomething turns red.
#include "transformer_engine/offload.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "device_buffer.h"

namespace te {
namespace {

using testing::Buffer;
using Bytes = std::vector<unsigned char>;
using Storage = Buffer<unsigned char>;

Bytes pattern(size_t bytes, int seed) {
  Bytes values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<unsigned char>((i * 131 + size_t(seed) * 17) % 251);
  return values;
}

// Streams of tests: names on the CPU; on CUDA everything is on the default stream, which orders more than they do.
te_stream named(int32_t device, int number) {
  static char names[8];
  return device == TE_DEVICE_CPU ? static_cast<te_stream>(names + number) : nullptr;
}

struct Engine {
  explicit Engine(int32_t device, size_t limit = 0, uint32_t left_out = 0) {
    te_offload_options options{};
    options.device = device;
    options.pinned_limit = limit;
    options.debug = 1;
    options.trace = 1;
    options.left_out = left_out;
    TE_EXPECT_OK(te_offload_engine_create(options, &handle));
  }
  ~Engine() { TE_EXPECT_OK(te_offload_engine_destroy(handle)); }
  te_offload_usage usage() const {
    te_offload_usage usage{};
    TE_EXPECT_OK(te_offload_get_usage(handle, &usage));
    return usage;
  }
  std::vector<te_offload_step> trace() const {
    int64_t count = 0;
    TE_EXPECT_OK(te_offload_get_trace(handle, 0, 0, nullptr, &count));
    std::vector<te_offload_step> steps(static_cast<size_t>(count));
    TE_EXPECT_OK(te_offload_get_trace(handle, 0, count, steps.data(), &count));
    return steps;
  }
  te_offload_engine* handle = nullptr;
};

struct Layer {
  explicit Layer(const Engine& engine, bool retain = false) {
    TE_EXPECT_OK(te_offload_layer_create(engine.handle, retain, &handle));
  }
  ~Layer() { TE_EXPECT_OK(te_offload_layer_destroy(handle)); }
  te_offload_state state() const { return te_offload_layer_state(handle); }
  te_offload_layer* handle = nullptr;
};

// The pieces of one layer on the device, with the patterns that they hold.
struct Pieces {
  Pieces(int32_t device, const std::vector<size_t>& sizes, bool filled) : sizes(sizes) {
    for (size_t i = 0; i < sizes.size(); ++i) {
      memory.push_back(std::make_unique<Storage>(device, 1, int64_t(sizes[i])));
      if (filled) memory.back()->fill(pattern(sizes[i], int(i)));
      spans.push_back({memory.back()->data(), sizes[i]});
    }
  }
  void expect_patterns() const {
    for (size_t i = 0; i < sizes.size(); ++i) {
      EXPECT_TRUE(memory[i]->read() == pattern(sizes[i], int(i))) << "piece " << i << " of " << sizes[i] << " bytes";
      EXPECT_TRUE(memory[i]->padding_untouched()) << "piece " << i;
    }
  }
  void poison() {
    for (auto& m : memory) m->poison();
  }
  std::vector<size_t> sizes;
  std::vector<std::unique_ptr<Storage>> memory;
  std::vector<te_offload_piece> spans;
};

void start(const Layer& layer, const Pieces& pieces, std::unique_ptr<Storage>& staging, int32_t device,
           te_stream stream, const int64_t* marks = nullptr) {
  size_t bytes = 0;
  const auto count = int64_t(pieces.sizes.size());
  TE_ASSERT_OK(te_offload_prepare(layer.handle, pieces.sizes.data(), count, stream, &bytes));
  if (bytes != 0) staging = std::make_unique<Storage>(device, 1, int64_t(bytes));
  TE_ASSERT_OK(
      te_offload_start(layer.handle, pieces.spans.data(), marks, count, staging ? staging->data() : nullptr, stream));
}

class Offload : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Devices, Offload, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(Offload, PackedPiecesComeBack) {
  for (const auto& sizes : std::vector<std::vector<size_t>>{
           {}, {0}, {1}, {16384, 16385}, {255, 256, 257, 0, 100000, 3}, std::vector<size_t>(200, 77)}) {
    const Pieces from(GetParam(), sizes, true);
    const size_t bytes = te_offload_packed_bytes(sizes.data(), int64_t(sizes.size()));
    const Storage packed(GetParam(), 1, int64_t(bytes));
    TE_ASSERT_OK(te_offload_pack(from.spans.data(), int64_t(sizes.size()), packed.data(), GetParam(), nullptr));
    const Bytes flat = packed.read();
    size_t offset = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Bytes wanted = pattern(sizes[i], int(i));
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), flat.begin() + int64_t(offset))) << "piece " << i;
      offset += (sizes[i] + 255) / 256 * 256;
    }
    const Pieces to(GetParam(), sizes, false);
    TE_ASSERT_OK(te_offload_unpack(packed.data(), to.spans.data(), int64_t(sizes.size()), GetParam(), nullptr));
    to.expect_patterns();
  }
}

TEST_P(Offload, UnalignedPiecesAreMovedByteByByte) {
  const Storage from(GetParam(), 1, 1001), to(GetParam(), 1, 1001), packed(GetParam(), 1, 1024);
  const Bytes values = pattern(1001, 5);
  const_cast<Storage&>(from).fill(values);
  const te_offload_piece source{from.data() + 1, 1000}, target{to.data() + 1, 1000};
  TE_ASSERT_OK(te_offload_pack(&source, 1, packed.data(), GetParam(), nullptr));
  TE_ASSERT_OK(te_offload_unpack(packed.data(), &target, 1, GetParam(), nullptr));
  const Bytes got = to.read();
  EXPECT_EQ(got[0], testing::kPoison);
  EXPECT_TRUE(std::equal(got.begin() + 1, got.end(), values.begin() + 1));
}

TEST_P(Offload, BytesComeBackAsTheyLeft) {
  const Engine engine(GetParam());
  const Layer layer(engine);
  const size_t large = 3 << 20;
  for (const auto& sizes : std::vector<std::vector<size_t>>{
           {}, {1}, {large}, {large, large + 1}, {300, large, 0, 4096, 2 << 20, 17}, {5, 6, 7}}) {
    Pieces from(GetParam(), sizes, true);
    std::unique_ptr<Storage> staging;
    start(layer, from, staging, GetParam(), nullptr);
    EXPECT_EQ(layer.state(), TE_OFFLOAD_STARTED);
    TE_ASSERT_OK(te_offload_join(layer.handle, nullptr));
    TE_ASSERT_OK(te_offload_release(layer.handle, nullptr));
    from.poison();
    if (staging) staging->poison();
    for (int again = 0; again < 2; ++again) {  // a retained graph goes back twice
      const Pieces to(GetParam(), sizes, false);
      TE_ASSERT_OK(te_offload_start_reload(layer.handle, to.spans.data(), int64_t(sizes.size()),
                                           staging ? staging->data() : nullptr, nullptr));
      TE_ASSERT_OK(te_offload_wait_reload(layer.handle, nullptr));
      to.expect_patterns();
      TE_ASSERT_OK(te_offload_park(layer.handle, nullptr));
      EXPECT_EQ(layer.state(), TE_OFFLOAD_FINISHED);
    }
    TE_ASSERT_OK(te_offload_reset(layer.handle, nullptr));
    EXPECT_EQ(engine.usage().used, 0u);
  }
}

TEST_P(Offload, EachStateTakesItsOwnCalls) {
  const Engine engine(GetParam());
  const char* calls[] = {"mark", "prepare", "start", "join", "release", "start_reload", "wait_reload", "park"};
  const te_offload_state wanted[] = {TE_OFFLOAD_NOT_OFFLOADED,  TE_OFFLOAD_NOT_OFFLOADED, TE_OFFLOAD_NOT_OFFLOADED,
                                     TE_OFFLOAD_STARTED,        TE_OFFLOAD_STARTED,       TE_OFFLOAD_FINISHED,
                                     TE_OFFLOAD_RELOAD_STARTED, TE_OFFLOAD_RELOAD_STARTED};
  for (int state = TE_OFFLOAD_NOT_OFFLOADED; state <= TE_OFFLOAD_RELOAD_STARTED; ++state) {
    for (int call = 0; call < 8; ++call) {
      const Layer layer(engine);
      Pieces pieces(GetParam(), {64}, true);
      std::unique_ptr<Storage> staging;
      const auto reload = [&] {
        return te_offload_start_reload(layer.handle, pieces.spans.data(), 1, nullptr, nullptr);
      };
      if (state >= TE_OFFLOAD_STARTED) start(layer, pieces, staging, GetParam(), nullptr);
      if (state >= TE_OFFLOAD_FINISHED) {
        TE_ASSERT_OK(te_offload_release(layer.handle, nullptr));
      }
      if (state >= TE_OFFLOAD_RELOAD_STARTED) {
        TE_ASSERT_OK(reload());
      }
      if (wanted[call] == state) continue;
      int64_t mark = 0;
      size_t bytes = 0;
      te_status status = TE_SUCCESS;
      if (call == 0) status = te_offload_mark(layer.handle, nullptr, &mark);
      if (call == 1) status = te_offload_prepare(layer.handle, pieces.sizes.data(), 1, nullptr, &bytes);
      if (call == 2) status = te_offload_start(layer.handle, pieces.spans.data(), nullptr, 1, nullptr, nullptr);
      if (call == 3) status = te_offload_join(layer.handle, nullptr);
      if (call == 4) status = te_offload_release(layer.handle, nullptr);
      if (call == 5) status = reload();
      if (call == 6) status = te_offload_wait_reload(layer.handle, nullptr);
      if (call == 7) status = te_offload_park(layer.handle, nullptr);
      EXPECT_EQ(status, TE_RUNTIME_ERROR) << calls[call] << " in state " << state;
      const std::string message = te_last_error();
      for (const std::string& word :
           {std::string("te_offload_") + calls[call], std::string(te_offload_state_name(te_offload_state(state))),
            std::string(te_offload_state_name(wanted[call]))}) {
        EXPECT_NE(message.find(word), std::string::npos) << "'" << word << "' is not in: " << message;
      }
      EXPECT_EQ(layer.state(), state);
    }
  }
  const Layer layer(engine);
  EXPECT_EQ(te_offload_start(layer.handle, nullptr, nullptr, 0, nullptr, nullptr), TE_RUNTIME_ERROR);
  EXPECT_NE(std::string(te_last_error()).find("prepare"), std::string::npos);
}

TEST_P(Offload, ExhaustedMemoryNamesTheSizesAndChangesNothing) {
  const Engine engine(GetParam(), 4 << 20);
  const Layer layer(engine);
  const size_t sizes[] = {6 << 20};
  size_t staging = 0;
  ASSERT_EQ(te_offload_reserve(engine.handle, 6 << 20), TE_PINNED_MEMORY);
  ASSERT_EQ(te_offload_prepare(layer.handle, sizes, 1, nullptr, &staging), TE_PINNED_MEMORY);
  const std::string message = te_last_error();
  for (const char* word : {"pinned memory exhausted", "6291456", "4194304"}) {
    EXPECT_NE(message.find(word), std::string::npos) << message;
  }
  EXPECT_EQ(layer.state(), TE_OFFLOAD_NOT_OFFLOADED);
  const size_t smaller[] = {4 << 20};
  TE_EXPECT_OK(te_offload_prepare(layer.handle, smaller, 1, nullptr, &staging));
}

TEST_P(Offload, TheArenaIsAllocatedOnce) {
  const Engine engine(GetParam());
  TE_ASSERT_OK(te_offload_reserve(engine.handle, 5 << 20));
  const size_t reserved = engine.usage().reserved;
  EXPECT_GE(reserved, size_t(5) << 20);
  {
    const Layer kept(engine, true);
    const Pieces pieces(GetParam(), {1 << 20, 3 << 20}, true);
    for (int step = 0; step < 50; ++step) {
      std::unique_ptr<Storage> staging;
      const Layer passing(engine);
      start(step % 2 ? kept : passing, pieces, staging, GetParam(), nullptr);
      TE_ASSERT_OK(te_offload_reset((step % 2 ? kept : passing).handle, nullptr));
    }
    EXPECT_LE(engine.usage().reserved, reserved + (4 << 20));
    EXPECT_EQ(engine.usage().slots, 1);  // what `kept` retains
    EXPECT_EQ(engine.usage().used, size_t(4) << 20);
  }
  EXPECT_EQ(engine.usage().used, 0u);
  EXPECT_EQ(engine.usage().peak, size_t(8) << 20);
  TE_ASSERT_OK(te_offload_trim(engine.handle));
  EXPECT_EQ(engine.usage().reserved, 0u);
}

TEST_P(Offload, BadArgumentsAreNamed) {
  const Engine engine(GetParam());
  const Layer layer(engine);
  const Pieces pieces(GetParam(), {64}, true);
  size_t staging = 0;
  EXPECT_EQ(te_offload_prepare(nullptr, nullptr, 0, nullptr, &staging), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_offload_prepare(layer.handle, nullptr, 2, nullptr, &staging), TE_INVALID_ARGUMENT);
  TE_ASSERT_OK(te_offload_prepare(layer.handle, pieces.sizes.data(), 1, nullptr, &staging));
  EXPECT_EQ(te_offload_start(layer.handle, pieces.spans.data(), nullptr, 0, nullptr, nullptr), TE_INVALID_ARGUMENT);
  const te_offload_piece wrong{pieces.spans[0].data, 63};
  EXPECT_EQ(te_offload_start(layer.handle, &wrong, nullptr, 1, nullptr, nullptr), TE_INVALID_ARGUMENT);
  const int64_t mark = 4;
  EXPECT_EQ(te_offload_start(layer.handle, pieces.spans.data(), &mark, 1, nullptr, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_offload_engine_destroy(engine.handle), TE_INVALID_ARGUMENT);  // a layer is there
  te_offload_options options{};
  options.device = -3;
  te_offload_engine* none = nullptr;
  EXPECT_EQ(te_offload_engine_create(options, &none), TE_INVALID_ARGUMENT);
}

TEST_P(Offload, WhereAResultGoesMustBeSomewhere) {
  const Engine engine(GetParam());
  const Layer layer(engine);
  const size_t size = 64;
  te_stream stream = nullptr;
  te_offload_step step{};
  int64_t count = 0;
  const auto refused = [](const char* argument, te_status status) {
    EXPECT_EQ(status, TE_INVALID_ARGUMENT) << argument;
    EXPECT_NE(std::string(te_last_error()).find(argument), std::string::npos) << te_last_error();
  };
  refused("'out'", te_offload_engine_create(te_offload_options{}, nullptr));
  refused("'out'", te_offload_layer_create(engine.handle, 0, nullptr));
  refused("'out'", te_offload_get_usage(engine.handle, nullptr));
  refused("'d2h'", te_offload_streams(engine.handle, nullptr, &stream));
  refused("'h2d'", te_offload_streams(engine.handle, &stream, nullptr));
  refused("'count'", te_offload_get_trace(engine.handle, 0, 0, nullptr, nullptr));
  refused("'steps'", te_offload_get_trace(engine.handle, 0, 1, nullptr, &count));
  refused("'most'", te_offload_get_trace(engine.handle, 0, -1, &step, &count));
  refused("'mark'", te_offload_mark(layer.handle, nullptr, nullptr));
  refused("'sizes'", te_offload_prepare(layer.handle, nullptr, 1, nullptr, nullptr));
  refused("'staging'", te_offload_prepare(layer.handle, &size, 1, nullptr, nullptr));
  refused("'staging'", te_offload_staging(layer.handle, nullptr));
  EXPECT_EQ(te_offload_packed_bytes(nullptr, 2), 0u);
  EXPECT_EQ(engine.usage().slots, 0);
}

// ---- the waits, over the trace ----

// Orders the steps of a trace, with accesses of the compute streams put between them, and finds two accesses to the
// same byte, one of them a write, that no chain of stream order and events orders.
class Order {
 public:
  struct Access {
    te_stream stream;
    const void* from;
    const void* to;
    size_t bytes;
    std::map<te_stream, int64_t> clock;
  };

  void access(te_stream stream, const void* from, const void* to, size_t bytes) {
    tick(stream);
    accesses_.push_back({stream, from, to, bytes, clocks_[stream]});
  }
  void follow(const std::vector<te_offload_step>& trace) {
    for (; next_ < trace.size(); ++next_) {
      const te_offload_step& s = trace[next_];
      if (s.kind == TE_OFFLOAD_STEP_COPY) access(s.stream, s.from, s.to, s.bytes);
      if (s.kind == TE_OFFLOAD_STEP_RECORD) events_[s.event] = clocks_[s.stream];
      if (s.kind == TE_OFFLOAD_STEP_WAIT) {
        for (const auto& [stream, time] : events_.at(s.event)) {
          auto& mine = clocks_[s.stream][stream];
          mine = std::max(mine, time);
        }
      }
    }
  }
  bool races() const {
    for (size_t i = 0; i < accesses_.size(); ++i) {
      for (size_t j = i + 1; j < accesses_.size(); ++j) {
        const Access &a = accesses_[i], &b = accesses_[j];
        const bool conflict = overlap(a.to, a.bytes, b.to, b.bytes) || overlap(a.to, a.bytes, b.from, b.bytes) ||
                              overlap(a.from, a.bytes, b.to, b.bytes);
        const auto seen = b.clock.find(a.stream);
        if (conflict && (seen == b.clock.end() || seen->second < a.clock.at(a.stream))) return true;
      }
    }
    return false;
  }

 private:
  static bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
    if (a == nullptr || b == nullptr) return false;
    const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
    return x < y + b_bytes && y < x + a_bytes;
  }
  void tick(te_stream stream) { ++clocks_[stream][stream]; }

  std::map<te_stream, std::map<te_stream, int64_t>> clocks_;
  std::map<int64_t, std::map<te_stream, int64_t>> events_;
  std::vector<Access> accesses_;
  size_t next_ = 0;
};

// Two steps of one layer. `back`: the compute stream of the way back, another one than the way out's and not ordered
// behind it where two_streams.
bool has_race(uint32_t left_out, bool two_streams, bool marked) {
  const Engine engine(TE_DEVICE_CPU, 0, left_out);
  const Layer layer(engine);
  const std::vector<size_t> sizes{3 << 20, 4096, 4096};
  // Nothing is freed before the end: an address stands for one piece of memory.
  std::vector<std::unique_ptr<Pieces>> pieces;
  std::vector<std::unique_ptr<Storage>> stagings;
  const auto make = [&](bool filled) {
    pieces.push_back(std::make_unique<Pieces>(TE_DEVICE_CPU, sizes, filled));
    return pieces.back().get();
  };
  Pieces *out = make(true), *back = make(false);
  Order order;
  const auto touch = [&](te_stream stream, const Pieces& p, bool write) {
    for (const auto& span : p.spans) {
      order.access(stream, write ? nullptr : span.data, write ? span.data : nullptr, span.bytes);
    }
  };
  for (int step = 0; step < 2; ++step) {
    // Where two streams take part each step has its own pair, and its own device memory.
    const te_stream out_stream = named(TE_DEVICE_CPU, two_streams ? 2 * step : 0);
    const te_stream in_stream = named(TE_DEVICE_CPU, two_streams ? 2 * step + 1 : 0);
    const Pieces& from = two_streams ? *make(true) : *out;
    const Pieces& to = two_streams ? *make(false) : *back;
    touch(out_stream, from, true);
    int64_t marks[] = {-1, -1, -1};
    if (marked) {
      TE_EXPECT_OK(te_offload_mark(layer.handle, out_stream, &marks[0]));
    }
    stagings.emplace_back();
    start(layer, from, stagings.back(), TE_DEVICE_CPU, out_stream, marks);
    order.follow(engine.trace());
    TE_EXPECT_OK(te_offload_release(layer.handle, out_stream));
    order.follow(engine.trace());
    touch(out_stream, from, true);  // the memory is somebody else's now
    touch(in_stream, to, true);     // and this one was, until here
    stagings.push_back(std::make_unique<Storage>(TE_DEVICE_CPU, 1, stagings.back()->tensor().cols));
    TE_EXPECT_OK(te_offload_start_reload(layer.handle, to.spans.data(), 3, stagings.back()->data(), in_stream));
    order.follow(engine.trace());
    TE_EXPECT_OK(te_offload_wait_reload(layer.handle, in_stream));
    order.follow(engine.trace());
    touch(in_stream, to, false);
    to.expect_patterns();
    TE_EXPECT_OK(te_offload_reset(layer.handle, in_stream));
    order.follow(engine.trace());
  }
  return order.races();
}

TEST(OffloadWaits, EveryWaitOrdersSomething) {
  for (const bool marked : {false, true}) {
    EXPECT_FALSE(has_race(0, false, marked));
    EXPECT_FALSE(has_race(0, true, marked));
    for (const uint32_t wait :
         {TE_OFFLOAD_WAIT_PRODUCED, TE_OFFLOAD_WAIT_COPIED, TE_OFFLOAD_WAIT_ROOM, TE_OFFLOAD_WAIT_RELOADED}) {
      EXPECT_TRUE(has_race(wait, false, marked)) << "without wait " << wait;
    }
    // On one compute stream these two are there already, by way of it.
    for (const uint32_t wait : {TE_OFFLOAD_WAIT_ON_HOST, TE_OFFLOAD_WAIT_SLOT}) {
      EXPECT_TRUE(has_race(wait, true, marked)) << "without wait " << wait;
    }
  }
}

// On the stream that started the copy too, whose memory it is, wherever the layer is given up (`elsewhere`).
void expect_waits_when_given_up(bool elsewhere) {
  const std::vector<size_t> sizes{4096, 4096};
  for (const bool reloading : {false, true}) {
    for (const uint32_t left_out :
         {uint32_t(0), uint32_t(reloading ? TE_OFFLOAD_WAIT_RELOADED : TE_OFFLOAD_WAIT_COPIED)}) {
      const Engine engine(TE_DEVICE_CPU, 0, left_out);
      const Layer layer(engine);
      const te_stream stream = named(TE_DEVICE_CPU, 0);
      Pieces pieces(TE_DEVICE_CPU, sizes, true);
      std::unique_ptr<Storage> staging;
      start(layer, pieces, staging, TE_DEVICE_CPU, stream);
      if (reloading) {
        TE_ASSERT_OK(te_offload_release(layer.handle, stream));
        TE_ASSERT_OK(te_offload_start_reload(layer.handle, pieces.spans.data(), 2, staging->data(), stream));
      }
      TE_ASSERT_OK(te_offload_reset(layer.handle, elsewhere ? named(TE_DEVICE_CPU, 1) : stream));
      Order order;
      order.follow(engine.trace());
      order.access(stream, nullptr, pieces.spans[0].data, sizes[0]);  // freed, and used again
      EXPECT_EQ(order.races(), left_out != 0) << (reloading ? "reload" : "offload") << ", left out " << left_out;
    }
  }
}

TEST(OffloadWaits, WhatIsGivenUpEarlyIsWaitedFor) {
  expect_waits_when_given_up(false);
  expect_waits_when_given_up(true);
}

}  // namespace
}  // namespace te
