// activation through the C API, on every device here: values and gradients against extended-precision oracles, and the
// laws that hold for each kind (poisoned outputs, pitch, re-emission, errors).
#include "transformer_engine/activation.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"

namespace te {
namespace {

using testing::Buffer;
using Real = long double;

constexpr te_activation_params kDefaults{7.f, 1.702f, 1.f};
constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};

// ---- oracle: the formulas of transformer_engine/activation.h; gradients by central differences of these ----

Real sigmoid(Real t) { return 1 / (1 + std::exp(-t)); }

struct Oracle {
  const char* name;
  bool gated;
  Real (*act)(Real);
  Real (*argument)(Real);  // of the sigmoid inside act, for the error bound
};

Real none(Real) { return 0; }
Real same(Real t) { return t; }
Real gelu_argument(Real t) { return 2 * std::sqrt(2 / std::acos(Real(-1))) * (t + Real(0.044715) * t * t * t); }
Real qgelu_argument(Real t) { return Real(1.702) * t; }
Real gelu(Real t) { return t * sigmoid(gelu_argument(t)); }
Real qgelu(Real t) { return t * sigmoid(qgelu_argument(t)); }
Real relu(Real t) { return t > 0 ? t : 0; }
Real srelu(Real t) { return relu(t) * relu(t); }
Real silu(Real t) { return t * sigmoid(t); }

constexpr Oracle kOracles[] = {
    {"gelu", false, gelu, gelu_argument},
    {"geglu", true, gelu, gelu_argument},
    {"glu", true, sigmoid, same},
    {"qgelu", false, qgelu, qgelu_argument},
    {"qgeglu", true, qgelu, qgelu_argument},
    {"relu", false, relu, none},
    {"reglu", true, relu, none},
    {"srelu", false, srelu, none},
    {"sreglu", true, srelu, none},
    {"silu", false, silu, same},
    {"swiglu", true, silu, same},
};

// Central difference; in 64-bit-mantissa arithmetic its error is below 1e-11 of the values here.
Real slope(Real (*f)(Real), Real t) {
  const Real h = 1e-6L;
  return (f(t + h) - f(t - h)) / (2 * h);
}

// The bound. With u = 2^-24: exp is within 2u (fp32 paths) or (4 + 2.4 |z|) u (the GPU's fast exponential, used for
// 16-bit results), the sigmoid's argument z carries at most 6u |z|, sum and reciprocal 2u (fast division: 5u), so
// s = sigmoid(z) is within (9 + 9 |z|) u relative. The slope s (1 + t z' (1 - s)) uses s twice and six more roundings:
// 32 u (1 + |z|) of its parts' magnitudes s (1 + |t z'|) covers all. The store adds half a unit of the dtype.
// Where s < 2^-126, exp(-z) overflows and s is 0: kSmall makes the bound 2^-126 of what s is multiplied with there.
template <class T>
struct Rounding;
template <>
struct Rounding<float> {
  static constexpr double kRelative = 0x1p-24, kAbsolute = 0;
};
template <>
struct Rounding<fp16> {
  static constexpr double kRelative = 0x1p-11, kAbsolute = 0x1p-25;
};
template <>
struct Rounding<bf16> {
  static constexpr double kRelative = 0x1p-8, kAbsolute = 0x1p-134;
};

template <class T>
void expect_near(double got, Real want, Real magnitude, const std::string& what) {
  const Real bound = Rounding<T>::kRelative * std::fabs(want) + Rounding<T>::kAbsolute +
                     32 * Real(0x1p-24) * magnitude * (1 + Rounding<T>::kRelative);
  ASSERT_LE(std::fabs(Real(got) - want), bound) << what << ": got " << got << ", wanted " << double(want);
}

constexpr Real kSmall = 0x1p-107L;  // 32 u kSmall = 2^-126

Real value_magnitude(const Oracle& o, Real t) {
  return std::max(std::fabs(o.act(t)), kSmall * std::max(Real(1), std::fabs(t))) * (1 + std::fabs(o.argument(t)));
}

Real slope_magnitude(const Oracle& o, Real t) {
  const Real z = o.argument(t);
  if (o.argument == none) return std::fabs(slope(o.act, t));
  return std::max(sigmoid(z), kSmall) * (1 + std::fabs(t * slope(o.argument, t))) * (1 + std::fabs(z));
}

// Normal values of some width, with the format's specials left out; exact zeros are moved off relu's kink.
template <class T>
std::vector<T> draw(int64_t n, unsigned seed, double width = 4) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal(0, width);
  std::vector<T> out;
  for (int64_t i = 0; i < n; ++i) {
    const double v = normal(engine);
    out.push_back(from_float<T>(float(std::fabs(v) < 1e-3 ? 1e-3 : v)));
  }
  return out;
}

