// Memory that a collective writes and one call reads: slots, which a call over a group uses and leaves to the next one.
// A slot is a Tensor for the GEMMs of that call alone. It is returned with the call's ScopedBuffers; refuse_pooled()
// refuses it where it would outlive the call (saved tensors, outputs, gradients, stored products). Nothing is
// communicated here.
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
class TE_EXPORT ScopedBuffer {
 public:
  ScopedBuffer(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group, SlotKind kind);
  ScopedBuffer(const ScopedBuffer&) = delete;
  ScopedBuffer& operator=(const ScopedBuffer&) = delete;
  ~ScopedBuffer();

  const at::Tensor& tensor() const { return tensor_; }
  // Around what others write into it: a slot that a collective has not finished with is never anybody's again.
  void expect() { sound_ = false; }
  void arrived() { sound_ = true; }

 private:
  std::shared_ptr<Slot> slot_;
  at::Tensor tensor_;
  bool sound_ = true;
};

// What one call of a node's forward or backward uses. It outlives whatever reads it.
class TE_EXPORT ScopedBuffers {
 public:
  ScopedBuffers() = default;
  ScopedBuffers(const ScopedBuffers&) = delete;
  ScopedBuffers& operator=(const ScopedBuffers&) = delete;
  ScopedBuffer& take(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group, SlotKind kind);
  // What ends with the call too, in the order in which it was given.
  void hold(std::shared_ptr<void> other) { others_.push_back(std::move(other)); }

 private:
  std::deque<ScopedBuffer> list_;  // whose references last while it grows
  std::vector<std::shared_ptr<void>> others_;
};

// Where tests or torch's deterministic mode ask for it, NaN in memory that no call uses any more.
void fill_returned(const c10::Storage& memory, const at::TensorOptions& options);

// Memory of somebody else's that is lent as a slot's is: the doors know it. And a tensor in it, from its start on.
c10::Storage pooled_storage(const at::Tensor& backing);
at::Tensor pooled_tensor(const c10::Storage& memory, at::IntArrayRef sizes, const at::TensorOptions& options);

// Whether its memory is a slot's, whatever view of it t is.
TE_EXPORT bool is_pooled(const at::Tensor& t);

// RuntimeError for such a tensor: `what` of `op` would hold what the next call overwrites.
TE_EXPORT void refuse_pooled(const at::Tensor& t, const char* op, const char* what);

}  // namespace te_torch
