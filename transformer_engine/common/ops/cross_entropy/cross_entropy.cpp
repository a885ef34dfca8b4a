// cross_entropy, contract and CPU path (the specification). The formulas are in cross_entropy_math.h.
#include "transformer_engine/cross_entropy.h"

#include <algorithm>
#include <cstring>

#include "core/cpu_chunk.h"
#include "core/device.h"
#include "core/parallel_for.h"
#include "core/tensor.h"
#include "ops/cross_entropy/cross_entropy_math.h"

namespace te::cross_entropy {

namespace cuda {
void count(te_tensor target, int64_t ignore_idx, te_tensor inverse_count, te_stream stream);
void statistics(const te_cross_entropy_plan& plan, te_tensor out, te_stream stream);
void forward(const te_cross_entropy_plan& plan, te_stream stream);
void mean(te_tensor loss, te_tensor inverse_count, te_tensor mean, te_stream stream);
void backward(te_tensor grad, te_tensor dloss, te_tensor scale, te_stream stream);
}  // namespace cuda

namespace {

int64_t classes_of(const te_cross_entropy_plan& plan) { return plan.ranks * plan.logits.cols; }

float value_at(const te_tensor& t, int64_t row) { return static_cast<const float*>(t.data)[t.cols == 1 ? 0 : row]; }

}  // namespace

namespace cpu {

using namespace te::cpu;

// A sum over a row: chunks in float lanes, chunk after chunk in double.
template <class T, class F>
float row_sum(const T* row, int64_t cols, F&& f) {
  float buffer[kChunk];
  double total = 0;
  for_chunks(cols, [&](int64_t first, int64_t n) {
    const float* x = load_chunk(row + first, buffer, n);
    total += lane_sum(n, [&](int64_t i) { return f(x[i]); });
  });
  return float(total);
}

template <class T>
float top_of(const T* row, int64_t cols) {
  float buffer[kChunk], lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -INFINITY);
  for_chunks(cols, [&](int64_t first, int64_t n) {
    const float* x = load_chunk(row + first, buffer, n);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
    }
    for (int lane = 0; i < n; ++i, ++lane) lanes[lane] = x[i] > lanes[lane] ? x[i] : lanes[lane];
  });
  return *std::max_element(lanes, lanes + kLanes);
}

// own: the target's column among these, or outside of [0, cols).
template <class T>
Statistic statistic_of(const T* row, int64_t cols, int64_t own, bool rest) {
  const float top = top_of(row, cols), origin = origin_of(top);
  const float sum = row_sum(row, cols, [&](float x) { return te::cpu::exp(x - origin); });
  const float target = own >= 0 && own < cols ? to_float(row[own]) : NAN;
  const bool counts = rest && top != -INFINITY;
  return {top, sum, target, counts ? row_sum(row, cols, [&](float x) { return x - top; }) : 0.f};
}

template <class T>
void write_gradient(T* row, int64_t cols, int64_t own, const Slope& slope) {
  const float at_target = own >= 0 && own < cols ? to_float(row[own]) : 0.f;
  float buffer[kChunk], out[kChunk];
  for_chunks(cols, [&](int64_t first, int64_t n) {
    const float* x = load_chunk(row + first, buffer, n);
    float* y = chunk_target(row + first, out);
    for (int64_t i = 0; i < n; ++i) y[i] = slope.at(te::cpu::exp(x[i] - slope.top));
    store_chunk(row + first, y, n);
  });
  if (own >= 0 && own < cols) {
    row[own] = from_float<T>(slope.at(te::cpu::exp(at_target - slope.top)) - slope.hit);
  }
}

int64_t own_column(const te_cross_entropy_plan& plan, int64_t target) {
  return target - int64_t(plan.rank) * plan.logits.cols;
}

template <class T>
void forward_row(const te_cross_entropy_plan& plan, int64_t row) {
  const int64_t cols = plan.logits.cols, rows = plan.logits.rows;
  const int64_t target = static_cast<const int64_t*>(plan.target.data)[row];
  T* const x = row_ptr<T>(plan.logits, row);
  float& loss = static_cast<float*>(plan.loss.data)[row];
  if (kind_of(target, plan.ignore_idx, classes_of(plan)) == Kind::kIgnored) {
    loss = 0.f;
    if (plan.gradient) std::memset(static_cast<void*>(x), 0, size_t(cols) * sizeof(T));
    return;
  }
  const int64_t own = own_column(plan, target);
  const bool smooth = plan.label_smoothing > 0.f;
  const auto* given = static_cast<const Statistic*>(plan.statistics.data);
  const Statistic row_statistic =
      given == nullptr ? statistic_of(x, cols, own, smooth)
                       : merged(
                             plan.ranks, [](float v) { return te::cpu::exp(v); },
                             [&](int r) { return given[r * rows + row]; }, [&](int) { return float(cols); });
  const RowOptions options{plan.label_smoothing, float(classes_of(plan))};
  loss = options.loss(row_statistic, std::log(row_statistic.sum));
  if (plan.gradient) {
    write_gradient(x, cols, own,
                   Slope::of(row_statistic, options, plan.scale.data != nullptr ? value_at(plan.scale, row) : 1.f));
  }
}

