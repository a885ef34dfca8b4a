// normalization through the C API, on every device here: values, statistics and gradients against a double oracle, and
// the room's laws (poisoned outputs, pitch, absent tensors, aliasing, thread count, errors). Mutants: drop `- p.w` in
// backward_rows or add `+ plan.eps` after the square root in statistics_of (normalization.cpp), and BackwardMatches...
// or ForwardMatchesTheOracle turns red.
#include "transformer_engine/normalization.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device_buffer.h"

namespace te {
namespace {

using testing::Buffer;
using testing::widened;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr double kU = 0x1p-24;  // unit roundoff of float, in which all arithmetic is done

// Unit roundoff and half the smallest subnormal of the storage type: its rounding error is <= roundoff * |x| + tiny.
template <class T>
constexpr double kRoundoff = kU;
template <>
constexpr double kRoundoff<fp16> = 0x1p-11;
template <>
constexpr double kRoundoff<bf16> = 0x1p-8;
template <class T>
constexpr double kTiny = 0x1p-134;
template <>
constexpr double kTiny<fp16> = 0x1p-25;

struct Case {
  int64_t rows = 4, hidden = 64, extra_pitch = 0;
  bool rms = true, zero_centered = false, residual = false, float_gamma = false, beta = true;
  double shift = 0.;  // added to x, so that cancellation shows
  float eps = 1e-5f;

  te_normalization_plan plan() const { return {rms, zero_centered, eps}; }
  bool has_beta() const { return beta && !rms; }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "[" << c.rows << ", " << c.hidden << "] extra pitch " << c.extra_pitch
             << (c.rms ? " RMSNorm" : " LayerNorm") << (c.zero_centered ? " zero-centered" : "")
             << (c.residual ? " residual" : "") << (c.float_gamma ? " float gamma" : "")
             << (c.has_beta() ? " beta" : "") << " shift " << c.shift;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](Case c) {
    for (const bool rms : {true, false}) {
      c.rms = rms;
      all.push_back(c);
    }
  };
  // One vector, part of a warp, whole warps, odd vector counts; each held layout of the CUDA path (16,384 and 65,536
  // columns are the ends of its two widths), and rows past one block's share.
  for (const int64_t hidden : {8, 16, 64, 96, 128, 1024, 2400, 4096})
    add({.rows = 5, .hidden = hidden, .residual = true});
  for (const int64_t hidden : {1, 2, 7, 33, 257, 1001, 5001}) add({.rows = 6, .hidden = hidden, .residual = true});
  for (const int64_t hidden : {8192, 16384, 16392, 32768, 32776, 65536})
    add({.rows = 2, .hidden = hidden, .residual = true});
  add({.rows = 0, .hidden = 64, .residual = true});
  add({.rows = 1, .hidden = 64, .zero_centered = true});
  add({.rows = 3, .hidden = 512, .extra_pitch = 8, .zero_centered = true, .residual = true, .float_gamma = true});
  add({.rows = 3, .hidden = 512, .extra_pitch = 3, .zero_centered = true, .residual = true});
  add({.rows = 3, .hidden = 20000, .zero_centered = true, .residual = true, .float_gamma = true});
  add({.rows = 1501, .hidden = 64, .float_gamma = true, .beta = false});
  add({.rows = 1201, .hidden = 2048, .zero_centered = true, .residual = true});
  add({.rows = 1201, .hidden = 33});
  add({.rows = 5, .hidden = 1024, .beta = false, .shift = 100.});
  add({.rows = 5, .hidden = 1024, .shift = 1000., .eps = 0.f});
  return all;
}

// One case's tensors on a device: inputs filled, outputs poisoned.
template <class T>
struct Tensors {
  Case c;
  int32_t device;
  Buffer<T> x, residual, dy, residual_grad, y, h, dx;
  Buffer<T> gamma_t, beta_t, dgamma_t, dbeta_t;      // gamma like x,
  Buffer<float> gamma_f, beta_f, dgamma_f, dbeta_f;  // or float
  Buffer<float> mean, rstd;
  std::unique_ptr<Buffer<uint8_t>> workspace;

