// An arena of host memory: slots out of a few large allocations. Each slot has a generation, which distinguishes a
// released slot from a later one at the same place. The arena grows only when the caller requests it, and reports its
// bytes to its owner's account.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include "core/error.h"
#include "core/pinned.h"

namespace te::pinned {

constexpr size_t kChunk = size_t(2) << 20;  // allocations are multiples of it
constexpr int kReleased = 0xff;             // NaN in all float dtypes

inline size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

struct Slot {
  unsigned char* data = nullptr;
  size_t bytes = 0;
  uint64_t generation = 0;  // 0: no slot
};

class Arena {
 public:
  using Allocate = std::function<void*(size_t)>;  // nullptr: no memory is left
  using Free = std::function<void(void*)>;

  Arena(Account& account, Allocate allocate, Free free, size_t limit, bool debug)
      : account_(account), allocate_(std::move(allocate)), free_(std::move(free)), limit_(limit), debug_(debug) {}
  ~Arena() {
    account_.use(-int64_t(used_), -slots());
    account_.reserve(-int64_t(reserved_));
    for (const auto& [start, chunk] : chunks_) free_(start);
  }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // The smallest free range that is large enough. `may_grow`: whether the arena may allocate.
  Slot take(const char* op, size_t bytes, bool may_grow) {
    const size_t size = round_up(std::max<size_t>(bytes, 1), kAlignment);
    auto place = best(size);
    if (place.chunk == nullptr) {
      if (!may_grow) {
        throw Error(TE_PINNED_MEMORY,
                    concat(op, ": pinned memory: ", size, " bytes in one piece are needed, the arena has ", holds(),
                           ", and it does not grow inside a CUDA graph's capture. Run a step with offload outside of "
                           "the capture first, or reserve the bytes."));
      }
      grow(op, size);
      place = best(size);
    }
    const size_t left = place.size - size;
    place.chunk->ranges.erase(place.offset);
    if (left != 0) place.chunk->ranges[place.offset + size] = left;
    const Slot slot{place.start + place.offset, size, ++generation_};
    live_[slot.data] = slot;
    used_ += size;
    peak_ = std::max(peak_, used_);
    account_.use(int64_t(size), 1);
    return slot;
  }

  void give_back(const char* op, const Slot& slot) {
    check(op, slot);
    if (debug_) std::memset(slot.data, kReleased, slot.bytes);
    live_.erase(slot.data);
    used_ -= slot.bytes;
    account_.use(-int64_t(slot.bytes), -1);
    auto chunk = chunks_.upper_bound(slot.data);
    --chunk;
    auto& ranges = chunk->second.ranges;
    auto range = ranges.emplace(size_t(slot.data - chunk->first), slot.bytes).first;
    const auto next = std::next(range);
    if (next != ranges.end() && range->first + range->second == next->first) {
      range->second += next->second;
      ranges.erase(next);
    }
    if (range != ranges.begin()) {
      const auto before = std::prev(range);
      if (before->first + before->second == range->first) {
        before->second += range->second;
        ranges.erase(range);
      }
    }
  }

  // Throws for a released slot, even if its place is in use again.
  void check(const char* op, const Slot& slot) const {
    const auto found = live_.find(slot.data);
    if (found != live_.end() && found->second.generation == slot.generation) return;
    throw Error(TE_RUNTIME_ERROR,
                concat(op, ": host slot of ", slot.bytes, " bytes, generation ", slot.generation, ", was released",
                       found == live_.end() ? std::string(" before this use.")
                                            : concat("; generation ", found->second.generation, "  is in its place.")));
  }

  void reserve(const char* op, size_t bytes) {
    const size_t size = round_up(std::max<size_t>(bytes, 1), kAlignment);
    if (best(size).chunk == nullptr) grow(op, size);
  }

  void trim() {
    for (auto chunk = chunks_.begin(); chunk != chunks_.end();) {
      const auto& ranges = chunk->second.ranges;
      if (ranges.size() == 1 && ranges.begin()->second == chunk->second.bytes) {
        reserved_ -= chunk->second.bytes;
        account_.reserve(-int64_t(chunk->second.bytes));
        free_(chunk->first);
        chunk = chunks_.erase(chunk);
      } else {
        ++chunk;
      }
    }
  }

  size_t reserved() const { return reserved_; }
  size_t used() const { return used_; }
  size_t peak() const { return peak_; }
  int64_t slots() const { return int64_t(live_.size()); }

 private:
  struct Chunk {
    size_t bytes;
    std::map<size_t, size_t> ranges;  // free ones, merged: offset -> bytes
  };
  struct Place {
    Chunk* chunk = nullptr;
    unsigned char* start = nullptr;
    size_t offset = 0, size = SIZE_MAX;
  };

  Place best(size_t size) {
    Place place;
    for (auto& [start, chunk] : chunks_) {
      for (const auto& [offset, free] : chunk.ranges) {
        if (free >= size && free < place.size) place = {&chunk, start, offset, free};
      }
    }
    return place;
  }

  size_t largest() const {
    size_t most = 0;
    for (const auto& [start, chunk] : chunks_) {
      for (const auto& [offset, free] : chunk.ranges) most = std::max(most, free);
    }
    return most;
  }

  std::string holds() const {
    return concat(reserved_, " bytes (", used_, " in use, ", largest(), " in the largest free range)");
  }

  void grow(const char* op, size_t size) {
    const size_t bytes = round_up(size, kChunk);
    const bool allowed = limit_ == 0 || reserved_ + bytes <= limit_;
    void* start = allowed ? allocate_(bytes) : nullptr;
    if (start == nullptr) {
      throw Error(TE_PINNED_MEMORY,
                  concat(op, ": pinned memory exhausted: ", size, " bytes are needed, the arena has ", holds(),
                         allowed ? concat(", and the machine cannot pin a further ", bytes)
                                 : concat(", and its limit is ", limit_),
                         ". Offload fewer layers, or make room on the host."));
    }
    chunks_[static_cast<unsigned char*>(start)] = {bytes, {{0, bytes}}};
    reserved_ += bytes;
    account_.reserve(int64_t(bytes));
  }

  Account& account_;
  Allocate allocate_;
  Free free_;
  size_t limit_;
  bool debug_;
  std::map<unsigned char*, Chunk> chunks_;
  std::map<unsigned char*, Slot> live_;
  uint64_t generation_ = 0;
  size_t reserved_ = 0, used_ = 0, peak_ = 0;
};

}  // namespace te::pinned