int64_t x_cols(int kind, int64_t cols) { return cols * (te_activation_is_gated(kind) ? 2 : 1); }

template <class F>
void for_dtypes(F&& f) {
  f(float{});
  f(fp16{});
  f(bf16{});
}

class Activation : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, Activation, ::testing::ValuesIn(testing::devices()), testing::device_name);

// Shapes: empty, single, odd (elementwise access on the GPU), aligned (16-byte access), more than one block, and pitch
// that keeps or breaks the alignment.
struct Shape {
  int64_t rows, cols, extra_pitch;
};
constexpr Shape kShapes[] = {{0, 8, 0}, {3, 0, 5}, {1, 1, 0}, {1, 257, 0}, {5, 33, 3}, {7, 64, 8}, {130, 512, 0}};

TEST_P(Activation, ValuesMatchTheOracle) {
  for_dtypes([&](auto t) {
    using T = decltype(t);
    for (const Oracle& o : kOracles) {
      const int kind = te_activation_kind(o.name);
      ASSERT_GE(kind, 0) << o.name;
      ASSERT_EQ(te_activation_is_gated(kind), o.gated) << o.name;
      for (const auto& [rows, cols, extra] : kShapes) {
        const int64_t wide = x_cols(kind, cols);
        Buffer<T> x(GetParam(), rows, wide, wide + extra), y(GetParam(), rows, cols, cols + extra);
        const std::vector<T> in = draw<T>(rows * wide, 1 + unsigned(kind));
        x.fill(in);
        TE_ASSERT_OK(te_activation_forward(kind, kDefaults, x.tensor(), y.tensor(), nullptr));
        const std::vector<T> out = y.read();
        for (int64_t i = 0; i < rows * cols; ++i) {
          const int64_t at = i / cols * wide + i % cols;
          const Real a = to_float(in[size_t(at)]);
          const Real b = o.gated ? Real(to_float(in[size_t(at + cols)])) : 1;
          ASSERT_NO_FATAL_FAILURE(
              expect_near<T>(to_float(out[size_t(i)]), o.act(a) * b, value_magnitude(o, a) * std::fabs(b), o.name));
        }
        EXPECT_TRUE(y.padding_untouched()) << o.name;
        EXPECT_TRUE(x.padding_untouched()) << o.name;
      }
    }
  });
}

TEST_P(Activation, GradientsMatchTheOracle) {
  for_dtypes([&](auto t) {
    using T = decltype(t);
    for (const Oracle& o : kOracles) {
      const int kind = te_activation_kind(o.name);
      for (const auto& [rows, cols, extra] : kShapes) {
        const int64_t wide = x_cols(kind, cols);
        Buffer<T> x(GetParam(), rows, wide, wide + extra), dx(GetParam(), rows, wide, wide + extra);
        Buffer<T> dy(GetParam(), rows, cols, cols + extra);
        const std::vector<T> in = draw<T>(rows * wide, 20 + unsigned(kind));
        const std::vector<T> g = draw<T>(rows * cols, 40 + unsigned(kind), 1);
        x.fill(in);
        dy.fill(g);
        te_tensor absent = kAbsent;
        TE_ASSERT_OK(te_activation_backward(kind, kDefaults, dy.tensor(), x.tensor(), dx.tensor(), absent, nullptr));
        const std::vector<T> out = dx.read();
        for (int64_t i = 0; i < rows * cols; ++i) {
          const int64_t at = i / cols * wide + i % cols;
          const Real a = to_float(in[size_t(at)]), up = to_float(g[size_t(i)]);
          const Real b = o.gated ? Real(to_float(in[size_t(at + cols)])) : 1;
          ASSERT_NO_FATAL_FAILURE(expect_near<T>(to_float(out[size_t(at)]), up * b * slope(o.act, a),
                                                 std::fabs(up * b) * slope_magnitude(o, a), o.name));
          if (!o.gated) continue;
          ASSERT_NO_FATAL_FAILURE(expect_near<T>(to_float(out[size_t(at + cols)]), up * o.act(a),
                                                 std::fabs(up) * value_magnitude(o, a), o.name));
        }
        EXPECT_TRUE(dx.padding_untouched()) << o.name;
      }
    }
  });
}