  Tensors(const Case& which, int32_t on)
      : c(which),
        device(on),
        x(matrix()),
        residual(matrix()),
        dy(matrix()),
        residual_grad(matrix()),
        y(matrix()),
        h(matrix()),
        dx(matrix()),
        gamma_t(on, 1, c.hidden),
        beta_t(on, 1, c.hidden),
        dgamma_t(on, 1, c.hidden),
        dbeta_t(on, 1, c.hidden),
        gamma_f(on, 1, c.hidden),
        beta_f(on, 1, c.hidden),
        dgamma_f(on, 1, c.hidden),
        dbeta_f(on, 1, c.hidden),
        mean(on, 1, c.rows),
        rstd(on, 1, c.rows),
        workspace(
            new Buffer<uint8_t>(on, 1, int64_t(te_normalization_backward_workspace(c.plan(), c.rows, c.hidden)))) {
    std::mt19937 generator(unsigned(c.hidden * 131 + c.rows));
    std::normal_distribution<float> normal;
    const auto fill = [&](auto& buffer, int64_t count, double shift) {
      using E = std::remove_reference_t<decltype(*buffer.data())>;
      std::vector<E> values;
      for (int64_t i = 0; i < count; ++i) values.push_back(from_float<E>(normal(generator) + float(shift)));
      buffer.fill(values);
    };
    const int64_t count = c.rows * c.hidden;
    fill(x, count, c.shift);
    for (Buffer<T>* buffer : {&residual, &dy, &residual_grad}) fill(*buffer, count, 0.);
    for (Buffer<T>* buffer : {&gamma_t, &beta_t}) fill(*buffer, c.hidden, 0.);
    for (Buffer<float>* buffer : {&gamma_f, &beta_f}) fill(*buffer, c.hidden, 0.);
  }

  te_tensor gamma() const { return c.float_gamma ? gamma_f.tensor() : gamma_t.tensor(); }
  te_tensor beta() const { return !c.has_beta() ? kAbsent : c.float_gamma ? beta_f.tensor() : beta_t.tensor(); }
  te_tensor dgamma() const { return c.float_gamma ? dgamma_f.tensor() : dgamma_t.tensor(); }
  te_tensor dbeta() const { return !c.has_beta() ? kAbsent : c.float_gamma ? dbeta_f.tensor() : dbeta_t.tensor(); }
  std::vector<double> gamma_values() const { return c.float_gamma ? widened(gamma_f.read()) : widened(gamma_t.read()); }
  std::vector<double> beta_values() const { return c.float_gamma ? widened(beta_f.read()) : widened(beta_t.read()); }
  std::vector<double> dgamma_values() const {
    return c.float_gamma ? widened(dgamma_f.read()) : widened(dgamma_t.read());
  }
  std::vector<double> dbeta_values() const { return c.float_gamma ? widened(dbeta_f.read()) : widened(dbeta_t.read()); }

  te_status forward() const {
    return te_normalization_forward(c.plan(), x.tensor(), c.residual ? residual.tensor() : kAbsent, gamma(), beta(),
                                    y.tensor(), c.residual ? h.tensor() : kAbsent, c.rms ? kAbsent : mean.tensor(),
                                    rstd.tensor(), nullptr);
  }
  // x stands for the saved norm input.
  te_status backward() const {
    return te_normalization_backward(c.plan(), dy.tensor(), c.residual ? residual_grad.tensor() : kAbsent, x.tensor(),
                                     gamma(), c.rms ? kAbsent : mean.tensor(), rstd.tensor(), dx.tensor(), dgamma(),
                                     dbeta(), workspace->tensor(), nullptr);
  }
  bool padding_untouched() const {
    return y.padding_untouched() && h.padding_untouched() && dx.padding_untouched() && mean.padding_untouched() &&
           rstd.padding_untouched() && dgamma_t.padding_untouched() && dgamma_f.padding_untouched() &&
           dbeta_t.padding_untouched() && dbeta_f.padding_untouched() && workspace->padding_untouched();
  }

