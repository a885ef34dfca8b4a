// Kernel wrappers of cross entropy, for other bindings: the options of a loss, and a pass over rows of logits, whose
// classes may be divided over the ranks of a group.
#pragma once

#include <transformer_engine/cross_entropy.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "core/common.h"
#include "core/probe.h"

namespace te_torch {

// The options of a loss.
struct LossOptions {
  double label_smoothing = 0;
  bool reduce = false;  // returns the mean over targets that are not ignored
  int64_t ignore_idx = -100;
  std::string group;  // its ranks have equal parts of the classes, in their order; read if ranks > 1
  int64_t ranks = 1;

  std::string_view fingerprint_group() const { return ranks > 1 ? std::string_view(group) : std::string_view(); }
};

// Raises ValueError for arguments that do not fit. rows: the shape of the target. classes: of one rank.
void check_loss(const char* op, c10::SymIntArrayRef rows, const c10::SymInt& classes, const Tensor& like,
                const Tensor& target, const LossOptions& options);

// Whether the backward applies the mean's factor 1 / n: for float16, together with the incoming gradient (a loss
// scale), as p / n alone would underflow. For other dtypes the forward applies it.
inline bool scales_late(const Tensor& logits) { return logits.scalar_type() == at::kHalf; }

// float32 [1]: 1 / the number of targets that are not ignored. On the CPU it also checks all targets.
Tensor loss_inverse_count(const Tensor& target, int64_t classes, const LossOptions& options);

// The loss [rows] of contiguous logits [rows, classes]. gradient: also overwrites the logits with their gradient times
// scale (float32 [1] or [rows]; undefined: 1). target: contiguous int64 [rows].
void loss_of_rows(const Tensor& logits, const Tensor& target, const Tensor& scale, const Tensor& loss, bool gradient,
                  const LossOptions& options);

// float32 scalar: the sum of the loss, times inverse_count.
Tensor loss_mean(const Tensor& loss, const Tensor& inverse_count);

// grad *= dloss * scale in place: rows [n, ...] by dloss [n], or all rows by one factor. A factor of 1, which is
// checked on the device, reads and writes nothing.
void scale_gradient(const Tensor& grad, const Tensor& dloss, const Tensor& scale);

// The same with a new tensor, as the registered op te::cross_entropy_bwd.
Tensor cross_entropy_bwd(const Tensor& grad, const Tensor& dloss, const OptionalTensor& scale);

// The gradient that a family's backward returns for one computed in its forward: the same memory in eager mode, a new
// tensor where it is traced.
template <class Mode>
Tensor scaled(const Tensor& grad, const Tensor& dloss, const OptionalTensor& scale) {
  if constexpr (std::is_same_v<Mode, Dispatched>) {
    return Mode::template call<cross_entropy_bwd>("te::cross_entropy_bwd", grad, dloss, scale);
  } else {
    scale_gradient(grad, dloss, scale.has_value() ? *scale : Tensor());
    return grad.detach();  // a new handle, which autograd can make a leaf's .grad without a copy
  }
}

// Refuses a second backward, as the first one has scaled the gradient in place.
class OnceGuard {
 public:
  void pass(const char* op) const;

 private:
  std::shared_ptr<std::atomic<bool>> passed_ = std::make_shared<std::atomic<bool>>(false);
};

inline constexpr SavedInfo kLossCount{"count of targets", "float16 gradients are scaled by it in backward",
                                      "four bytes"};

}  // namespace te_torch
