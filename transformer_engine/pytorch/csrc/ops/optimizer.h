// The tensor lists of optimizer ops: their checks, their division by device and dtypes, and the search for overlapping
// memory. All checks come before the first write.
#pragma once

#include <transformer_engine/optimizer.h>

#include <array>
#include <memory>
#include <vector>

#include "core/common.h"

namespace te_torch {

inline int32_t ordinal(const at::Device& device) { return device.is_cpu() ? TE_DEVICE_CPU : int32_t(device.index()); }

// Checks an optional tensor of one element.
te_tensor one_of(const OptionalTensor& t, const char* op, const char* argument);

// Increments the version, so that autograd detects the change, as after an in-place operation.
inline void bump_version(const Tensor& t) {
  if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// The memory of one tensor. list, index: its name in errors.
struct Span {
  uintptr_t begin = 0, end = 0;
  const char* list = "";
  int64_t index = 0;
};

// The memory of t. ValueError unless it is on like's device and has like's strides, without gaps.
Span memory_of(const Tensor& t, const Tensor& like, const char* op, const char* list, int64_t index);

// The same for memory to write: ValueError for a copy of a quantized tensor's values, where a write would be lost.
Span written_memory_of(const Tensor& t, const Tensor& like, const char* op, const char* list, int64_t index);

// Checks whether written memory overlaps other memory of a call. Checks again only after an address has changed.
class OverlapGuard {
 public:
  // ValueError where two of `written`, or one of them and one of `read`, overlap.
  void check(const char* op, const std::vector<Span>& written, const std::vector<Span>& read);

 private:
  uint64_t written_seen_ = 0, read_seen_ = 0;
  std::vector<Span> sorted_;
};

// The tensors of one parameter in a step of Adam; undefined where missing (master, pairs, fp8_*). fp8_*: of an FP8
// weight, whose param is its bytes, with or without a row pitch.
struct AdamEntry {
  const Tensor &grad, &param, &exp_avg, &exp_avg_sq, &master;
  const Tensor &exp_avg_pair, &exp_avg_sq_pair, &master_pair;
  const Tensor &fp8_scale, &fp8_amax, &fp8_scale_inv;
  bool e5m2;
  at::ScalarType rounding;
};

struct AdamOptions {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t step;
  bool decoupled, bias_correction;
  OptionalTensor noop, lr_tensor, step_tensor, inv_scale, clip;
};

// Entries of one device and dtypes: one call of the engine.
class AdamCalls {
 public:
  explicit AdamCalls(const char* op) : op_(op) {}

  void add(const AdamEntry& entry, int64_t index);
  const std::vector<Span>& written() const { return written_; }
  const std::vector<Span>& read() const { return read_; }
  void run(const AdamOptions& options) const;

 private:
  struct Call {
    te_adam_plan plan{};
    Tensor any;  // one of the weights
    std::vector<te_optimizer_tensor> tensors;
    std::vector<te_adam_scales> scales;  // empty without scaled states
  };
  Call& call_of(const te_adam_plan& plan, const Tensor& param);
  te_tensor bytes_of(const Tensor& param, const Tensor& like, int64_t index) const;
  te_adam_scales scales_of(const AdamEntry& entry, const Tensor& like) const;

  const char* op_;
  std::vector<Call> calls_;
  std::vector<Tensor> params_, grads_;
  std::vector<Span> written_, read_;
};

}  // namespace te_torch
