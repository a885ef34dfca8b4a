// The activation with a scale for each row, through the C API on every device here: its bits are those of
// te_activation_forward and _backward with the products of a separate multiplication, the scale's gradient is a sum
// within its bound, and rows after the live ones, NaN here, are neither read nor written.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "activation_scaled_case.h"
#include "transformer_engine/activation.h"

namespace te {
namespace {

using namespace testing;

class ScaledActivation : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, ScaledActivation, ::testing::ValuesIn(devices()), device_name);

template <class T, class S>
void check(int32_t device, int kind, const ScaledShape& shape) {
  ScaledCase<T, S> c(device, kind, shape);
  TE_ASSERT_OK(
      te_activation_scaled_forward(kind, kDefaults, c.x.tensor(), c.scale.tensor(), c.live(), c.y.tensor(), nullptr));
  TE_ASSERT_OK(te_activation_scaled_backward(kind, kDefaults, c.dy.tensor(), c.x.tensor(), c.scale.tensor(), c.live(),
                                             c.dx.tensor(), c.dscale.tensor(), c.again.tensor(), nullptr));
  c.expect_as_separate();
}

TEST_P(ScaledActivation, IsTheActivationAndAProduct) {
  for (int kind = 0; kind < te_activation_count(); ++kind) {
    for (const ScaledShape& shape : kScaledShapes) {
      check<float, float>(GetParam(), kind, shape);
      check<fp16, float>(GetParam(), kind, shape);
      check<bf16, float>(GetParam(), kind, shape);
      check<fp16, fp16>(GetParam(), kind, shape);
      check<bf16, bf16>(GetParam(), kind, shape);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(ScaledActivation, ResultsThatAreNotWantedMayBeAbsent) {
  const int kind = te_activation_kind("swiglu");
  ScaledCase<bf16, float> c(GetParam(), kind, {9, 64, 0, 7}), all(GetParam(), kind, {9, 64, 0, 7});
  TE_ASSERT_OK(te_activation_scaled_backward(kind, kDefaults, c.dy.tensor(), c.x.tensor(), c.scale.tensor(), c.live(),
                                             c.dx.tensor(), kAbsent, kAbsent, nullptr));
  TE_ASSERT_OK(te_activation_scaled_backward(kind, kDefaults, all.dy.tensor(), all.x.tensor(), all.scale.tensor(),
                                             all.live(), all.dx.tensor(), all.dscale.tensor(), all.again.tensor(),
                                             nullptr));
  EXPECT_TRUE(same_bits(c.dx.read(), all.dx.read()));
  for (const float v : c.dscale.read()) EXPECT_TRUE(std::isnan(v));
}

TEST_P(ScaledActivation, BadArgumentsAreNamedAndWriteNothing) {
  const int kind = te_activation_kind("swiglu");
  ScaledCase<bf16, float> c(GetParam(), kind, {4, 8, 0, 3});
  const auto with = [](te_tensor t, auto&& change) {
    change(t);
    return t;
  };
  const te_tensor x = c.x.tensor(), scale = c.scale.tensor(), y = c.y.tensor(), dx = c.dx.tensor(), live = c.live();
  const auto forward = [&](te_tensor in, te_tensor s, te_tensor n, te_tensor out) {
    return te_activation_scaled_forward(kind, kDefaults, in, s, n, out, nullptr);
  };
  const auto backward = [&](te_tensor gradient, te_tensor dscale, te_tensor out) {
    return te_activation_scaled_backward(kind, kDefaults, c.dy.tensor(), x, scale, live, gradient, dscale, out,
                                         nullptr);
  };
  const auto narrow = [](te_tensor& t) { t.cols -= 1; };
  const auto half = [](te_tensor& t) { t.dtype = TE_FLOAT16; };
  const auto away = [](te_tensor& t) { t.device = t.device == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU; };
  const auto expect = [&](te_status status, const char* argument) {
    EXPECT_EQ(status, TE_INVALID_ARGUMENT) << argument;
    EXPECT_NE(std::string(te_last_error()).find(argument), std::string::npos) << te_last_error();
  };
  expect(te_activation_scaled_forward(-1, kDefaults, x, scale, live, y, nullptr), "'kind'");
  expect(forward(with(x, narrow), scale, live, y), "'x'");
  expect(forward(x, with(scale, narrow), live, y), "'scale'");
  expect(forward(x, with(scale, half), live, y), "'scale'");
  expect(forward(x, with(scale, away), live, y), "'scale'");
  expect(forward(x, scale, with(live, [](te_tensor& t) { t.dtype = TE_INT64; }), y), "'live'");
  expect(forward(x, scale, with(live, [](te_tensor& t) { t.cols = t.row_pitch = 2; }), y), "'live'");
  expect(forward(x, scale, with(live, away), y), "'live'");
  expect(backward(with(dx, narrow), c.dscale.tensor(), y), "'dx'");
  expect(backward(dx, with(c.dscale.tensor(), half), y), "'dscale'");
  expect(backward(dx, c.dscale.tensor(), with(y, narrow)), "'y'");
  for (const bf16 v : c.y.read()) EXPECT_TRUE(std::isnan(to_float(v))) << "a refused call wrote";
  for (const bf16 v : c.dx.read()) EXPECT_TRUE(std::isnan(to_float(v))) << "a refused call wrote";
}

}  // namespace
}  // namespace te
