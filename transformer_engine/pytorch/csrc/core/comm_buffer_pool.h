// Temporary buffers for collectives: slots of a pool, each used by one call over a group and reused by the next call.
// - A slot is a Tensor within that call alone, and is returned with the call's ScopedBuffers.
// - refuse_pooled() refuses a slot that would outlive the call: saved tensors, outputs, gradients, stored products.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <string_view>
#include <vector>

#include "core/probe.h"

namespace te_torch {

// Slots of a kind grow independently of other kinds.
enum class SlotKind : uint8_t { kValues, kColumns, kScales, kInbox };

struct Slot;

// A slot in use. Not copyable, so that it has one owner.
class TE_EXPORT ScopedBuffer {
 public:
  ScopedBuffer(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group, SlotKind kind);
  ScopedBuffer(const ScopedBuffer&) = delete;
  ScopedBuffer& operator=(const ScopedBuffer&) = delete;
  ~ScopedBuffer();

  const at::Tensor& tensor() const { return tensor_; }
  // Called before and after a collective writes to it: a slot with an unfinished collective is not reused.
  void expect() { sound_ = false; }
  void arrived() { sound_ = true; }

 private:
  std::shared_ptr<Slot> slot_;
  at::Tensor tensor_;
  bool sound_ = true;
};

// The slots of one call of a node's forward or backward. It has to outlive all readers.
class TE_EXPORT ScopedBuffers {
 public:
  ScopedBuffers() = default;
  ScopedBuffers(const ScopedBuffers&) = delete;
  ScopedBuffers& operator=(const ScopedBuffers&) = delete;
  ScopedBuffer& take(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group, SlotKind kind);
  // Keeps another object until the end of the call; objects are destroyed in the order of these calls.
  void hold(std::shared_ptr<void> other) { others_.push_back(std::move(other)); }

 private:
  std::deque<ScopedBuffer> list_;  // a deque keeps references valid while it grows
  std::vector<std::shared_ptr<void>> others_;
};

// Fills returned memory with NaN if tests or torch's deterministic mode request it.
void fill_returned(const c10::Storage& memory, const at::TensorOptions& options);

// A storage over `backing` that is_pooled() recognizes, and a tensor at its start.
c10::Storage pooled_storage(const at::Tensor& backing);
at::Tensor pooled_tensor(const c10::Storage& memory, at::IntArrayRef sizes, const at::TensorOptions& options);

// Whether the storage of t is a slot, as it is for all views of a slot.
TE_EXPORT bool is_pooled(const at::Tensor& t);

// Raises RuntimeError for such a tensor, which `op` would keep as `what` while the next call overwrites it.
TE_EXPORT void refuse_pooled(const at::Tensor& t, const char* op, const char* what);

}  // namespace te_torch