 private:
  Buffer<T> matrix() const { return Buffer<T>(device, c.rows, c.hidden, c.hidden + c.extra_pitch); }
};

// ---- oracle: the formulas of the C header in double ----

struct RowOracle {
  double mean = 0, var = 0, rstd = 0;
};

RowOracle statistics(const Case& c, const double* h) {
  RowOracle s;
  for (int64_t i = 0; i < c.hidden && !c.rms; ++i) s.mean += h[i] / double(c.hidden);
  for (int64_t i = 0; i < c.hidden; ++i) s.var += (h[i] - s.mean) * (h[i] - s.mean) / double(c.hidden);
  s.rstd = 1 / std::sqrt(s.var + double(c.eps));
  return s;
}

// Additions between an element and its row's sum. CPU: a lane's in a chunk, the lanes', the chunks'. CUDA: a vector's
// and a thread's, two butterflies; an unaligned row's thread has hidden / 512 elements.
double row_depth(int64_t hidden) { return 40. + double(hidden) / 256.; }

template <class T>
void check_forward(const Case& c, int32_t device) {
  SCOPED_TRACE(::testing::Message() << te_dtype_name(testing::kDtype<T>) << " " << c);
  const Tensors<T> t(c, device);
  TE_ASSERT_OK(t.forward());
  std::vector<T> h_stored = t.x.read();
  if (c.residual) {  // exactly the rounded sum
    const std::vector<T> residual = t.residual.read(), got = t.h.read();
    for (size_t i = 0; i < got.size(); ++i) {
      h_stored[i] = from_float<T>(to_float(h_stored[i]) + to_float(residual[i]));
      ASSERT_EQ(to_float(got[i]), to_float(h_stored[i])) << "residual_out at " << i;
    }
  }
  const std::vector<double> h = widened(h_stored), y = widened(t.y.read()), gamma = t.gamma_values();
  const std::vector<double> beta = t.beta_values(), rstd = widened(t.rstd.read()), mean = widened(t.mean.read());
  const double depth = row_depth(c.hidden);
  for (int64_t row = 0; row < c.rows; ++row) {
    const double* h_row = h.data() + row * c.hidden;
    const RowOracle s = statistics(c, h_row);
    // The mean carries its sum's roundings; the variance around a mean off by d is var + d^2, and its terms (3
    // roundings each) and sum only add relative errors; 1/sqrt halves those and adds its own (rsqrtf: 2 ulp = 4 u).
    double magnitude = 0;
    for (int64_t i = 0; i < c.hidden; ++i) magnitude += std::fabs(h_row[i]) / double(c.hidden);
    const double d = c.rms ? 0. : (depth + 2) * kU * magnitude;
    const double r = 0.5 * ((depth + 6) * kU + d * d / (s.var + double(c.eps))) + 6 * kU;
    if (!c.rms) {
      ASSERT_NEAR(mean[size_t(row)], s.mean, d) << "mean of row " << row;
    }
    ASSERT_NEAR(rstd[size_t(row)], s.rstd, r * s.rstd) << "rstd of row " << row;
    for (int64_t i = 0; i < c.hidden; ++i) {
      const double g = gamma[size_t(i)] + (c.zero_centered ? 1. : 0.);
      const double scaled = (h_row[i] - s.mean) * s.rstd * g;
      const double want = scaled + (c.has_beta() ? beta[size_t(i)] : 0.);
      // The difference, gamma's shift and two products: 4 roundings beside r; then beta's addition.
      const double bound = std::fabs(g) * s.rstd * d + std::fabs(scaled) * (r + 5 * kU) + 2 * kU * std::fabs(want);
      const double got = y[size_t(row * c.hidden + i)];
      ASSERT_NEAR(got, want, bound + kRoundoff<T> * (std::fabs(want) + bound) + kTiny<T>)
          << "y at " << row << ", " << i;
    }
  }
  EXPECT_TRUE(t.padding_untouched());
}

struct BackwardOracle {
  std::vector<double> dx, dx_bound, dgamma, dgamma_bound, dbeta, dbeta_bound;
};

// From statistics as they are given, which count as exact.
BackwardOracle backward_oracle(const Case& c, const std::vector<double>& dy, const std::vector<double>& residual_grad,
                               const std::vector<double>& x, const std::vector<double>& gamma,
                               const std::vector<double>& mean, const std::vector<double>& rstd) {
  const size_t hidden = size_t(c.hidden);
  BackwardOracle o{std::vector<double>(x.size()), std::vector<double>(x.size()), std::vector<double>(hidden),
                   std::vector<double>(hidden),   std::vector<double>(hidden),   std::vector<double>(hidden)};
  const double depth = row_depth(c.hidden);
  for (size_t row = 0; row < size_t(c.rows); ++row) {
    const double m = c.rms ? 0. : mean[row];
    const auto g_at = [&](size_t i) { return gamma[i] + (c.zero_centered ? 1. : 0.); };
    const auto n_at = [&](size_t i) { return (x[row * hidden + i] - m) * rstd[row]; };
    double w_mean = 0, wn_mean = 0, w_size = 0, wn_size = 0;
    for (size_t i = 0; i < hidden; ++i) {
      const double w = dy[row * hidden + i] * g_at(i), n = n_at(i);
      w_mean += c.rms ? 0. : w / double(hidden);
      wn_mean += w * n / double(hidden);
      w_size += c.rms ? 0. : std::fabs(w) / double(hidden);
      wn_size += std::fabs(w * n) / double(hidden);
    }
    for (size_t i = 0; i < hidden; ++i) {
      const double d = dy[row * hidden + i], w = d * g_at(i), n = n_at(i);
      const double norm_grad = (w - w_mean - n * wn_mean) * rstd[row];
      o.dx[row * hidden + i] = norm_grad + (c.residual ? residual_grad[row * hidden + i] : 0.);
      // w has 2 roundings and n has 2, w * n 5, each mean its sum's and a division; then a product, two differences.
      const double terms = std::fabs(w) + std::fabs(w_mean) + std::fabs(n * wn_mean);
      o.dx_bound[row * hidden + i] =
          rstd[row] * ((depth + 4) * kU * w_size + (depth + 7) * kU * std::fabs(n) * wn_size + 6 * kU * terms) +
          2 * kU * (std::fabs(norm_grad) + std::fabs(o.dx[row * hidden + i]));
      o.dgamma[i] += d * n;
      o.dbeta[i] += d;
      o.dgamma_bound[i] += (double(c.rows) + 4) * kU * std::fabs(d * n);  // however the rows are added up
      o.dbeta_bound[i] += (double(c.rows) + 1) * kU * std::fabs(d);
    }
  }
  return o;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& want, const std::vector<double>& bound,
                 double roundoff, double tiny, const char* name) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], bound[i] + roundoff * (std::fabs(want[i]) + bound[i]) + tiny) << name << " at " << i;
  }
}

