// normalization through the C API, on every device here: values, statistics and gradients against a double oracle, and
// the room's laws (poisoned outputs, pitch, absent tensors, aliasing, thread count, errors).
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

#include "normalization_case.h"

namespace te {
namespace {

using namespace testing;

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

TEST_P(Normalization, UnwantedStatisticsAndGradientsAreSkipped) {
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