// ---- laws for every kind in the table, those without an oracle above included ----

TEST_P(Activation, BackwardEmitsTheForwardsBitsAndPitchChangesNothing) {
  for_dtypes([&](auto t) {
    using T = decltype(t);
    for (int kind = 0; kind < te_activation_count(); ++kind) {
      const int64_t rows = 9, cols = 264, wide = x_cols(kind, cols);
      const std::vector<T> in = draw<T>(rows * wide, 60), g = draw<T>(rows * cols, 61, 1);
      const auto same_bits = [](const std::vector<T>& p, const std::vector<T>& q) {
        return p.size() == q.size() && std::memcmp(p.data(), q.data(), p.size() * sizeof(T)) == 0;
      };
      std::vector<std::vector<T>> forwards, emitted, gradients;
      for (const int64_t extra : {0, 8, 3}) {  // 16-byte access twice, then elementwise
        Buffer<T> x(GetParam(), rows, wide, wide + extra), dx(GetParam(), rows, wide, wide + extra);
        Buffer<T> dy(GetParam(), rows, cols, cols + extra), y(GetParam(), rows, cols, cols + extra);
        Buffer<T> again(GetParam(), rows, cols, cols + extra);
        x.fill(in);
        dy.fill(g);
        TE_ASSERT_OK(te_activation_forward(kind, kDefaults, x.tensor(), y.tensor(), nullptr));
        TE_ASSERT_OK(
            te_activation_backward(kind, kDefaults, dy.tensor(), x.tensor(), dx.tensor(), again.tensor(), nullptr));
        EXPECT_TRUE(again.padding_untouched());
        forwards.push_back(y.read());
        emitted.push_back(again.read());
        gradients.push_back(dx.read());
        TE_ASSERT_OK(  // y in the memory of dy
            te_activation_backward(kind, kDefaults, dy.tensor(), x.tensor(), dx.tensor(), dy.tensor(), nullptr));
        EXPECT_TRUE(same_bits(dy.read(), emitted.back())) << te_activation_name(kind);
        EXPECT_TRUE(same_bits(dx.read(), gradients.back())) << te_activation_name(kind);
      }
      for (size_t i = 0; i < forwards.size(); ++i) {
        EXPECT_TRUE(same_bits(emitted[i], forwards[0])) << te_activation_name(kind) << " " << i;
        EXPECT_TRUE(same_bits(forwards[i], forwards[0])) << te_activation_name(kind) << " " << i;
        EXPECT_TRUE(same_bits(gradients[i], gradients[0])) << te_activation_name(kind) << " " << i;
      }
    }
  });
}

TEST_P(Activation, NanSpreadsToItsOwnRowOnly) {
  for (int kind = 0; kind < te_activation_count(); ++kind) {
    const int64_t cols = 8, wide = x_cols(kind, cols);
    Buffer<float> x(GetParam(), 2, wide), y(GetParam(), 2, cols), dx(GetParam(), 2, wide), dy(GetParam(), 2, cols);
    std::vector<float> in(size_t(2 * wide), 0.5f);
    in[3] = std::numeric_limits<float>::quiet_NaN();
    x.fill(in);
    dy.fill(std::vector<float>(size_t(2 * cols), 1.f));
    TE_ASSERT_OK(te_activation_forward(kind, kDefaults, x.tensor(), y.tensor(), nullptr));
    const std::vector<float> out = y.read();
    for (size_t i = 0; i < out.size(); ++i)
      EXPECT_EQ(std::isnan(out[i]), i == 3) << te_activation_name(kind) << " " << i;
  }
}