template <class T>
void check_backward(const Case& c, int32_t device) {
  SCOPED_TRACE(::testing::Message() << te_dtype_name(testing::kDtype<T>) << " " << c);
  Tensors<T> t(c, device);
  const std::vector<double> x = widened(t.x.read());
  std::vector<float> mean, rstd;
  for (int64_t row = 0; row < c.rows; ++row) {
    const RowOracle s = statistics(c, x.data() + row * c.hidden);
    mean.push_back(float(s.mean));
    // A row of one element has no spread: with the true rstd its n is all rounding error, magnified.
    rstd.push_back(float(c.hidden == 1 ? 1. : s.rstd));
  }
  t.mean.fill(mean);
  t.rstd.fill(rstd);
  TE_ASSERT_OK(t.backward());
  const BackwardOracle o = backward_oracle(c, widened(t.dy.read()), widened(t.residual_grad.read()), x,
                                           t.gamma_values(), widened(mean), widened(rstd));
  expect_near(widened(t.dx.read()), o.dx, o.dx_bound, kRoundoff<T>, kTiny<T>, "dx");
  const double roundoff = c.float_gamma ? kU : kRoundoff<T>, tiny = c.float_gamma ? kTiny<float> : kTiny<T>;
  expect_near(t.dgamma_values(), o.dgamma, o.dgamma_bound, roundoff, tiny, "dgamma");
  if (c.has_beta()) expect_near(t.dbeta_values(), o.dbeta, o.dbeta_bound, roundoff, tiny, "dbeta");
  EXPECT_TRUE(t.padding_untouched());
}