void forward(const te_cross_entropy_plan& plan) {
  dispatch_float(plan.logits.dtype, "te_cross_entropy_forward", "plan.logits", [&](auto t) {
    parallel_rows(plan.logits.rows, plan.logits.cols, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) forward_row<decltype(t)>(plan, row);
    });
  });
}

void statistics(const te_cross_entropy_plan& plan, const te_tensor& out) {
  dispatch_float(plan.logits.dtype, "te_cross_entropy_statistics", "plan.logits", [&](auto t) {
    using T = decltype(t);
    parallel_rows(plan.logits.rows, plan.logits.cols, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const int64_t target = static_cast<const int64_t*>(plan.target.data)[row];
        static_cast<Statistic*>(out.data)[row] = statistic_of(row_ptr<const T>(plan.logits, row), plan.logits.cols,
                                                              own_column(plan, target), plan.label_smoothing > 0.f);
      }
    });
  });
}

void count(const te_tensor& target, int64_t ignore_idx, const te_tensor& inverse_count) {
  const auto* t = static_cast<const int64_t*>(target.data);
  int64_t n = 0;
  for (int64_t i = 0; i < target.cols; ++i) n += t[i] != ignore_idx;
  *static_cast<float*>(inverse_count.data) = 1.f / float(n);
}

void mean(const te_tensor& loss, const te_tensor& inverse_count, const te_tensor& mean) {
  const auto* l = static_cast<const float*>(loss.data);
  double total = 0;
  for (int64_t i = 0; i < loss.cols; ++i) total += l[i];
  *static_cast<float*>(mean.data) = float(total) * value_at(inverse_count, 0);
}

void backward(const te_tensor& grad, const te_tensor& dloss, const te_tensor& scale) {
  const float all = scale.data != nullptr ? value_at(scale, 0) : 1.f;
  dispatch_float(grad.dtype, "te_cross_entropy_backward", "grad", [&](auto t) {
    using T = decltype(t);
    parallel_rows(grad.rows, grad.cols, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const float factor = value_at(dloss, row) * all;
        if (factor == 1.f) continue;
        T* const x = row_ptr<T>(grad, row);
        float buffer[kChunk], out[kChunk];
        for_chunks(grad.cols, [&](int64_t start, int64_t n) {
          const float* in = load_chunk(x + start, buffer, n);
          float* y = chunk_target(x + start, out);
          for (int64_t i = 0; i < n; ++i) y[i] = scaled(in[i], factor);
          store_chunk(x + start, y, n);
        });
      }
    });
  });
}

}  // namespace cpu