TEST_P(Activation, ReluKindsTakeZeroSlopeAtZero) {
  const float zeros[] = {0.f, -0.f};
  for (const char* name : {"relu", "srelu"}) {
    Buffer<float> x(GetParam(), 1, 2), y(GetParam(), 1, 2), dx(GetParam(), 1, 2), dy(GetParam(), 1, 2);
    x.fill({zeros[0], zeros[1]});
    dy.fill({5.f, 5.f});
    TE_ASSERT_OK(te_activation_backward(te_activation_kind(name), kDefaults, dy.tensor(), x.tensor(), dx.tensor(),
                                        y.tensor(), nullptr));
    EXPECT_EQ(dx.read(), (std::vector<float>{0.f, 0.f})) << name;
    EXPECT_EQ(y.read(), (std::vector<float>{0.f, 0.f})) << name;
  }
}

TEST_P(Activation, PlainKindsWorkInPlace) {
  Buffer<float> x(GetParam(), 3, 5, 7), y(GetParam(), 3, 5, 7);
  const std::vector<float> in = draw<float>(15, 70);
  x.fill(in);
  const int kind = te_activation_kind("silu");
  TE_ASSERT_OK(te_activation_forward(kind, kDefaults, x.tensor(), y.tensor(), nullptr));
  TE_ASSERT_OK(te_activation_forward(kind, kDefaults, x.tensor(), x.tensor(), nullptr));
  EXPECT_EQ(x.read(), y.read());
}

// Two rows 2^31 + 8 elements apart: the second lies beyond a 32-bit element offset. On the CPU the pages between are
// reserved, never touched.
TEST(ActivationOffsets, RowsBeyondTwoToThe31Elements) {
  const int64_t pitch = (int64_t(1) << 31) + 8, cols = 8;
  const size_t bytes = size_t(pitch + cols) * 2;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* data = static_cast<bf16*>(memory);
  for (int64_t c = 0; c < cols; ++c) data[pitch + c] = from_float<bf16>(float(c) - 4.f);
  const te_tensor x{data, 2, cols, pitch, TE_BFLOAT16, TE_DEVICE_CPU};
  TE_EXPECT_OK(te_activation_forward(te_activation_kind("relu"), kDefaults, x, x, nullptr));
  for (int64_t c = 0; c < cols; ++c) EXPECT_EQ(to_float(data[pitch + c]), std::max(0.f, float(c) - 4.f));
  munmap(memory, bytes);
}

// ---- errors ----

struct Bad {
  const char* what;
  const char* argument;
  std::function<te_status()> call;
};