class Normalization : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Devices, Normalization, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(Normalization, ForwardMatchesTheOracle) {
  for (const Case& c : cases()) {
    check_forward<float>(c, GetParam());
    check_forward<bf16>(c, GetParam());
    check_forward<fp16>(c, GetParam());
  }
}

TEST_P(Normalization, BackwardMatchesTheOracle) {
  for (const Case& c : cases()) {
    check_backward<float>(c, GetParam());
    check_backward<bf16>(c, GetParam());
    check_backward<fp16>(c, GetParam());
  }
}

// The backward oracle itself: the derivative of sum(dy * y) of the forward oracle, by central differences in double.
TEST(NormalizationOracle, GradientIsTheDerivative) {
  for (const bool rms : {true, false}) {
    const Case c{.rows = 1, .hidden = 9, .rms = rms, .zero_centered = true};
    std::mt19937 generator(7);
    std::normal_distribution<double> normal;
    std::vector<double> x(9), dy(9), gamma(9);
    for (size_t i = 0; i < 9; ++i) x[i] = normal(generator), dy[i] = normal(generator), gamma[i] = normal(generator);
    const auto loss = [&] {
      const RowOracle s = statistics(c, x.data());
      double sum = 0;
      for (size_t i = 0; i < 9; ++i) sum += dy[i] * (x[i] - s.mean) * s.rstd * (gamma[i] + 1);
      return sum;
    };
    const RowOracle s = statistics(c, x.data());
    const BackwardOracle o = backward_oracle(c, dy, {}, x, gamma, {s.mean}, {s.rstd});
    const auto derivative = [&](double& at) {
      const double step = 1e-5, before = at;
      at = before + step;
      const double above = loss();
      at = before - step;
      const double below = loss();
      at = before;
      return (above - below) / (2 * step);
    };
    for (size_t i = 0; i < 9; ++i) {  // error: step^2 times a third derivative of order 10, and 1e-16 / step
      EXPECT_NEAR(o.dx[i], derivative(x[i]), 1e-8);
      EXPECT_NEAR(o.dgamma[i], derivative(gamma[i]), 1e-8);
    }
  }
}

// ---- laws ----

template <class T>
std::vector<float> floats(const std::vector<T>& values) {
  std::vector<float> out;
  for (const T& v : values) out.push_back(to_float(v));
  return out;
}

