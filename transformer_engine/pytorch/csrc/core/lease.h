// Memory that a collective writes and one call reads: slots, which calls over a group have on lease and leave to the
// next one. What such a slot holds is a Tensor for the products of that call, and for nobody else: it goes back with
// the call's Leases, and what would outlive the call (saved tensors, outputs, gradients, stored products) is refused at
// its door by refuse_leased(). Nothing is communicated here.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "core/probe.h"

namespace te_torch {

// Of one kind each: what grows for one of them does not for others.
enum class SlotKind : uint8_t { kValues, kColumns, kScales, kInbox };

struct Slot;

// One slot, while it lives. No Tensor, and it cannot be copied.
class TE_EXPORT Lease {
 public:
  Lease(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group, SlotKind kind);
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  ~Lease();

  const at::Tensor& tensor() const { return tensor_; }
  // Around what others write into it: a slot that a collective has not finished with is never anybody's again.
  void expect() { sound_ = false; }
  void arrived() { sound_ = true; }

 private:
  std::shared_ptr<Slot> slot_;
  at::Tensor tensor_;
  bool sound_ = true;
};

// What one call of a node's forward or backward has on lease. It outlives whatever reads it.
class TE_EXPORT Leases {
 public:
  Leases() = default;
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;
  Lease& take(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group, SlotKind kind);
  // What ends with the call too, in the order in which it was given.
  void hold(std::shared_ptr<void> other) { others_.push_back(std::move(other)); }

 private:
  std::deque<Lease> list_;  // whose references last while it grows
  std::vector<std::shared_ptr<void>> others_;
};

// Where tests or torch's deterministic mode ask for it, NaN in memory that nobody has on lease any more.
void fill_returned(const c10::Storage& memory, const at::TensorOptions& options);

// Memory of somebody else's that is lent as a slot's is: the doors know it. And a tensor in it, from its start on.
c10::Storage lent_storage(const at::Tensor& backing);
at::Tensor lent_tensor(const c10::Storage& memory, at::IntArrayRef sizes, const at::TensorOptions& options);

// Whether its memory is a slot's, whatever view of it t is.
TE_EXPORT bool on_lease(const at::Tensor& t);

// RuntimeError for such a tensor: `what` of `op` would hold what the next call overwrites.
TE_EXPORT void refuse_leased(const at::Tensor& t, const char* op, const char* what);

}  // namespace te_torch
