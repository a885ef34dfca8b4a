// FP8 bytes and scales by a reference that picks the nearest code from a table, and buffers that watch their tails. For
// the suite of quantize; computes nothing by the engine itself.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/fp8.h"
#include "device_buffer.h"
#include "transformer_engine/quantize.h"

namespace te::testing {

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr int64_t kBlock = 128;

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// ---- reference ----

inline double decode(int code, bool e5m2) {
  return e5m2 ? to_float(te::e5m2{uint8_t(code)}) : to_float(e4m3{uint8_t(code)});
}
inline float max_of(bool e5m2) { return e5m2 ? 57344.f : 448.f; }

// The nearest of the non-negative codes, the even one of two; NaN for NaN.
inline uint8_t encode(float x, bool e5m2) {
  if (std::isnan(x)) return 0x7f;
  const double a = std::fmin(std::fabs(double(x)), max_of(e5m2));
  int low = 0, high = e5m2 ? 0x7b : 0x7e;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (decode(middle, e5m2) <= a ? low : high) = middle;
  }
  const double below = a - decode(low, e5m2), above = decode(high, e5m2) - a;
  const int code = below < above || (below == above && low % 2 == 0) ? low : high;
  return uint8_t(code | (std::signbit(x) ? 0x80 : 0));
}

inline float amax_over(const std::vector<float>& x, int64_t cols, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
  float amax = 0;
  for (int64_t r = r0; r < r1; ++r) {
    for (int64_t c = c0; c < c1; ++c) amax = std::fmax(amax, std::fabs(x[size_t(r * cols + c)]));  // NaN loses
  }
  return amax;
}

inline float scale_from(float amax, bool e5m2, bool pow_2, float epsilon) {
  amax = std::fmax(amax, epsilon);
  if (amax == 0 || std::isinf(amax)) return 1;
  const float scale = std::fmin(max_of(e5m2) / amax, FLT_MAX);
  return pow_2 ? std::ldexp(1.f, std::ilogb(scale)) : scale;
}

struct Options {
  te_scaling scaling;
  bool e5m2, pow_2;
  float epsilon;
};

struct Direction {
  std::vector<uint8_t> data;
  std::vector<float> scale_inv;
  int64_t scale_rows, scale_cols;
};

// One direction by its own rows and columns; the other one is the same of the transposed matrix.
inline Direction reference(const std::vector<float>& x, int64_t rows, int64_t cols, Options o, float tensor_scale) {
  Direction d;
  const int64_t row_run = o.scaling == TE_SCALING_BLOCK_1D ? 1 : kBlock;
  const bool lying = o.scaling == TE_SCALING_BLOCK_1D;
  d.scale_rows = o.scaling == TE_SCALING_TENSOR ? 1 : up(lying ? cols : rows, kBlock) / kBlock;
  d.scale_cols = o.scaling == TE_SCALING_TENSOR ? 2 : lying ? up(rows, 4) : up(up(cols, kBlock) / kBlock, 4);
  d.data.resize(size_t(rows * cols));
  d.scale_inv.assign(size_t(d.scale_rows * d.scale_cols), 0.f);
  if (o.scaling == TE_SCALING_TENSOR) d.scale_inv = {1 / tensor_scale, tensor_scale};
  for (int64_t r = 0; r < rows; r += row_run) {
    for (int64_t c = 0; c < cols; c += kBlock) {
      const int64_t r1 = std::min(rows, r + row_run), c1 = std::min(cols, c + kBlock);
      float scale = tensor_scale;
      if (o.scaling != TE_SCALING_TENSOR) {
        scale = scale_from(amax_over(x, cols, r, r1, c, c1), o.e5m2, o.pow_2, o.epsilon);
        const int64_t at = lying ? c / kBlock * d.scale_cols + r : r / kBlock * d.scale_cols + c / kBlock;
        d.scale_inv[size_t(at)] = 1 / scale;
      }
      for (int64_t i = r; i < r1; ++i) {
        for (int64_t j = c; j < c1; ++j) d.data[size_t(i * cols + j)] = encode(x[size_t(i * cols + j)] * scale, o.e5m2);
      }
    }
  }
  return d;
}

template <class V>
std::vector<V> transposed(const std::vector<V>& x, int64_t rows, int64_t cols) {
  std::vector<V> out(x.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[size_t(c * rows + r)] = x[size_t(r * cols + c)];
  }
  return out;
}

// ---- buffers ----

// FP8 data of a direction: as wide as its pitch, so that reading it shows the tail.
struct Data {
  Buffer<uint8_t> data;
  Buffer<float> scale_inv;
  int64_t cols;

  Data(int32_t device, int64_t rows, int64_t cols, const Direction& like, int64_t extra_pitch)
      : data(device, rows, up(cols, 16) + extra_pitch),
        scale_inv(device, like.scale_rows, like.scale_cols),
        cols(cols) {}

  te_tensor tensor(bool e5m2) const {
    te_tensor t = data.tensor(e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3);
    t.cols = cols;
    return t;
  }

  void expect(const Direction& want, int64_t rows, const std::string& what) const {
    const std::vector<uint8_t> got = data.read();
    const int64_t pitch = rows == 0 ? 0 : int64_t(got.size()) / rows;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < pitch; ++c) {
        const int code = c < cols ? want.data[size_t(r * cols + c)] : 0;
        ASSERT_EQ(int(got[size_t(r * pitch + c)]), code) << what << " at " << r << ", " << c;
      }
    }
    EXPECT_TRUE(data.padding_untouched()) << what;
    EXPECT_EQ(scale_inv.read(), want.scale_inv) << what;
    EXPECT_TRUE(scale_inv.padding_untouched()) << what;
  }
};

template <class T>
std::vector<T> draw(int64_t n, unsigned seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-4, 4), special(0, 200);
  std::vector<T> out;
  for (int64_t i = 0; i < n; ++i) {
    float x = std::ldexp(normal(engine), exponent(engine));
    const int which = special(engine);
    if (which == 0) x = NAN;
    if (which == 1) x = 0;
    if (which == 2) x = -0.f;
    out.push_back(from_float<T>(x));
  }
  return out;
}

template <class T>
std::vector<float> as_floats(const std::vector<T>& values) {
  std::vector<float> out;
  for (const T& v : values) out.push_back(to_float(v));
  return out;
}

template <class F>
void for_dtypes(F&& f) {
  f(float{});
  f(fp16{});
  f(bf16{});
}

}  // namespace te::testing
