// An offload engine, a layer of it and pieces with patterns, for the suites of offload.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/offload.h"

namespace te::testing {

using Bytes = std::vector<unsigned char>;
using Storage = Buffer<unsigned char>;

inline Bytes pattern(size_t bytes, int seed) {
  Bytes values(bytes);
  for (size_t i = 0; i < bytes; ++i) values[i] = static_cast<unsigned char>((i * 131 + size_t(seed) * 17) % 251);
  return values;
}

// Streams of tests: names on the CPU; on CUDA everything is on the default stream, which orders more than they do.
inline te_stream named(int32_t device, int number) {
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

inline void start(const Layer& layer, const Pieces& pieces, std::unique_ptr<Storage>& staging, int32_t device,
                  te_stream stream, const int64_t* marks = nullptr) {
  size_t bytes = 0;
  const auto count = int64_t(pieces.sizes.size());
  TE_ASSERT_OK(te_offload_prepare(layer.handle, pieces.sizes.data(), count, stream, &bytes));
  if (bytes != 0) staging = std::make_unique<Storage>(device, 1, int64_t(bytes));
  TE_ASSERT_OK(
      te_offload_start(layer.handle, pieces.spans.data(), marks, count, staging ? staging->data() : nullptr, stream));
}

}  // namespace te::testing
