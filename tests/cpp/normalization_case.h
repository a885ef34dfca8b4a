// Tensors to normalize in one device's memory, and the formulas of the C header in double with their bounds. For the
// suite of normalization.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/normalization.h"

namespace te::testing {

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

inline std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "[" << c.rows << ", " << c.hidden << "] extra pitch " << c.extra_pitch
             << (c.rms ? " RMSNorm" : " LayerNorm") << (c.zero_centered ? " zero-centered" : "")
             << (c.residual ? " residual" : "") << (c.float_gamma ? " float gamma" : "")
             << (c.has_beta() ? " beta" : "") << " shift " << c.shift;
}

inline std::vector<Case> cases() {
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

inline RowOracle statistics(const Case& c, const double* h) {
  RowOracle s;
  for (int64_t i = 0; i < c.hidden && !c.rms; ++i) s.mean += h[i] / double(c.hidden);
  for (int64_t i = 0; i < c.hidden; ++i) s.var += (h[i] - s.mean) * (h[i] - s.mean) / double(c.hidden);
  s.rstd = 1 / std::sqrt(s.var + double(c.eps));
  return s;
}

// Additions between an element and its row's sum. CPU: a lane's in a chunk, the lanes', the chunks'. CUDA: a vector's
// and a thread's, two butterflies; an unaligned row's thread has hidden / 512 elements.
inline double row_depth(int64_t hidden) { return 40. + double(hidden) / 256.; }

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
inline BackwardOracle backward_oracle(const Case& c, const std::vector<double>& dy,
                                      const std::vector<double>& residual_grad, const std::vector<double>& x,
                                      const std::vector<double>& gamma, const std::vector<double>& mean,
                                      const std::vector<double>& rstd) {
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

inline void expect_near(const std::vector<double>& got, const std::vector<double>& want,
                        const std::vector<double>& bound, double roundoff, double tiny, const char* name) {
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

}  // namespace te::testing
