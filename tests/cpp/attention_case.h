// Packed rows with a sink in one device's memory, and their oracle in long double. For the suites of attention;
// computes nothing by the engine itself.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "rounding.h"
#include "transformer_engine/attention.h"

namespace te::testing {

using Real = long double;

struct AttentionShape {
  std::vector<int32_t> lengths;  // of packed sequences
  int32_t gap = 0;               // rows of padding after each sequence, found by starts
  int64_t tail = 0;              // rows at the end
  int64_t heads = 3, width = 8;
  bool sink = true;
  int64_t batch = 0, seq = 0;  // without lengths: a batch
  bool batch_first = false;
  int64_t pitch = 0;  // elements after a row of out
};

// Padding of each kind; widths of every vector and of none; more heads than a tile; a batch in each order; no rows.
inline const AttentionShape kAttentionShapes[] = {
    {{5, 0, 1, 70, 3}, 0, 0},
    {{5, 0, 1, 70, 3}, 2, 9, 4, 64},
    {{9, 30}, 0, 60, 70, 24},
    {{40}, 0, 1, 2, 20, true, 0, 0, false, 3},
    {{3, 4}, 1, 0, 130, 5},
    {{17, 2}, 0, 5, 3, 256},
    {{6, 13}, 1, 2, 2, 300},
    {{6, 6, 6}, 3, 40, 5, 16, false, 0, 0, false, 8},
    {{}, 0, 20, 2, 8},
    {{}, 0, 0, 2, 8},
    {{0, 0}, 0, 0, 2, 8},
    {{}, 0, 0, 4, 40, true, 3, 11, false},
    {{}, 0, 0, 66, 8, true, 2, 30, true},
    {{}, 0, 0, 3, 8, false, 2, 5, true},
};

inline std::string describe(const AttentionShape& s) {
  return concat(s.lengths.size(), " sequences, gap ", s.gap, " tail ", s.tail, " heads ", s.heads, " of ", s.width,
                s.sink ? " sink" : "", " batch ", s.batch, s.batch_first ? " first" : "");
}

template <class T>
struct AttentionProblem {
  AttentionProblem(int32_t device, const AttentionShape& s, unsigned seed = 1) : shape(s), random(seed) {
    const bool packed = s.batch == 0;
    std::vector<int32_t> sums{0}, begins{0};
    for (const int32_t n : s.lengths) sums.push_back(sums.back() + n), begins.push_back(begins.back() + n + s.gap);
    rows = packed ? begins.back() + s.tail : s.batch * s.seq;
    padding.assign(size_t(rows), packed);
    for (size_t i = 0; i < s.lengths.size(); ++i) {
      std::fill_n(padding.begin() + begins[i], s.lengths[i], false);
    }
    plan.queries.rows = rows;
    plan.batch = packed ? 1 : s.batch;
    plan.batch_first = s.batch_first;
    if (packed) plan.queries.lengths = integers(device, lengths, sums);
    if (packed && s.gap > 0) plan.queries.starts = integers(device, starts, begins);
    const auto buffer = [&](int64_t count, int64_t cols, int64_t pitch) {
      return std::make_unique<Buffer<T>>(device, count, cols, cols + pitch);
    };
    out = buffer(rows, s.heads * s.width, s.pitch), dout = buffer(rows, s.heads * s.width, s.pitch);
    const auto floats = [&](int64_t count, int64_t cols) {
      return std::make_unique<Buffer<float>>(device, count, cols);
    };
    lse = floats(rows, s.heads), sink = floats(1, s.heads), dsink = floats(1, s.heads);
    kernel_lse = floats(plan.batch * s.heads, rows / plan.batch);
    workspace = floats(1, std::max<int64_t>(1, te_attention_backward_workspace(rows, s.heads)));
    fill();
  }

  te_tensor integers(int32_t device, std::unique_ptr<Buffer<int32_t>>& place, const std::vector<int32_t>& values) {
    place = std::make_unique<Buffer<int32_t>>(device, 1, int64_t(values.size()));
    place->fill(values);
    return place->tensor();
  }

