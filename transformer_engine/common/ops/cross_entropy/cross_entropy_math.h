// Formulas of the loss that the CPU and the CUDA path share: statistics of a part of a row, their combination to those
// of the row, its loss and its gradient.
#pragma once

#include <cmath>

#include "core/dtype.h"
#include "transformer_engine/cross_entropy.h"

namespace te::cross_entropy {

// Statistics of some columns of a row; four floats of te_cross_entropy_statistics.
struct Statistic {
  float top;     // their maximum, ignoring NaN
  float sum;     // of exp(x - top)
  float target;  // the target's logit; NaN if it is not among these
  float rest;    // sum of x - top
};

// The reference of exponents: a part of -Inf alone has no maximum, and contributes nothing.
TE_HOST_DEVICE float origin_of(float top) { return top == -INFINITY ? 0.f : top; }

// Parts in their order, `columns(i)` columns each. A part of -Inf alone adds nothing to the sum.
template <class Exp, class Part, class Columns>
TE_HOST_DEVICE Statistic merged(int parts, Exp&& exp, Part&& part, Columns&& columns) {
  Statistic all{-INFINITY, 0.f, NAN, 0.f};
  for (int i = 0; i < parts; ++i) {
    const float top = part(i).top;
    if (top > all.top) all.top = top;
  }
  for (int i = 0; i < parts; ++i) {
    const Statistic p = part(i);
    const bool same = p.top == all.top;
    all.sum += same ? p.sum : p.sum * exp(p.top - all.top);
    all.rest += same ? p.rest : p.rest + columns(i) * (p.top - all.top);
    if (p.target == p.target) all.target = p.target;
  }
  return all;
}

// The inputs of a row's loss and gradient.
struct RowOptions {
  float smoothing;
  float classes;  // V

  TE_HOST_DEVICE float loss(const Statistic& row, float log_sum) const {
    const float target = row.target - row.top;
    // 0 * Inf would be NaN: without smoothing only the target's logit counts, with full smoothing it does not.
    if (smoothing == 0.f) return log_sum - target;
    const float rest = smoothing * (row.rest / classes);
    return smoothing == 1.f ? log_sum - rest : log_sum - (1.f - smoothing) * target - rest;
  }
};

// dx_j = exp(x_j - top) * weight - base, and less `hit` at the target.
struct Slope {
  float top, weight, base, hit;

  TE_HOST_DEVICE static Slope of(const Statistic& row, const RowOptions& options, float scale) {
    return {row.top, scale / row.sum, scale * (options.smoothing / options.classes), scale * (1.f - options.smoothing)};
  }
  TE_HOST_DEVICE float at(float exponential) const { return exponential * weight - base; }
};

// A gradient times its incoming factor. The gradient of an ignored token stays 0, even if the factor is Inf (a mean of
// no tokens) or NaN.
TE_HOST_DEVICE float scaled(float gradient, float factor) { return gradient == 0.f ? gradient : gradient * factor; }

enum class Kind { kIgnored, kMeant, kOutside };

TE_HOST_DEVICE Kind kind_of(int64_t target, int64_t ignore_idx, int64_t classes) {
  if (target == ignore_idx) return Kind::kIgnored;
  return target >= 0 && target < classes ? Kind::kMeant : Kind::kOutside;
}

}  // namespace te::cross_entropy