TEST_P(Normalization, StatisticsAndGradientsThatNobodyWantsAreSkipped) {
  for (const bool rms : {true, false}) {
    for (const int64_t hidden : {64, 63}) {
      const Case c{.rows = 40, .hidden = hidden, .rms = rms};
      const Tensors<bf16> all(c, GetParam()), some(c, GetParam());
      TE_ASSERT_OK(all.forward());
      TE_ASSERT_OK(te_normalization_forward(c.plan(), some.x.tensor(), kAbsent, some.gamma(), some.beta(),
                                            some.y.tensor(), kAbsent, kAbsent, kAbsent, nullptr));
      EXPECT_EQ(floats(some.y.read()), floats(all.y.read()));
      TE_ASSERT_OK(all.backward());
      const te_tensor mean = rms ? kAbsent : all.mean.tensor();
      TE_ASSERT_OK(te_normalization_backward(c.plan(), some.dy.tensor(), kAbsent, some.x.tensor(), some.gamma(), mean,
                                             all.rstd.tensor(), some.dx.tensor(), kAbsent, kAbsent, kAbsent, nullptr));
      EXPECT_EQ(floats(some.dx.read()), floats(all.dx.read()));
      TE_ASSERT_OK(te_normalization_backward(c.plan(), some.dy.tensor(), kAbsent, some.x.tensor(), some.gamma(), mean,
                                             all.rstd.tensor(), kAbsent, some.dgamma(), some.dbeta(),
                                             some.workspace->tensor(), nullptr));
      EXPECT_EQ(some.dgamma_values(), all.dgamma_values());
      if (!rms) {
        EXPECT_EQ(some.dbeta_values(), all.dbeta_values());
        const Tensors<bf16> beta_only(c, GetParam());
        TE_ASSERT_OK(te_normalization_backward(c.plan(), beta_only.dy.tensor(), kAbsent, beta_only.x.tensor(),
                                               beta_only.gamma(), mean, all.rstd.tensor(), kAbsent, kAbsent,
                                               beta_only.dbeta(), beta_only.workspace->tensor(), nullptr));
        EXPECT_EQ(beta_only.dbeta_values(), all.dbeta_values());
      }
    }
  }
}

template <class T>
void check_aliasing(int32_t device, int64_t hidden) {
  const Case c{.rows = 50, .hidden = hidden, .rms = false, .residual = true};
  const Tensors<T> apart(c, device), over_dy(c, device), over_residual(c, device);
  TE_ASSERT_OK(apart.forward());
  TE_ASSERT_OK(apart.backward());
  for (const Tensors<T>* over : {&over_dy, &over_residual}) {
    const Buffer<T>& dx = over == &over_dy ? over->dy : over->residual_grad;
    TE_ASSERT_OK(te_normalization_backward(c.plan(), over->dy.tensor(), over->residual_grad.tensor(), over->x.tensor(),
                                           over->gamma(), apart.mean.tensor(), apart.rstd.tensor(), dx.tensor(),
                                           over->dgamma(), over->dbeta(), over->workspace->tensor(), nullptr));
    EXPECT_EQ(floats(dx.read()), floats(apart.dx.read()));
    EXPECT_EQ(over->dgamma_values(), apart.dgamma_values());
    const Buffer<T>& y = over == &over_dy ? over->x : over->residual;
    const Buffer<T>& h = over == &over_dy ? over->residual : over->x;
    TE_ASSERT_OK(te_normalization_forward(c.plan(), over->x.tensor(), over->residual.tensor(), over->gamma(),
                                          over->beta(), y.tensor(), h.tensor(), over->mean.tensor(),
                                          over->rstd.tensor(), nullptr));
    EXPECT_EQ(floats(y.read()), floats(apart.y.read()));
    EXPECT_EQ(floats(h.read()), floats(apart.h.read()));
  }
}

TEST_P(Normalization, OutputsMayTakeTheirInputsMemory) {
  for (const int64_t hidden : {256, 255, 1000}) {
    check_aliasing<float>(GetParam(), hidden);
    check_aliasing<bf16>(GetParam(), hidden);
  }
}

TEST_P(Normalization, NanAndInfStayInTheirRow) {
  for (const int64_t hidden : {64, 63}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      const Case c{.rows = 3, .hidden = hidden, .rms = false};
      Tensors<float> t(c, GetParam());
      std::vector<float> x = t.x.read();
      x[size_t(hidden) + 5] = bad;
      t.x.fill(x);
      TE_ASSERT_OK(t.forward());
      TE_ASSERT_OK(t.backward());
      const std::vector<float> y = t.y.read(), dx = t.dx.read();
      for (int64_t i = 0; i < 3 * hidden; ++i) {
        EXPECT_EQ(std::isnan(y[size_t(i)]), i / hidden == 1) << i;
        EXPECT_EQ(std::isnan(dx[size_t(i)]), i / hidden == 1) << i;
      }
      for (const double v : t.dgamma_values()) EXPECT_TRUE(std::isnan(v));
    }
  }
}