  // Rows of padding stay NaN. Every eleventh row and head has seen no key: out 0, lse inf of either sign.
  void fill() {
    std::normal_distribution<double> normal;
    std::vector<T> values(size_t(rows * shape.heads * shape.width)), gradients(values.size());
    std::memset(static_cast<void*>(values.data()), kPoison, values.size() * sizeof(T));
    gradients = values;
    kernel.assign(size_t(rows * shape.heads), NAN);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < shape.heads && !padding[size_t(row)]; ++head) {
        const bool blind = (row + head) % 11 == 0;
        kernel[place(row, head)] = blind ? (row % 2 == 0 ? INFINITY : -INFINITY) : float(3 * normal(random));
        for (int64_t i = 0; i < shape.width; ++i) {
          const size_t at = size_t((row * shape.heads + head) * shape.width + i);
          values[at] = from_float<T>(blind ? 0.f : float(normal(random)));
          gradients[at] = from_float<T>(float(normal(random)));
        }
      }
    }
    for (int64_t head = 0; head < shape.heads; ++head) {
      sinks.push_back(head % 5 == 1 ? -INFINITY : float(4 * normal(random)));
    }
    if (shape.heads > 2) sinks[0] = 200.f, sinks[2] = -200.f;
    given = values, gradient = gradients;
    out->fill(values), dout->fill(gradients), kernel_lse->fill(kernel), sink->fill(sinks);
    if (shape.sink) plan.sink = sink->tensor();
  }

  size_t place(int64_t row, int64_t head) const {
    const int64_t seq = rows / plan.batch;
    const int64_t b = shape.batch_first ? row / seq : row % plan.batch;
    const int64_t s = shape.batch_first ? row % seq : row / plan.batch;
    return size_t((b * shape.heads + head) * seq + s);
  }

  // The exact lse with the sink.
  Real exact_lse(int64_t row, int64_t head) const {
    const float seen = kernel[place(row, head)];
    const Real own = std::isinf(seen) ? -Real(INFINITY) : Real(seen), a = sinks[size_t(head)];
    if (!shape.sink || a == -Real(INFINITY)) return own;
    if (std::isinf(own)) return a;
    return std::max(own, a) + std::log1p(std::exp(-std::fabs(own - a)));
  }

  // With u = 2^-24: exp(x) rounds by (|x| + 2) u, its use in a sum or a quotient by 4 u more.
  void expect_forward() const {
    const std::vector<T> got = out->read();
    const std::vector<float> totals = lse->read();
    EXPECT_TRUE(out->padding_untouched() && lse->padding_untouched());
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        const std::string what = concat(describe(shape), " row ", row, " head ", head);
        const Real want = padding[size_t(row)] ? 0 : exact_lse(row, head);
        const float total = totals[size_t(row * shape.heads + head)];
        if (std::isinf(want) || padding[size_t(row)]) {
          ASSERT_EQ(total, float(want)) << what;
        } else {
          ASSERT_LE(std::fabs(total - want), 8 * Real(0x1p-24) * (1 + std::fabs(want))) << what;
        }
        for (int64_t i = 0; i < shape.width; ++i) {
          const size_t at = size_t((row * shape.heads + head) * shape.width + i);
          expect_scaled(got[at], given[at], row, head, what);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }

  void expect_scaled(T got, T before, int64_t row, int64_t head, const std::string& what) const {
    const float seen = kernel[place(row, head)];
    const Real x = Real(sinks[size_t(head)]) - seen;
    if (padding[size_t(row)]) {
      ASSERT_EQ(to_float(got), 0.f) << what;
    } else if (!shape.sink || std::isinf(seen) || x == -Real(INFINITY)) {
      ASSERT_EQ(std::memcmp(&got, &before, sizeof(T)), 0) << what;
    } else {
      const Real want = Real(to_float(before)) / (1 + std::exp(x));
      const Real bound = std::fabs(want) * ((std::fabs(x) + 8) * Real(0x1p-24) + Rounding<T>::kRelative);
      ASSERT_LE(std::fabs(Real(to_float(got)) - want), bound + Rounding<T>::kAbsolute + 1e-37L) << what;
    }
  }

  // Sums of at most width / 16 + 16, 64 and rows / 64 (or rows / 8192 + 40) terms follow each other.
  void expect_backward(bool with_sink) const {
    const std::vector<float> got = kernel_lse->read(), totals = lse->read();
    EXPECT_TRUE(kernel_lse->padding_untouched() && dsink->padding_untouched());
    std::vector<Real> sums(size_t(shape.heads)), sizes(sums);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        const float total = totals[size_t(row * shape.heads + head)], own = got[place(row, head)];
        ASSERT_EQ(own, std::isinf(total) ? INFINITY : total) << describe(shape) << " row " << row << " head " << head;
        if (padding[size_t(row)]) continue;
        const Real a = sinks[size_t(head)], share = a == -Real(INFINITY) ? 0 : std::exp(std::min<Real>(a - total, 0));
        for (int64_t i = 0; i < shape.width; ++i) {
          const size_t at = size_t((row * shape.heads + head) * shape.width + i);
          if (share == 0) continue;
          const Real term = share * Real(to_float(gradient[at])) * Real(to_float(given[at]));
          sums[size_t(head)] -= term, sizes[size_t(head)] += std::fabs(term) * (std::fabs(a - total) + 8);
        }
      }
    }
    if (!with_sink) return;
    const std::vector<float> gradients = dsink->read();
    const Real terms = Real(shape.width) / 16 + 80 + Real(rows) / 64;
    for (size_t head = 0; head < sums.size(); ++head) {
      ASSERT_LE(std::fabs(gradients[head] - sums[head]), terms * Real(0x1p-24) * sizes[head] + 1e-37L)
          << describe(shape) << " sink of head " << head << ": " << gradients[head] << ", wanted "
          << double(sums[head]);
    }
  }

  // lse and out of a forward, as the backward gets them.
  void start_backward() {
    std::vector<float> totals(size_t(rows * shape.heads), NAN);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t head = 0; head < shape.heads && !padding[size_t(row)]; ++head) {
        totals[size_t(row * shape.heads + head)] = float(exact_lse(row, head));
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      if (padding[size_t(row)]) std::fill_n(totals.begin() + row * shape.heads, shape.heads, 0.f);
    }
    lse->fill(totals);
    kernel_lse->poison();
  }

  AttentionShape shape;
  std::mt19937_64 random;
  te_attention_plan plan{};
  int64_t rows = 0;
  std::vector<bool> padding;
  std::vector<float> kernel, sinks;
  std::vector<T> given, gradient;
  std::unique_ptr<Buffer<int32_t>> lengths, starts;
  std::unique_ptr<Buffer<T>> out, dout;
  std::unique_ptr<Buffer<float>> lse, kernel_lse, sink, dsink, workspace;
};

// Of an out that was poisoned: rows of padding are 0, and nothing else was written.
template <class T>
void expect_zero_padding(const AttentionProblem<T>& problem) {
  const auto values = problem.out->read();
  const size_t width = size_t(problem.shape.heads * problem.shape.width);
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = to_float(values[i]);
    ASSERT_TRUE(problem.padding[i / width] ? value == 0.f : std::isnan(value)) << i;
  }
  EXPECT_TRUE(problem.out->padding_untouched());
}

template <class F>
void for_attention_dtypes(F&& f) {
  f(float{});
  f(fp16{});
  f(bf16{});
}

}  // namespace te::testing
