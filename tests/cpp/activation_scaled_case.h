// A call of the activation with a scale for each row, for the suites of the C API and of the kernels: inputs that are
// NaN in rows after the live ones, poisoned results, and what they have to be.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/activation.h"

namespace te::testing {

inline constexpr te_activation_params kDefaults{7.f, 1.702f, 1.f};
inline constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
inline constexpr int32_t kAllLive = INT32_MIN;  // there is no counter

// cols: of y; the pitch keeps or breaks the alignment. live: the counter, also of more rows than there are, or
// negative.
struct ScaledShape {
  int64_t rows, cols, extra_pitch;
  int32_t live;
};
inline constexpr ScaledShape kScaledShapes[] = {
    {0, 8, 0, 0},  {3, 0, 5, 2},  {1, 1, 0, kAllLive},    {1, 257, 0, 1},   {5, 33, 3, 4},
    {9, 64, 8, 0}, {7, 64, 8, 9}, {17, 520, 0, kAllLive}, {12, 264, 0, -1}, {11, 264, 0, 10},
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T, class S>
struct ScaledCase {
  int kind;
  ScaledShape shape;
  int64_t live_rows, wide;
  Buffer<T> x, dy, y, dx, again;
  Buffer<S> scale, dscale;
  Buffer<int32_t> counter;

  ScaledCase(int32_t device, int kind, const ScaledShape& s)
      : kind(kind),
        shape(s),
        live_rows(s.live == kAllLive ? s.rows : std::clamp<int64_t>(s.live, 0, s.rows)),
        wide(s.cols * (te_activation_is_gated(kind) ? 2 : 1)),
        x(device, s.rows, wide, wide + s.extra_pitch),
        dy(device, s.rows, s.cols, s.cols + s.extra_pitch),
        y(device, s.rows, s.cols, s.cols + s.extra_pitch),
        dx(device, s.rows, wide, wide + s.extra_pitch),
        again(device, s.rows, s.cols, s.cols + s.extra_pitch),
        scale(device, 1, s.rows),
        dscale(device, 1, s.rows),
        counter(device, 1, 1) {
    x.fill(draw<T>(wide, 1, 3));
    dy.fill(draw<T>(s.cols, 2, 1));
    scale.fill(draw<S>(1, 3, 0.5));
    counter.fill({s.live});
  }

  te_tensor live() const { return shape.live == kAllLive ? kAbsent : counter.tensor(); }

  // The bits of an activation and a product done separately. Kernels on emulated blocks have the CPU path's
  // exponential.
  void expect_as_separate() {
    const std::string what = std::string(te_activation_name(kind)) + " " + te_dtype_name(kDtype<T>) + " " +
                             std::to_string(shape.rows) + " x " + std::to_string(shape.cols) + ", live " +
                             std::to_string(shape.live);
    const int32_t device = x.tensor().device;
    Buffer<T> act(device, shape.rows, shape.cols), scaled_dy(device, shape.rows, shape.cols);
    Buffer<T> separate_dx(device, shape.rows, wide);
    TE_ASSERT_OK(te_activation_forward(kind, kDefaults, x.tensor(), act.tensor(), nullptr));
    const std::vector<T> values = act.read(), gradient = dy.read();
    const std::vector<S> scales = scale.read();
    std::vector<T> wanted_y = poisoned(shape.cols), wanted_dy = poisoned(shape.cols), wanted_dx = poisoned(wide);
    for (int64_t row = 0; row < live_rows; ++row) {
      const float s = to_float(scales[size_t(row)]);
      for (size_t i = size_t(row * shape.cols); i < size_t((row + 1) * shape.cols); ++i) {
        wanted_y[i] = from_float<T>(to_float(values[i]) * s);
        wanted_dy[i] = from_float<T>(to_float(gradient[i]) * s);
      }
    }
    scaled_dy.fill(wanted_dy);
    TE_ASSERT_OK(te_activation_backward(kind, kDefaults, scaled_dy.tensor(), x.tensor(), separate_dx.tensor(), kAbsent,
                                        nullptr));
    const std::vector<T> all_dx = separate_dx.read();
    std::copy_n(all_dx.begin(), live_rows * wide, wanted_dx.begin());
    ASSERT_TRUE(same_bits(y.read(), wanted_y)) << what;
    ASSERT_TRUE(same_bits(again.read(), wanted_y)) << what;
    ASSERT_TRUE(same_bits(dx.read(), wanted_dx)) << what;
    expect_sums(values, gradient, what);
    for (const Buffer<T>* t : {&x, &dy, &y, &dx, &again}) EXPECT_TRUE(t->padding_untouched()) << what;
  }

 private:
  // Products and sums of n numbers in any order err by (n + 1) 2^-24 of the magnitudes' sum; the store rounds once.
  void expect_sums(const std::vector<T>& values, const std::vector<T>& gradient, const std::string& what) const {
    const double unit = sizeof(S) == 4 ? 0x1p-24 : std::is_same_v<S, fp16> ? 0x1p-11 : 0x1p-8;
    const double smallest = std::is_same_v<S, fp16> ? 0x1p-25 : 0;
    const std::vector<S> got = dscale.read();
    for (int64_t row = 0; row < shape.rows; ++row) {
      if (row >= live_rows) {
        ASSERT_TRUE(std::isnan(to_float(got[size_t(row)]))) << what;
        continue;
      }
      double sum = 0, magnitude = 0;
      for (size_t i = size_t(row * shape.cols); i < size_t((row + 1) * shape.cols); ++i) {
        const double product = double(to_float(values[i])) * to_float(gradient[i]);
        sum += product;
        magnitude += std::fabs(product);
      }
      const double bound = double(shape.cols + 1) * 0x1p-24 * magnitude;
      ASSERT_LE(std::fabs(to_float(got[size_t(row)]) - sum), bound + unit * (std::fabs(sum) + bound) + smallest)
          << what;
    }
  }
  std::vector<T> poisoned(int64_t cols) const {
    std::vector<T> values(size_t(shape.rows * cols));
    std::memset(static_cast<void*>(values.data()), kPoison, values.size() * sizeof(T));
    return values;
  }
  // Normal values, NaN after the live rows; exact zeros are moved off relu's kink.
  template <class U>
  std::vector<U> draw(int64_t cols, unsigned seed, double width) const {
    std::mt19937_64 engine(seed + unsigned(kind));
    std::normal_distribution<double> normal(0, width);
    std::vector<U> out;
    for (int64_t i = 0; i < shape.rows * cols; ++i) {
      const double v = normal(engine);
      const double moved = std::fabs(v) < 1e-3 ? 1e-3 : v;
      out.push_back(from_float<U>(i < live_rows * cols ? float(moved) : std::numeric_limits<float>::quiet_NaN()));
    }
    return out;
  }
};

}  // namespace te::testing
