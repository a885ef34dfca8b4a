// cross_entropy, kernel wrappers that other bindings call: what a loss is asked for, and a pass over rows of logits,
// where the classes may be spread over the ranks of a group.
#pragma once

#include <transformer_engine/cross_entropy.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>

#include "core/common.h"
#include "core/probe.h"

namespace te_torch {

// What a loss is asked for.
struct LossOptions {
  double label_smoothing = 0;
  bool reduce = false;  // the mean over targets that are not ignored
  int64_t ignore_idx = -100;
  std::string group;  // whose ranks have the classes, in their order, equally many each; read where ranks > 1
  int64_t ranks = 1;

  std::string_view asking_group() const { return ranks > 1 ? std::string_view(group) : std::string_view(); }
};

// Names what does not fit. rows: the shape of the target. classes: of one rank.
void check_loss(const char* op, c10::SymIntArrayRef rows, const c10::SymInt& classes, const Tensor& like,
                const Tensor& target, const LossOptions& options);

// float16 gradients are scaled by the mean's 1 / n in backward, together with what comes in there (a loss scale):
// p / n would be lost to float16 before. Those of other dtypes have it from the forward on.
inline bool scales_late(const Tensor& logits) { return logits.scalar_type() == at::kHalf; }

// float32 [1]: 1 / the number of targets that are not ignored. On the CPU the check of all targets.
Tensor loss_inverse_count(const Tensor& target, int64_t classes, const LossOptions& options);

// loss [rows] of logits [rows, classes], contiguous, and with `gradient` the gradient over the logits, times scale
// (float32 [1] or [rows]; undefined: 1). target int64 [rows], contiguous.
void loss_of_rows(const Tensor& logits, const Tensor& target, const Tensor& scale, const Tensor& loss, bool gradient,
                  const LossOptions& options);

// float32 scalar: the sum of loss times inverse_count.
Tensor loss_mean(const Tensor& loss, const Tensor& inverse_count);

// grad *= dloss * scale, where it lies: rows [n, ...] by dloss [n], or all of it by one. Where the factor is 1, nothing
// is read or written; nobody waits to know.
void scale_gradient(const Tensor& grad, const Tensor& dloss, const Tensor& scale);

// The same in new memory, as a registered op: te::cross_entropy_bwd.
Tensor cross_entropy_bwd(const Tensor& grad, const Tensor& dloss, const OptionalTensor& scale);

// What a family's backward hands out of a gradient that its forward made: itself, or what is traced in new memory.
template <class DispatchMode>
Tensor scaled(const Tensor& grad, const Tensor& dloss, const OptionalTensor& scale) {
  if constexpr (std::is_same_v<DispatchMode, Dispatched>) {
    return DispatchMode::template call<cross_entropy_bwd>("te::cross_entropy_bwd", grad, dloss, scale);
  } else {
    scale_gradient(grad, dloss, scale.has_value() ? *scale : Tensor());
    return grad.detach();  // a handle of its own, which autograd need not copy to make it a leaf's .grad
  }
}

// A gradient that a backward scales where it lies can be handed out once.
class OnceGuard {
 public:
  void pass(const char* op) const;

 private:
  std::shared_ptr<std::atomic<bool>> passed_ = std::make_shared<std::atomic<bool>>(false);
};

inline constexpr SavedInfo kLossCount{"count of targets", "float16 gradients are scaled by it in backward",
                                      "four bytes"};

}  // namespace te_torch
