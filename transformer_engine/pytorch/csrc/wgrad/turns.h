// Turns of threads that add to one main_grad: a product (main_grad.h), or a gate with a gradient of autograd
// (grad_gate.h). A thread that waits for its turn does not hold the GIL; one that has it may take the GIL.
#pragma once

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "wgrad/wgrad_task.h"

namespace te_torch {

// Locks for additions to one main_grad from several threads. Striped, so that no parameter needs a lock; a product
// takes all its locks together, in one order for all threads.
class Turns {
 public:
  explicit Turns(const std::vector<WeightTarget>& targets) {
    for (const WeightTarget& target : targets) {
      if (target.out.defined()) stripes_.push_back(reinterpret_cast<uintptr_t>(target.out.data_ptr()) / 256 % kLocks);
    }
    std::sort(stripes_.begin(), stripes_.end());
    stripes_.erase(std::unique(stripes_.begin(), stripes_.end()), stripes_.end());
    for (const size_t stripe : stripes_) locks()[stripe].lock();
  }
  ~Turns() {
    for (const size_t stripe : stripes_) locks()[stripe].unlock();
  }
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

 private:
  static constexpr size_t kLocks = 64;
  static std::array<std::mutex, kLocks>& locks() {
    static auto* all = new std::array<std::mutex, kLocks>;
    return *all;
  }
  c10::SmallVector<size_t, 4> stripes_;
};

}  // namespace te_torch