// Blocks from the back, on three threads: the cut must not follow them.
void threaded_hook(int64_t n_blocks, void (*body)(void*, int64_t), void* context) {
  std::atomic<int64_t> next{n_blocks};
  const auto work = [&] {
    for (int64_t block = --next; block >= 0; block = --next) body(context, block);
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) threads.emplace_back(work);
  for (auto& thread : threads) thread.join();
}

TEST_P(Normalization, SameBitsAgainAndOnAnyNumberOfThreads) {
  const Case c{.rows = 3000, .hidden = 200, .rms = false, .residual = true};
  const Tensors<float> once(c, GetParam()), again(c, GetParam());
  TE_ASSERT_OK(once.forward());
  TE_ASSERT_OK(once.backward());
  te_set_parallel_for(threaded_hook);
  const te_status forward = again.forward(), backward = again.backward();
  te_set_parallel_for(nullptr);
  TE_ASSERT_OK(forward);
  TE_ASSERT_OK(backward);
  EXPECT_EQ(once.y.read(), again.y.read());
  EXPECT_EQ(once.dx.read(), again.dx.read());
  EXPECT_EQ(once.dgamma_t.read(), again.dgamma_t.read());
  EXPECT_EQ(once.dbeta_t.read(), again.dbeta_t.read());
}

// ---- errors ----

void expect_refused(te_status status, te_status wanted, const std::string& culprit) {
  EXPECT_EQ(status, wanted) << te_last_error();
  EXPECT_NE(std::string(te_last_error()).find(culprit), std::string::npos) << te_last_error() << " lacks " << culprit;
}

