// Memory that virtual ranks push to: pooled buffers, each used by one call at a time. A ScopedBuffer cannot be copied
// and does not outlive the queueing of its call, so that no call refers to memory that the next one overwrites.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "core/error.h"

namespace te::testing {

constexpr int kBufferPoison = 0xff;  // NaN in every float dtype

struct BufferKey {
  int32_t device;
  int64_t group;
  int32_t channel;
  auto operator<=>(const BufferKey&) const = default;
};

// The counters count uses of the buffer.
struct PooledBuffer {
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t(256)); }
  };
  using Memory = std::unique_ptr<char, Free>;

  Memory memory;
  size_t capacity = 0;
  int64_t uses = 0;              // so far
  int64_t freed = 0;             // the last use that has ended while streams ran
  std::vector<int64_t> arrived;  // by rank: the last use that its push was for
  bool in_use = false;           // by a call that is being queued
};

class ScopedBuffer {
 public:
  ScopedBuffer(PooledBuffer& buffer, size_t bytes) : buffer_(&buffer), bytes_(bytes), use_(++buffer.uses) {
    buffer.in_use = true;
  }
  ScopedBuffer(ScopedBuffer&& other) noexcept : buffer_(other.buffer_), bytes_(other.bytes_), use_(other.use_) {
    other.buffer_ = nullptr;
  }
  ScopedBuffer(const ScopedBuffer&) = delete;
  ScopedBuffer& operator=(const ScopedBuffer&) = delete;
  ScopedBuffer& operator=(ScopedBuffer&&) = delete;
  ~ScopedBuffer() {
    if (buffer_ != nullptr) buffer_->in_use = false;
  }

  char* data() const { return buffer_->memory.get(); }
  size_t bytes() const { return bytes_; }
  int64_t use() const { return use_; }
  PooledBuffer& buffer() const { return *buffer_; }

 private:
  PooledBuffer* buffer_;
  size_t bytes_;
  int64_t use_;
};

class BufferPool {
 public:
  explicit BufferPool(int32_t ranks) : ranks_(ranks) {}

  // The key's `count` buffers are used in turn. Memory that is too small stays alive until release_outgrown(), since
  // queued steps still use it.
  ScopedBuffer take(const BufferKey& key, int count, size_t bytes, bool is_shared = false) {
    Channel& channel = channels_[key];
    while (int(channel.buffers.size()) < count) {
      channel.buffers.push_back(std::make_unique<PooledBuffer>());
      channel.buffers.back()->arrived.resize(size_t(ranks_), 0);
    }
    PooledBuffer& buffer = *channel.buffers[size_t(channel.next++ % count)];
    if (buffer.in_use && !is_shared) throw Error(TE_RUNTIME_ERROR, "virtual ranks: one call takes a buffer twice.");
    if (buffer.capacity < bytes) {
      PooledBuffer::Memory larger(static_cast<char*>(::operator new(bytes, std::align_val_t(256))));
      std::memset(larger.get(), kBufferPoison, bytes);
      outgrown_.push_back(std::move(buffer.memory));
      buffer.memory = std::move(larger);
      buffer.capacity = bytes;
    }
    return ScopedBuffer(buffer, bytes);
  }

  // Marks every use as ended.
  void end_uses() {
    for (auto& [key, channel] : channels_) {
      for (auto& buffer : channel.buffers) {
        buffer->freed = buffer->uses;
        std::fill(buffer->arrived.begin(), buffer->arrived.end(), buffer->uses);
      }
    }
  }

  void release_outgrown() { outgrown_.clear(); }

  size_t bytes() const {
    size_t total = 0;
    for (const auto& [key, channel] : channels_) {
      for (const auto& buffer : channel.buffers) total += buffer->capacity;
    }
    return total;
  }

 private:
  struct Channel {
    std::vector<std::unique_ptr<PooledBuffer>> buffers;
    int64_t next = 0;
  };

  int32_t ranks_;
  std::map<BufferKey, Channel> channels_;
  std::vector<PooledBuffer::Memory> outgrown_;
};

}  // namespace te::testing