TEST_P(Activation, BadArgumentsAreNamedAndWriteNothing) {
  const int32_t device = GetParam();
  Buffer<float> x(device, 4, 16), y(device, 4, 8), dx(device, 4, 16), dy(device, 4, 8);
  const int kind = te_activation_kind("swiglu");
  const auto with = [](te_tensor t, auto&& change) {
    change(t);
    return t;
  };
  const auto forward = [&](int k, te_activation_params p, te_tensor in, te_tensor out) {
    return [=] { return te_activation_forward(k, p, in, out, nullptr); };
  };
  const auto backward = [&](te_tensor g, te_tensor in, te_tensor gin, te_tensor out) {
    return [=] { return te_activation_backward(kind, kDefaults, g, in, gin, out, nullptr); };
  };
  const te_tensor tx = x.tensor(), ty = y.tensor(), tdx = dx.tensor(), tdy = dy.tensor();
  const auto narrow = [](te_tensor& t) { t.cols -= 1; };
  const auto half = [](te_tensor& t) { t.dtype = TE_FLOAT16; };
  const auto away = [](te_tensor& t) { t.device = t.device == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU; };
  const Bad cases[] = {
      {"unknown kind", "'kind'", forward(-1, kDefaults, tx, ty)},
      {"unknown kind", "'kind'", forward(te_activation_count(), kDefaults, tx, ty)},
      {"limit 0", "'params.limit'", forward(kind, {0.f, 1.702f, 1.f}, tx, ty)},
      {"limit NaN", "'params.limit'", forward(kind, {NAN, 1.702f, 1.f}, tx, ty)},
      {"last dimension", "'x'", forward(kind, kDefaults, with(tx, narrow), ty)},
      {"rows", "'x'", forward(kind, kDefaults, with(tx, [](te_tensor& t) { t.rows = 3; }), ty)},
      {"dtype mix", "'x'", forward(kind, kDefaults, with(tx, half), ty)},
      {"device mix", "'x'", forward(kind, kDefaults, with(tx, away), ty)},
      {"pitch", "'y'", forward(kind, kDefaults, tx, with(ty, [](te_tensor& t) { t.row_pitch = 7; }))},
      {"NULL data", "'y'", forward(kind, kDefaults, tx, with(ty, [](te_tensor& t) { t.data = nullptr; }))},
      {"negative rows", "'y'", forward(kind, kDefaults, tx, with(ty, [](te_tensor& t) { t.rows = -1; }))},
      {"no dtype", "'y'", forward(kind, kDefaults, tx, with(ty, [](te_tensor& t) { t.dtype = te_dtype(77); }))},
      {"x of backward", "'x'", backward(tdy, with(tx, narrow), tdx, ty)},
      {"dx of backward", "'dx'", backward(tdy, tx, with(tdx, narrow), ty)},
      {"dx's dtype", "'dx'", backward(tdy, tx, with(tdx, half), ty)},
      {"y of backward", "'y'", backward(tdy, tx, tdx, with(ty, narrow))},
  };
  for (const Bad& bad : cases) {
    EXPECT_EQ(bad.call(), TE_INVALID_ARGUMENT) << bad.what;
    EXPECT_NE(std::string(te_last_error()).find(bad.argument), std::string::npos)
        << bad.what << ": " << te_last_error();
    EXPECT_NE(std::string(te_last_error()).find("te_activation_"), std::string::npos) << te_last_error();
  }
  // Integers are well-formed tensors of a dtype the op does not have.
  const auto integer = [](te_tensor& t) { t.dtype = TE_INT32; };
  EXPECT_EQ(te_activation_forward(kind, kDefaults, with(tx, integer), with(ty, integer), nullptr), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("int32"), std::string::npos) << te_last_error();
  for (const float v : y.read()) EXPECT_TRUE(std::isnan(v)) << "a refused call wrote";
  for (const float v : dx.read()) EXPECT_TRUE(std::isnan(v)) << "a refused call wrote";
}

TEST(ActivationTable, NamesAndNumbersAgree) {
  for (int kind = 0; kind < te_activation_count(); ++kind) {
    ASSERT_NE(te_activation_name(kind), nullptr);
    EXPECT_EQ(te_activation_kind(te_activation_name(kind)), kind);
  }
  for (const int kind : {-1, te_activation_count()}) {
    EXPECT_EQ(te_activation_name(kind), nullptr);
    EXPECT_EQ(te_activation_is_gated(kind), 0);
  }
  EXPECT_EQ(te_activation_kind("no such activation"), -1);
  EXPECT_EQ(te_activation_kind(nullptr), -1);
}

TEST(ActivationTable, CudaTensorsAreRefusedByACpuBuild) {
  if (te_built_with_cuda()) GTEST_SKIP() << "this build has CUDA kernels";
  float value = 1;
  const te_tensor t{&value, 1, 1, 1, TE_FLOAT32, 0};
  EXPECT_EQ(te_activation_forward(te_activation_kind("relu"), kDefaults, t, t, nullptr), TE_NOT_IMPLEMENTED);
  EXPECT_NE(std::string(te_last_error()).find("TE_WITH_CUDA"), std::string::npos) << te_last_error();
}

}  // namespace
}  // namespace te