TEST_P(Normalization, WrongArgumentsAreNamed) {
  const Case layer{.rows = 4, .hidden = 64, .rms = false}, rms{.rows = 4, .hidden = 64};
  const Tensors<bf16> t(layer, GetParam());
  const Buffer<bf16> narrow(GetParam(), 4, 32);
  const Buffer<float> wide(GetParam(), 4, 64), one(GetParam(), 1, 64);
  const Buffer<uint8_t> small(GetParam(), 1, 16);
  const te_tensor x = t.x.tensor(), y = t.y.tensor(), g = t.gamma_t.tensor(), r = t.rstd.tensor();
  const auto forward = [&](te_normalization_plan plan, te_tensor in, te_tensor residual, te_tensor gamma,
                           te_tensor beta, te_tensor out, te_tensor sum, te_tensor mean, te_tensor rstd) {
    return te_normalization_forward(plan, in, residual, gamma, beta, out, sum, mean, rstd, nullptr);
  };
  const te_tensor n = kAbsent;
  const auto invalid = TE_INVALID_ARGUMENT;
  expect_refused(forward({0, 0, -1.f}, x, n, g, n, y, n, n, n), invalid, "plan.eps");
  expect_refused(forward({0, 0, NAN}, x, n, g, n, y, n, n, n), invalid, "plan.eps");
  expect_refused(forward(layer.plan(), x, n, n, n, y, n, n, n), invalid, "'gamma' is [0, 0], wanted [1, 64]");
  expect_refused(forward(layer.plan(), x, n, narrow.tensor(), n, y, n, n, n), invalid, "'gamma' is [4, 32]");
  expect_refused(forward(layer.plan(), x, n, g, n, narrow.tensor(), n, n, n), invalid,
                 "'y' is [4, 32], wanted [4, 64]");
  expect_refused(forward(layer.plan(), x, n, g, n, wide.tensor(), n, n, n), invalid, "'y' is of dtype float32");
  expect_refused(forward(layer.plan(), x, y, g, n, y, n, n, n), invalid, "'residual_out'");
  expect_refused(forward(layer.plan(), x, n, g, n, y, y, n, n), invalid, "'residual_out' is present");
  expect_refused(forward(layer.plan(), x, n, g, one.tensor(), y, n, n, n), invalid, "'beta' is of dtype float32");
  expect_refused(forward(rms.plan(), x, n, g, g, y, n, n, n), invalid, "'beta' is present, wanted none");
  expect_refused(forward(rms.plan(), x, n, g, n, y, n, r, n), invalid, "'mean' is present, wanted none");
  expect_refused(forward(layer.plan(), x, n, g, n, y, n, one.tensor(), n), invalid, "'mean' is [1, 64], wanted [1, 4]");
  te_tensor half = r;
  half.dtype = TE_FLOAT16;
  expect_refused(forward(layer.plan(), x, n, g, n, y, n, n, half), invalid, "'rstd' is of dtype float16");
  te_tensor half_gamma = g;
  half_gamma.dtype = TE_FLOAT16;
  expect_refused(forward(layer.plan(), x, n, half_gamma, n, y, n, n, n), invalid, "'gamma' is of dtype float16");
  te_tensor integers = x, integers_out = y;
  integers.dtype = integers_out.dtype = TE_UINT8;
  expect_refused(forward(layer.plan(), integers, n, one.tensor(), n, integers_out, n, n, n), invalid,
                 "'x' is of dtype uint8");
  te_tensor elsewhere = g;
  elsewhere.device = GetParam() + 1;
  expect_refused(forward(layer.plan(), x, n, elsewhere, n, y, n, n, n), invalid, "'gamma' is on cuda");

  const auto backward = [&](te_normalization_plan plan, te_tensor residual_grad, te_tensor mean, te_tensor rstd,
                            te_tensor dx, te_tensor dbeta, te_tensor workspace) {
    return te_normalization_backward(plan, t.dy.tensor(), residual_grad, x, g, mean, rstd, dx, t.dgamma_t.tensor(),
                                     dbeta, workspace, nullptr);
  };
  const te_tensor dx = t.dx.tensor(), m = t.mean.tensor(), b = t.dbeta_t.tensor(), w = t.workspace->tensor();
  expect_refused(backward(layer.plan(), n, n, r, dx, b, w), invalid, "'mean'");
  expect_refused(backward(layer.plan(), n, m, n, dx, b, w), invalid, "'rstd'");
  expect_refused(backward(layer.plan(), y, m, r, n, b, w), invalid, "'dx' is absent");
  expect_refused(backward(layer.plan(), n, m, r, narrow.tensor(), b, w), invalid, "'dx' is [4, 32]");
  expect_refused(backward(rms.plan(), n, m, r, dx, n, w), invalid, "'mean' is present");
  expect_refused(backward(rms.plan(), n, n, r, dx, b, w), invalid, "'dbeta' is present");
  if (GetParam() != TE_DEVICE_CPU) {
    expect_refused(backward(layer.plan(), n, m, r, dx, b, small.tensor()), invalid, "'workspace' is uint8 [1, 16]");
    expect_refused(backward(layer.plan(), n, m, r, dx, b, n), invalid, "'workspace'");
  }
}

TEST_P(Normalization, HiddenIsBounded) {
  const Buffer<float> wide(GetParam(), 1, 65537), none(GetParam(), 3, 0);
  const te_tensor x = wide.tensor();
  expect_refused(te_normalization_forward({1, 0, 0.f}, x, kAbsent, x, kAbsent, x, kAbsent, kAbsent, kAbsent, nullptr),
                 TE_NOT_IMPLEMENTED, "65536");
  const te_tensor e = none.tensor();
  expect_refused(te_normalization_forward({1, 0, 0.f}, e, kAbsent, e, kAbsent, e, kAbsent, kAbsent, kAbsent, nullptr),
                 TE_INVALID_ARGUMENT, "a hidden size of at least 1");
}

}  // namespace
}  // namespace te
