// Pinned host memory: its allocation, and accounts of the bytes that each owner and the process hold, which
// te_pinned_usage reads. Accounts are header-only, so that tests can have their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "transformer_engine/transformer_engine.h"

namespace te::pinned {

constexpr size_t kAlignment = 256;  // of allocations, of an arena's slots, and of pieces in packed form

// The memory of one owner's arenas. The parent counts all owners, and its peak is the largest sum at one time.
class Account {
 public:
  explicit Account(Account* parent = nullptr) : parent_(parent) {}
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  void reserve(int64_t bytes) { add(bytes, 0, 0); }
  void use(int64_t bytes, int64_t slots) { add(0, bytes, slots); }

  te_pinned_bytes bytes() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {size_t(reserved_), size_t(used_), size_t(peak_), slots_};
  }

 private:
  void add(int64_t reserved, int64_t used, int64_t slots) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      reserved_ += reserved;
      used_ += used;
      slots_ += slots;
      peak_ = std::max(peak_, used_);
    }
    if (parent_ != nullptr) parent_->add(reserved, used, slots);
  }

  Account* parent_;
  mutable std::mutex mutex_;
  int64_t reserved_ = 0, used_ = 0, peak_ = 0, slots_ = 0;
};

// The account of a named owner. It lives as long as the process.
Account& account_of(const char* owner);

// Pinned memory for copies of `device`, on kAlignment; pageable memory for TE_DEVICE_CPU. Returns nullptr if none is
// left. Allowed while this thread captures a stream. `what` begins the message of a CUDA error.
void* allocate(const char* what, int32_t device, size_t bytes);
void release(int32_t device, void* data);

}  // namespace te::pinned
