// optimizer through the C API, on every device here: Adam and SGD against a double oracle, and bit for bit against the
// formulas applied to one element after the other, for every dtype, at any address, however tensors are cut; arguments
// on the device; scaled states and FP8 weights; scaling and norms; errors.
#include "transformer_engine/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/optimizer/optimizer_math.h"
#include "ops/quantize/fp8.h"
#include "optimizer_case.h"

namespace te {
namespace {

using namespace testing;

class Optimizer : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Devices, Optimizer, ::testing::ValuesIn(testing::devices()), testing::device_name);

// ---- Adam ----

// One step of plain doubles, and how far float32 may be from it. u = 2^-24; constants are rounded once each.
//   m: two products and a sum, and two constants: 4 u (|b1 m| + |(1 - b1) g|); v: one product more: 5 u v'.
//   u: m' is off by em, multiplied by a constant (2 u); sqrt halves v's 5 u and its product's 2 u, and rounds: 5 u; the
//   sum with eps 2 u, the quotient 1 u: em c / den + 10 u |u|. p: lr, the decay and its product 2 u each, the last fma.
TEST_P(Optimizer, AdamMatchesDoubles) {
  const double u = 0x1p-24;
  for (const int decoupled : {0, 1}) {
    for (const int bias_correction : {0, 1}) {
      for (const size_t n : {size_t(0), size_t(1), size_t(7), size_t(255), size_t(2048), size_t(5000)}) {
        te_adam_plan plan = plan_of(TE_FLOAT32, TE_FLOAT32, TE_FLOAT32, TE_FLOAT32, TE_MASTER_NONE);
        plan.decoupled = decoupled;
        plan.bias_correction = bias_correction;
        const Problem given = problem_of(plan, n);
        const Problem got = by_engine(GetParam(), given, {n});
        const double c1 = bias_correction ? 1 - std::pow(plan.beta1, plan.step) : 1.0;
        const double c2 = bias_correction ? 1 - std::pow(plan.beta2, plan.step) : 1.0;
        for (size_t i = 0; i < n; ++i) {
          double value[4];
          for (int k = 0; k < 4; ++k) value[k] = double(read(TE_FLOAT32, given.list[k].data() + 4 * i));
          auto [g, p, m, v] = value;
          if (!decoupled) g += plan.weight_decay * p;
          const double g_error = decoupled ? 0.0 : 3 * u * (std::fabs(value[0]) + std::fabs(plan.weight_decay * p));
          const double m_error = 4 * u * (std::fabs(plan.beta1 * m) + std::fabs((1 - plan.beta1) * g)) + g_error;
          m = plan.beta1 * m + (1 - plan.beta1) * g;
          v = plan.beta2 * v + (1 - plan.beta2) * g * g;
          const double v_error = 5 * u * v + 2 * (1 - plan.beta2) * std::fabs(g) * g_error;
          const double den = std::sqrt(v / c2) + plan.eps;
          double update = (m / c1) / den;
          const double u_error = m_error / c1 / den + std::fabs(update) * (10 * u + v_error / v / 2);
          const double decay = decoupled ? plan.weight_decay * p : 0.0;
          update += decay;
          const double p_error =
              plan.lr * (u_error + 4 * u * (std::fabs(update) + std::fabs(decay))) + 2 * u * std::fabs(p);
          p -= plan.lr * update;
          const double want[3] = {p, m, v}, bound[3] = {p_error, m_error, v_error};
          for (int k = 0; k < 3; ++k) {
            const double have = double(read(TE_FLOAT32, got.list[k + 1].data() + 4 * i));
            ASSERT_LE(std::fabs(have - want[k]), bound[k]) << "list " << k + 1 << " element " << i;
          }
        }
      }
    }
  }
}

struct Weights {
  te_dtype param;
  te_master master;
};
const Weights kWeights[] = {{TE_FLOAT32, TE_MASTER_NONE},        {TE_FLOAT16, TE_MASTER_NONE},
                            {TE_BFLOAT16, TE_MASTER_NONE},       {TE_FLOAT32, TE_MASTER_FLOAT32},
                            {TE_BFLOAT16, TE_MASTER_FLOAT32},    {TE_FLOAT16, TE_MASTER_FLOAT16},
                            {TE_BFLOAT16, TE_MASTER_FLOAT16},    {TE_BFLOAT16, TE_MASTER_REMAINDER},
                            {TE_FLOAT8_E4M3, TE_MASTER_FLOAT32}, {TE_FLOAT8_E5M2, TE_MASTER_FLOAT16}};
const te_dtype kFloats[] = {TE_FLOAT32, TE_FLOAT16, TE_BFLOAT16};
const te_dtype kMoments[] = {TE_FLOAT32, TE_FLOAT16, TE_BFLOAT16, TE_FLOAT8_E4M3};

std::string name_of(const te_adam_plan& plan) {
  return concat(te_dtype_name(plan.grad), " ", te_dtype_name(plan.param), " ", te_dtype_name(plan.exp_avg), " ",
                te_dtype_name(plan.exp_avg_sq), " master ", int(plan.master));
}

template <class Body>
void for_all_dtypes(Body&& body) {
  for (const te_dtype grad : kFloats) {
    for (const Weights& w : kWeights) {
      for (const te_dtype m : kMoments) {
        for (const te_dtype v : kMoments) body(plan_of(grad, w.param, m, v, w.master));
      }
    }
  }
}

TEST_P(Optimizer, AdamOfEveryDtypeIsTheFormula) {
  for_all_dtypes([&](te_adam_plan plan) {
    for (const size_t n : {size_t(1), size_t(7), size_t(2600)}) {
      for (const size_t offset : {size_t(0), size_t(1)}) {  // vectors and their tails; one element at a time
        Problem given = problem_of(plan, n);
        given.clip = 0.75f;
        expect_same(by_engine(GetParam(), given, {n}, offset), stepped(given), concat(name_of(plan), " ", n, offset));
      }
    }
  });
}

TEST_P(Optimizer, CutsAndGroupsChangeNoBit) {
  for (const te_dtype grad : {TE_FLOAT32, TE_BFLOAT16}) {
    for (const Weights& w : {kWeights[0], kWeights[4], kWeights[7], kWeights[1]}) {
      const Problem given = problem_of(plan_of(grad, w.param, TE_FLOAT32, TE_BFLOAT16, w.master), 20011);
      const Problem whole = stepped(given);
      for (const auto& sizes : std::vector<std::vector<size_t>>{
               {20011}, {1, 20010}, {7, 0, 4096, 2048, 13860}, {2048, 2048, 15915}, {0, 10000, 10011, 0}}) {
        expect_same(by_engine(GetParam(), given, sizes), whole, name_of(given.plan));
      }
    }
  }
}

TEST_P(Optimizer, TenThousandTensors) {
  std::vector<size_t> sizes;
  size_t n = 0;
  for (size_t i = 0; i < 10000; ++i) {
    sizes.push_back(i % 17 == 0 ? 0 : i % 5);
    n += sizes.back();
  }
  for (const Weights& w : {kWeights[0], kWeights[5], kWeights[7]}) {
    const te_dtype moments = w.master == TE_MASTER_FLOAT16 ? TE_FLOAT32 : TE_BFLOAT16;
    te_adam_plan plan = plan_of(TE_FLOAT32, w.param, moments, moments, w.master);
    if (w.master == TE_MASTER_FLOAT16)
      plan.master = TE_MASTER_NONE;  // mixed lists, without scales that they would share
    const Problem given = problem_of(plan, n);
    expect_same(by_engine(GetParam(), given, sizes), stepped(given), name_of(plan));
  }
}

TEST_P(Optimizer, RemaindersAreTheMasters) {
  te_adam_plan halves = plan_of(TE_FLOAT32, TE_BFLOAT16, TE_FLOAT32, TE_FLOAT32, TE_MASTER_REMAINDER);
  Problem split = problem_of(halves, 4099);
  Problem whole = problem_of(plan_of(TE_FLOAT32, TE_BFLOAT16, TE_FLOAT32, TE_FLOAT32, TE_MASTER_FLOAT32), 4099);
  for (int step = 1; step <= 5; ++step) {
    split.plan.step = whole.plan.step = step;
    split = by_engine(GetParam(), split, {4099});
    whole = by_engine(GetParam(), whole, {4099});
  }
  for (size_t i = 0; i < split.n; ++i) {
    optimizer::Halves h;
    std::memcpy(&h.weight, split.list[1].data() + 2 * i, 2);
    std::memcpy(&h.remainder, split.list[4].data() + 2 * i, 2);
    ASSERT_EQ(optimizer::joined(h.weight, h.remainder), read(TE_FLOAT32, whole.list[4].data() + 4 * i));
  }
  for (const float x : {0.f, -0.f, 1.f, 3.4e38f, -3.4e38f, 1e-45f, INFINITY, -INFINITY}) {
    const optimizer::Halves h = optimizer::halves_of(x);
    EXPECT_EQ(detail::bits_of(optimizer::joined(h.weight, h.remainder)), detail::bits_of(x));
  }
  const optimizer::Halves nan = optimizer::halves_of(detail::float_of(0x7fffffffu));
  EXPECT_TRUE(std::isnan(to_float(bf16{nan.weight})));
}

TEST_P(Optimizer, ScaledStatesKeepTheirScale) {
  for (const te_dtype moment : {TE_FLOAT16, TE_FLOAT8_E4M3}) {
    Problem p = problem_of(plan_of(TE_FLOAT32, TE_BFLOAT16, moment, moment, TE_MASTER_FLOAT16), 5000);
    Problem wanted = p;
    for (int step = 1; step <= 4; ++step) {  // the maxima of one step must not be left for the next
      p.plan.step = wanted.plan.step = step;
      for (auto* each : {&p, &wanted}) each->list[0] = bytes_of(TE_FLOAT32, Floats(5000, step == 1 ? 3.f : 1e-3f));
      p = by_engine(GetParam(), p, {5000});
      wanted = stepped(wanted);
      expect_same(p, wanted, concat("step ", step));
    }
  }
  EXPECT_EQ(optimizer::state_scale(0.f, 448.f), 1.f);
  EXPECT_EQ(optimizer::state_scale(INFINITY, 448.f), 1.f);
  EXPECT_EQ(optimizer::state_scale(NAN, 448.f), 1.f);
  EXPECT_EQ(optimizer::state_scale(1e-40f, 448.f), FLT_MIN);
}

TEST_P(Optimizer, Fp8WeightsAtAPitch) {
  const int64_t rows = 37, cols = 21, pitch = 32, n = rows * cols;
  const Problem given = problem_of(plan_of(TE_BFLOAT16, TE_FLOAT8_E4M3, TE_FLOAT32, TE_FLOAT32, TE_MASTER_FLOAT32), n);
  const Problem wanted = stepped(given);
  Buffer<uint8_t> weight(GetParam(), rows, cols, pitch);
  std::unique_ptr<Memory> memory[5];
  te_optimizer_tensor t{n, {}};
  for (const int list : {0, 2, 3, 4}) {
    memory[list] = std::make_unique<Memory>(GetParam(), given.list[list], 0);
    t.data[list] = memory[list]->data();
  }
  t.data[1] = weight.data();
  Buffer<float> scale(GetParam(), 1, 3);
  scale.fill({given.fp8_scale, 100.f, 0.f});  // an amax that is larger stays
  float* const at = scale.data();
  const te_adam_scales scales{nullptr, nullptr, nullptr, at, at + 1, at + 2, cols, pitch};
  TE_ASSERT_OK(te_optimizer_adam(&given.plan, &t, &scales, 1, GetParam(), nullptr));
  EXPECT_TRUE(weight.read() == wanted.list[1]);
  EXPECT_TRUE(weight.padding_untouched());
  EXPECT_TRUE(memory[4]->read() == wanted.list[4]);
  EXPECT_EQ(scale.read()[1], 100.f);
  EXPECT_EQ(scale.read()[2], 1.f / given.fp8_scale);
}

TEST_P(Optimizer, ArgumentsOnTheDeviceGiveTheSameBits) {
  for (const Weights& w : {kWeights[0], kWeights[7], kWeights[5], kWeights[8]}) {
    for (const te_dtype moment : {TE_FLOAT32, TE_FLOAT8_E4M3}) {
      te_adam_plan plan = plan_of(TE_FLOAT32, w.param, moment, moment, w.master);
      plan.step = 7;
      Problem given = problem_of(plan, 3000);
      const Problem wanted = stepped(given);
      Buffer<float> lr(GetParam(), 1, 1), float_flag(GetParam(), 1, 1);
      Buffer<int32_t> step(GetParam(), 1, 1), flag(GetParam(), 1, 1);
      lr.fill({float(plan.lr)});
      step.fill({6});
      flag.fill({0});
      float_flag.fill({1.f});
      TE_ASSERT_OK(te_optimizer_count_step(one(step), one(flag), nullptr));
      TE_ASSERT_OK(te_optimizer_count_step(one(step), one(float_flag), nullptr));
      EXPECT_EQ(step.read()[0], 7);
      Problem on_device = given;
      on_device.plan.lr = on_device.plan.step = 0;
      on_device.plan.lr_device = one(lr);
      on_device.plan.step_device = one(step);
      on_device.plan.noop = one(flag);
      expect_same(by_engine(GetParam(), on_device, {3000}), wanted, name_of(plan));
      for (const te_tensor& raised : {one(float_flag), one(step)}) {
        on_device.plan.noop = raised;
        expect_same(by_engine(GetParam(), on_device, {3000}), given, "skipped");
      }
      given.inv_scale = 0.3f;
      given.plan.inv_scale = one(lr);
      expect_same(by_engine(GetParam(), given, {3000}), stepped(given), "unscaled");
    }
  }
}

TEST_P(Optimizer, InfAndNanPass) {
  Problem given = problem_of(plan_of(TE_FLOAT32, TE_FLOAT32, TE_FLOAT32, TE_FLOAT32, TE_MASTER_NONE), 100);
  write(TE_FLOAT32, given.list[0].data() + 4 * 3, INFINITY);
  write(TE_FLOAT32, given.list[0].data() + 4 * 50, NAN);
  const Problem got = by_engine(GetParam(), given, {100});
  EXPECT_EQ(read(TE_FLOAT32, got.list[2].data() + 4 * 3), INFINITY);
  for (int list = 1; list < 4; ++list) EXPECT_TRUE(std::isnan(read(TE_FLOAT32, got.list[list].data() + 4 * 50)));
  EXPECT_FALSE(std::isnan(read(TE_FLOAT32, got.list[1].data() + 4 * 51)));
}

TEST_P(Optimizer, AdamErrors) {
  Problem p = problem_of(plan_of(TE_FLOAT32, TE_FLOAT32, TE_FLOAT32, TE_FLOAT32, TE_MASTER_NONE), 8);
  Buffer<float> data(GetParam(), 1, 64);
  const te_optimizer_tensor t{8, {data.data(), data.data() + 8, data.data() + 16, data.data() + 24, nullptr}};
  const auto refused = [&](const te_adam_plan& plan, const te_optimizer_tensor& tensor, const std::string& word) {
    EXPECT_EQ(te_optimizer_adam(&plan, &tensor, nullptr, 1, GetParam(), nullptr), TE_INVALID_ARGUMENT) << word;
    EXPECT_NE(std::string(te_last_error()).find(word), std::string::npos) << te_last_error();
  };
  const auto with = [&](auto&& change) {
    te_adam_plan plan = p.plan;
    change(plan);
    return plan;
  };
  refused(with([](auto& q) { q.beta1 = 1.0; }), t, "beta1");
  refused(with([](auto& q) { q.beta2 = -0.1; }), t, "beta2");
  refused(with([](auto& q) { q.eps = NAN; }), t, "eps");
  refused(with([](auto& q) { q.step = 0; }), t, "step");
  refused(with([](auto& q) { q.grad = TE_INT32; }), t, "grad");
  refused(with([](auto& q) { q.exp_avg = TE_FLOAT8_E5M2; }), t, "exp_avg");
  refused(with([](auto& q) { q.exp_avg_sq = TE_FLOAT16; }), t, "scales");
  refused(with([](auto& q) { q.master = TE_MASTER_REMAINDER; }), t, "param");
  refused(with([](auto& q) { q.param = TE_FLOAT8_E4M3; }), t, "master");
  refused(with([](auto& q) { q.master = TE_MASTER_FLOAT32; }), t, "master");
  refused(with([&](auto& q) { q.lr_device = data.tensor(); }), t, "lr_device");
  refused(with([&](auto& q) { q.noop = data.tensor(TE_INT64); }), t, "noop");
  te_optimizer_tensor odd = t;
  odd.numel = -1;
  refused(p.plan, odd, "numel");
  odd = t;
  odd.data[2] = nullptr;
  refused(p.plan, odd, "exp_avg");
  for (const float x : data.read()) EXPECT_TRUE(std::isnan(x));
}

}  // namespace
}  // namespace te