namespace {

// One value, or one for each row.
void check_factor(const char* op, const char* argument, const te_tensor& t, int64_t rows, int32_t device) {
  check_floats(op, argument, t, 1, t.cols == 1 ? 1 : rows, device);
}

void check_target(const char* op, const char* argument, const te_tensor& t, int64_t rows, int32_t device) {
  check_as(op, argument, t, 1, rows, te_tensor{nullptr, 0, 0, 0, TE_INT64, device});
}

// Where the host can read them: on the CPU.
void check_values(const char* op, const char* argument, const te_tensor& t, int64_t classes, int64_t ignore_idx) {
  if (t.device != TE_DEVICE_CPU) return;
  for (int64_t row = 0; row < t.cols; ++row) {
    const int64_t target = static_cast<const int64_t*>(t.data)[row];
    if (kind_of(target, ignore_idx, classes) == Kind::kOutside) {
      bad_argument(op, argument, concat(target, " in row ", row),
                   concat("0 to ", classes - 1, ", or ignore_idx = ", ignore_idx));
    }
  }
}

void check_plan(const char* op, const te_cross_entropy_plan* plan) {
  if (plan == nullptr) bad_argument(op, "plan", "NULL", "a plan");
  const te_tensor& x = plan->logits;
  check_tensor(op, "plan.logits", x);
  if (x.cols == 0) bad_argument(op, "plan.logits", shape_of(x), "at least one column");
  if (plan->ranks < 1 || plan->rank < 0 || plan->rank >= plan->ranks) {
    bad_argument(op, "plan.rank", concat(plan->rank, " of ", plan->ranks), "a rank from 0 to ranks - 1");
  }
  if (!(plan->label_smoothing >= 0.f && plan->label_smoothing <= 1.f)) {
    bad_argument(op, "plan.label_smoothing", plan->label_smoothing, "a number in [0, 1]");
  }
  check_target(op, "plan.target", plan->target, x.rows, x.device);
  check_values(op, "plan.target", plan->target, classes_of(*plan), plan->ignore_idx);
}

void check_forward(const te_cross_entropy_plan* plan) {
  constexpr const char* kOp = "te_cross_entropy_forward";
  check_plan(kOp, plan);
  const te_tensor& x = plan->logits;
  check_floats(kOp, "plan.loss", plan->loss, 1, x.rows, x.device);
  if (plan->scale.data != nullptr) check_factor(kOp, "plan.scale", plan->scale, x.rows, x.device);
  if (plan->statistics.data != nullptr || plan->ranks > 1) {
    check_floats(kOp, "plan.statistics", plan->statistics, plan->ranks * x.rows, 4, x.device);
    if (plan->statistics.row_pitch != 4) bad_argument(kOp, "plan.statistics", "not contiguous", "a row pitch of 4");
  }
}

}  // namespace

}  // namespace te::cross_entropy

extern "C" {

te_status te_cross_entropy_count(te_tensor target, int64_t classes, int64_t ignore_idx, te_tensor inverse_count,
                                 te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_cross_entropy_count";
    cross_entropy::check_target(kOp, "target", target, target.cols, inverse_count.device);
    check_floats(kOp, "inverse_count", inverse_count, 1, 1, inverse_count.device);
    cross_entropy::check_values(kOp, "target", target, classes, ignore_idx);
    TE_ON_DEVICE_OF(kOp, inverse_count, cross_entropy::cpu::count(target, ignore_idx, inverse_count),
                    cross_entropy::cuda::count(target, ignore_idx, inverse_count, stream));
  });
}

te_status te_cross_entropy_statistics(const te_cross_entropy_plan* plan, te_tensor statistics, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_cross_entropy_statistics";
    cross_entropy::check_plan(kOp, plan);
    const te_tensor& x = plan->logits;
    check_floats(kOp, "statistics", statistics, x.rows, 4, x.device);
    if (statistics.row_pitch != 4) bad_argument(kOp, "statistics", "not contiguous", "a row pitch of 4");
    if (x.rows == 0) return;
    TE_ON_DEVICE_OF(kOp, x, cross_entropy::cpu::statistics(*plan, statistics),
                    cross_entropy::cuda::statistics(*plan, statistics, stream));
  });
}

te_status te_cross_entropy_forward(const te_cross_entropy_plan* plan, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    cross_entropy::check_forward(plan);
    if (plan->logits.rows == 0) return;
    TE_ON_DEVICE_OF("te_cross_entropy_forward", plan->logits, cross_entropy::cpu::forward(*plan),
                    cross_entropy::cuda::forward(*plan, stream));
  });
}

te_status te_cross_entropy_mean(te_tensor loss, te_tensor inverse_count, te_tensor mean, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_cross_entropy_mean";
    check_floats(kOp, "loss", loss, 1, loss.cols, mean.device);
    check_floats(kOp, "inverse_count", inverse_count, 1, 1, mean.device);
    check_floats(kOp, "mean", mean, 1, 1, mean.device);
    TE_ON_DEVICE_OF(kOp, mean, cross_entropy::cpu::mean(loss, inverse_count, mean),
                    cross_entropy::cuda::mean(loss, inverse_count, mean, stream));
  });
}

te_status te_cross_entropy_backward(te_tensor grad, te_tensor dloss, te_tensor scale, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    constexpr const char* kOp = "te_cross_entropy_backward";
    check_tensor(kOp, "grad", grad);
    cross_entropy::check_factor(kOp, "dloss", dloss, grad.rows, grad.device);
    if (scale.data != nullptr) check_floats(kOp, "scale", scale, 1, 1, grad.device);
    if (grad.rows == 0 || grad.cols == 0) return;
    TE_ON_DEVICE_OF(kOp, grad, cross_entropy::cpu::backward(grad, dloss, scale),
                    cross_entropy::cuda::backward(grad, dloss, scale, stream));
  });
}

}  // extern "C"
