// The six waits of offload, over the trace of what the engine gives to its streams: with one of them left out, the
// trace has two accesses that nothing orders.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <vector>

#include "offload_case.h"

namespace te {
namespace {

using namespace testing;

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

// Two steps of one layer. `back`: the compute stream of the way back; with two_streams it is another stream than that
// of the way out, and is not ordered after it.
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
    touch(out_stream, from, true);  // the memory has another owner now
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
