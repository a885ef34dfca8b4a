// Pinned host memory: where all of it comes from and goes back to, and what each owner has of it. One count for the
// process, which te_pinned_usage reads; header-only but for allocation, so that tests have accounts of their own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>

#include "transformer_engine/transformer_engine.h"

namespace te::pinned {

// What arenas of one owner hold. With a parent, which counts for all owners, a peak there is the most at once.
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

// Of the room that is named so; it lives as long as the process.
Account& account_of(const char* owner);

// Host memory that copies of `device` run to at full speed, aligned for any slot; plain memory for TE_DEVICE_CPU.
// nullptr: none is left. Allowed while this thread captures a stream. `what` begins CUDA's errors.
void* allocate(const char* what, int32_t device, size_t bytes);
void release(int32_t device, void* data);

}  // namespace te::pinned
