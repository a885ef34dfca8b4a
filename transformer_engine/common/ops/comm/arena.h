// Memory that peers push to: slots, which calls have on lease. A lease is no tensor and cannot be copied: it lives on
// the stack of the call that has it, so nothing that outlives the call can hold what the next one overwrites. Knows
// nothing of what is in a slot.
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

namespace te::comm {

constexpr int kSlotPoison = 0xff;  // NaN in every float dtype

struct SlotKey {
  int32_t device;
  int64_t group;
  int32_t channel;
  auto operator<=>(const SlotKey&) const = default;
};

// The words beside the memory are counted in turns: a turn is one lease.
struct Slot {
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t(256)); }
  };
  using Memory = std::unique_ptr<char, Free>;

  Memory memory;
  size_t capacity = 0;
  int64_t turns = 0;             // leases so far
  int64_t freed = 0;             // the last turn that is over, as the lanes walk
  std::vector<int64_t> arrived;  // by rank: the last turn that its push was for
  bool leased = false;           // by a call that is being queued
};

class Lease {
 public:
  Lease(Slot& slot, size_t bytes) : slot_(&slot), bytes_(bytes), turn_(++slot.turns) { slot.leased = true; }
  Lease(Lease&& other) noexcept : slot_(other.slot_), bytes_(other.bytes_), turn_(other.turn_) {
    other.slot_ = nullptr;
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  Lease& operator=(Lease&&) = delete;
  ~Lease() {
    if (slot_ != nullptr) slot_->leased = false;
  }

  char* data() const { return slot_->memory.get(); }
  size_t bytes() const { return bytes_; }
  int64_t turn() const { return turn_; }
  Slot& slot() const { return *slot_; }

 private:
  Slot* slot_;
  size_t bytes_;
  int64_t turn_;
};

class Arena {
 public:
  explicit Arena(int32_t ranks) : ranks_(ranks) {}

  // The next of the key's `slots` slots, which take turns, with room for `bytes`. Memory that is too small stays alive
  // until release_outgrown(): what was queued still uses it.
  Lease lease(const SlotKey& key, int slots, size_t bytes, bool shared = false) {
    Channel& channel = channels_[key];
    while (int(channel.slots.size()) < slots) {
      channel.slots.push_back(std::make_unique<Slot>());
      channel.slots.back()->arrived.resize(size_t(ranks_), 0);
    }
    Slot& slot = *channel.slots[size_t(channel.next++ % slots)];
    if (slot.leased && !shared) throw Error(TE_RUNTIME_ERROR, "comm: a slot is on lease twice in one call.");
    if (slot.capacity < bytes) {
      Slot::Memory larger(static_cast<char*>(::operator new(bytes, std::align_val_t(256))));
      std::memset(larger.get(), kSlotPoison, bytes);
      outgrown_.push_back(std::move(slot.memory));
      slot.memory = std::move(larger);
      slot.capacity = bytes;
    }
    return Lease(slot, bytes);
  }

  // As if every lease that was given had been walked to its end.
  void end_turns() {
    for (auto& [key, channel] : channels_) {
      for (auto& slot : channel.slots) {
        slot->freed = slot->turns;
        std::fill(slot->arrived.begin(), slot->arrived.end(), slot->turns);
      }
    }
  }

  void release_outgrown() { outgrown_.clear(); }

  size_t bytes() const {
    size_t total = 0;
    for (const auto& [key, channel] : channels_) {
      for (const auto& slot : channel.slots) total += slot->capacity;
    }
    return total;
  }

 private:
  struct Channel {
    std::vector<std::unique_ptr<Slot>> slots;
    int64_t next = 0;
  };

  int32_t ranks_;
  std::map<SlotKey, Channel> channels_;
  std::vector<Slot::Memory> outgrown_;
};

}  // namespace te::comm
