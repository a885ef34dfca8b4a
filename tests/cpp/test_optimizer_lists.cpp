// optimizer through the C API, on every device here, what is smaller than Adam: SGD against doubles and bit for bit
// against its formula, scaling with its flag, norms that no address changes, FP8 scales. Mutant: read a norm's chunk
// from its tensor's start (square_sums_kernel: drop + at.first) and NormsMatchDoubles turns red.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "ops/optimizer/optimizer_math.h"
#include "ops/quantize/fp8.h"
#include "transformer_engine/optimizer.h"

namespace te {
namespace {

using testing::Buffer;
using testing::kDtype;
using Floats = std::vector<float>;

Floats normals(size_t n, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats values(n);
  for (float& x : values) x = normal(random);
  return values;
}

template <class T>
std::vector<T> rounded(const Floats& values) {
  std::vector<T> out;
  for (const float x : values) out.push_back(from_float<T>(x));
  return out;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

class Lists : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Devices, Lists, ::testing::ValuesIn(testing::devices()), testing::device_name);

// ---- SGD ----

template <class G, class P, class B>
void check_sgd(int32_t device, const te_sgd_plan& given, int64_t n, int64_t offset) {
  te_sgd_plan plan = given;
  plan.grad = kDtype<G>;
  plan.param = kDtype<P>;
  plan.momentum_buffer = kDtype<B>;
  plan.copy = TE_FLOAT16;
  plan.has_copy = 1;
  const auto all = size_t(n + offset);
  const auto g = rounded<G>(normals(all, 1));
  auto p = rounded<P>(normals(all, 2));
  auto b = rounded<B>(normals(all, 3));
  auto copy = rounded<fp16>(Floats(all, 0.f));
  Buffer<G> g_memory(device, 1, n + offset);
  Buffer<P> p_memory(device, 1, n + offset);
  Buffer<B> b_memory(device, 1, n + offset);
  Buffer<fp16> copy_memory(device, 1, n + offset);
  g_memory.fill(g);
  p_memory.fill(p);
  b_memory.fill(b);
  copy_memory.fill(copy);
  const int64_t cut = n / 3;  // two tensors
  const auto tensor = [&](int64_t first, int64_t size) {
    return te_optimizer_tensor{
        size, {g_memory.data() + first, p_memory.data() + first, b_memory.data() + first, copy_memory.data() + first}};
  };
  const te_optimizer_tensor tensors[] = {tensor(offset, cut), tensor(offset + cut, n - cut)};
  TE_ASSERT_OK(te_optimizer_sgd(&plan, tensors, 2, device, nullptr));
  const optimizer::Sgd s(plan);
  for (auto i = size_t(offset); i < all; ++i) {
    float w = to_float(p[i]), momentum = to_float(b[i]);
    if (plan.momentum != 0.0) {
      optimizer::sgd_step<true>(s, to_float(g[i]), w, momentum);
      b[i] = from_float<B>(momentum);
    } else {
      optimizer::sgd_step<false>(s, to_float(g[i]), w, momentum);
    }
    // by hand, in double: as many roundings as the formula has terms, of numbers no larger than these
    const double x = double(to_float(p[i])), decay = plan.weight_decay * x;
    double d = double(to_float(g[i])) * plan.scale + (plan.decay_after_momentum ? 0.0 : decay);
    if (plan.momentum != 0.0) {
      const double old = testing::widened(std::vector<B>{b_memory.read()[i]})[0];
      EXPECT_EQ(old, double(to_float(b[i])));
      const double m = double(momentum);
      d = plan.nesterov ? d + plan.momentum * m : m;
    }
    if (plan.decay_after_momentum) d += decay;
    const double size = std::fabs(x) + plan.lr * (std::fabs(d) + std::fabs(decay) + std::fabs(double(momentum)) +
                                                  std::fabs(double(to_float(g[i]))));
    EXPECT_NEAR(double(w), x - plan.lr * d, 8 * 0x1p-24 * size);
    p[i] = from_float<P>(w);
    copy[i] = from_float<fp16>(w);
  }
  EXPECT_TRUE(same_bits(p_memory.read(), p)) << "n " << n << " offset " << offset;
  EXPECT_TRUE(same_bits(b_memory.read(), b));
  EXPECT_TRUE(same_bits(copy_memory.read(), copy));
  EXPECT_TRUE(same_bits(g_memory.read(), g));
}

TEST_P(Lists, SgdIsTheFormula) {
  te_sgd_plan plain{};
  plain.lr = 0.1;
  plain.weight_decay = 0.01;
  plain.scale = 0.5;
  te_sgd_plan momentum = plain, first, after, nesterov;
  momentum.momentum = 0.9;
  momentum.dampening = 0.2;
  first = after = nesterov = momentum;
  first.first_run = 1;
  after.decay_after_momentum = 1;
  nesterov.nesterov = 1;
  nesterov.dampening = 0.0;
  for (const te_sgd_plan& plan : {plain, momentum, first, after, nesterov}) {
    check_sgd<float, float, float>(GetParam(), plan, 301, 0);
    check_sgd<bf16, float, float>(GetParam(), plan, 33, 1);
    check_sgd<fp16, fp16, fp16>(GetParam(), plan, 64, 0);
    check_sgd<float, bf16, bf16>(GetParam(), plan, 2, 0);
  }
}

TEST_P(Lists, SgdSkipsAndRefuses) {
  Buffer<float> data(GetParam(), 1, 8);
  Buffer<int32_t> flag(GetParam(), 1, 1);
  data.fill(Floats(8, 1.f));
  flag.fill({1});
  const te_optimizer_tensor t{4, {data.data(), data.data() + 4}};
  te_sgd_plan plan{};
  plan.lr = plan.scale = 1.0;
  plan.grad = plan.param = TE_FLOAT32;
  plan.noop = flag.tensor();
  TE_EXPECT_OK(te_optimizer_sgd(&plan, &t, 1, GetParam(), nullptr));
  EXPECT_EQ(data.read(), Floats(8, 1.f));
  plan.nesterov = 1;
  EXPECT_EQ(te_optimizer_sgd(&plan, &t, 1, GetParam(), nullptr), TE_INVALID_ARGUMENT);
  plan.nesterov = 0;
  plan.momentum = 0.9;
  EXPECT_EQ(te_optimizer_sgd(&plan, &t, 1, GetParam(), nullptr), TE_INVALID_ARGUMENT);
  plan.momentum_buffer = TE_FLOAT32;
  EXPECT_EQ(te_optimizer_sgd(&plan, &t, 1, GetParam(), nullptr), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("momentum"), std::string::npos);
}

// ---- scaling ----

template <class In, class Out>
void check_scale(int32_t device, int64_t n, int64_t offset, bool on_device) {
  const float factor = 0.3f;
  const auto in = rounded<In>(normals(size_t(n)));
  Buffer<In> source(device, 1, n + offset);
  Buffer<Out> target(device, 1, n + offset);
  Buffer<float> scale(device, 1, 1);
  Buffer<int32_t> flag(device, 1, 1);
  std::vector<In> shifted(size_t(offset), In{});
  shifted.insert(shifted.end(), in.begin(), in.end());
  source.fill(shifted);
  scale.fill({factor});
  flag.fill({0});
  te_scale_plan plan{};
  plan.scale = on_device ? 7.0 : double(factor);
  if (on_device) plan.scale_device = scale.tensor();
  plan.in = kDtype<In>;
  plan.out = kDtype<Out>;
  plan.noop = flag.tensor();
  const te_optimizer_tensor tensors[] = {{n, {source.data() + offset, target.data() + offset}}, {0, {}}};
  TE_ASSERT_OK(te_optimizer_scale(&plan, tensors, 2, device, nullptr));
  const auto got = target.read();
  for (int64_t i = 0; i < n; ++i) {
    const Out want = from_float<Out>(to_float(in[size_t(i)]) * factor);
    ASSERT_EQ(to_float(got[size_t(i + offset)]), to_float(want)) << i;
  }
  EXPECT_TRUE(target.padding_untouched());
  EXPECT_EQ(flag.read()[0], 0);
}

TEST_P(Lists, ScaleRoundsOnce) {
  for (const bool on_device : {false, true}) {
    for (const auto& [n, offset] : {std::pair(1, 0), std::pair(4099, 0), std::pair(2050, 1)}) {
      check_scale<float, float>(GetParam(), n, offset, on_device);
      check_scale<float, fp16>(GetParam(), n, offset, on_device);
      check_scale<bf16, float>(GetParam(), n, offset, on_device);
      check_scale<fp16, bf16>(GetParam(), n, offset, on_device);
    }
  }
}

TEST_P(Lists, ScaleRaisesTheFlag) {
  for (const float bad : {INFINITY, -INFINITY, NAN, 3e38f}) {  // the last one overflows
    for (const size_t where : {size_t(0), size_t(2047), size_t(4098)}) {
      Floats values(4099, 1.f);
      values[where] = bad;
      Buffer<float> x(GetParam(), 1, 4099), flag(GetParam(), 1, 1);
      x.fill(values);
      flag.fill({0.f});
      te_scale_plan plan{};
      plan.scale = 4.0;
      plan.in = plan.out = TE_FLOAT32;
      plan.noop = flag.tensor();
      const te_optimizer_tensor t{4099, {x.data(), x.data()}};
      TE_ASSERT_OK(te_optimizer_scale(&plan, &t, 1, GetParam(), nullptr));
      EXPECT_EQ(flag.read()[0], 1.f);
      EXPECT_EQ(x.read()[1], where == 1 ? values[1] : 4.f);  // the rest is scaled all the same
    }
  }
}

// ---- norms ----

// The norm of tensors that start `offset` elements after a multiple of 256 bytes, and the norms of each.
template <class T>
std::pair<float, Floats> norms(int32_t device, const std::vector<Floats>& values, int64_t offset, float inv_scale,
                               Buffer<int32_t>* flag = nullptr) {
  std::vector<std::unique_ptr<Buffer<T>>> memory;
  std::vector<te_optimizer_tensor> tensors;
  std::vector<int64_t> chunks;
  int64_t all = 0;
  for (const Floats& v : values) {
    const auto n = int64_t(v.size());
    memory.push_back(std::make_unique<Buffer<T>>(device, 1, n + offset));
    auto shifted = rounded<T>(Floats(size_t(offset), NAN));
    for (const float x : v) shifted.push_back(from_float<T>(x));
    memory.back()->fill(shifted);
    tensors.push_back({n, {memory.back()->data() + offset}});
    chunks.push_back((n + TE_OPTIMIZER_NORM_CHUNK - 1) / TE_OPTIMIZER_NORM_CHUNK);
    all += chunks.back();
  }
  const auto count = int64_t(values.size());
  Buffer<int64_t> partials(device, 1, all + 1);  // as wide as doubles
  Buffer<float> norm(device, 1, 1), each(device, 1, count), factor(device, 1, 1);
  factor.fill({inv_scale});
  auto* sums = reinterpret_cast<double*>(partials.data());
  TE_EXPECT_OK(te_optimizer_square_sums(tensors.data(), count, kDtype<T>, factor.tensor(), sums, device, nullptr));
  const te_tensor noop = flag == nullptr ? te_tensor{} : flag->tensor();
  TE_EXPECT_OK(te_optimizer_norm(sums, chunks.data(), count, norm.tensor(), each.tensor(), noop, nullptr));
  EXPECT_EQ(partials.read().back(), -1);
  return {norm.read()[0], each.read()};
}

// Squares of floats are exact in double, and the sums of these few hundred thousand are within 2^-30 of theirs; the
// product with inv_scale and the result are rounded to float32 once each.
template <class T>
void check_norms(int32_t device, float inv_scale) {
  std::vector<Floats> values;
  for (const size_t n : {0, 1, 7, 32767, 32768, 32769, 100003, 512}) {
    values.push_back(normals(n, unsigned(n)));
    for (float& x : values.back()) x = to_float(from_float<T>(x));
  }
  const auto [norm, each] = norms<T>(device, values, 0, inv_scale);
  double total = 0.0;
  for (size_t t = 0; t < values.size(); ++t) {
    double sum = 0.0;
    for (const float x : values[t]) sum += double(x) * double(inv_scale) * double(x) * double(inv_scale);
    EXPECT_NEAR(double(each[t]), std::sqrt(sum), 3 * 0x1p-24 * std::sqrt(sum)) << t;
    total += sum;
  }
  EXPECT_NEAR(double(norm), std::sqrt(total), 3 * 0x1p-24 * std::sqrt(total));
  for (const int64_t offset : {1, 3}) {
    const auto [other, others] = norms<T>(device, values, offset, inv_scale);
    EXPECT_EQ(other, norm);
    EXPECT_EQ(others, each);
  }
}

TEST_P(Lists, NormsMatchDoubles) {
  check_norms<float>(GetParam(), 1.f);
  check_norms<fp16>(GetParam(), 0.3f);
  check_norms<bf16>(GetParam(), 1024.f);
}

TEST_P(Lists, NormsOfManyTensorsAndOfNone) {
  const std::vector<Floats> many(5001, Floats{3.f, 4.f});
  const auto [norm, each] = norms<float>(GetParam(), many, 0, 1.f);
  EXPECT_EQ(each, Floats(5001, 5.f));
  EXPECT_EQ(norm, float(std::sqrt(5001.0 * 25.0)));
  EXPECT_EQ(norms<float>(GetParam(), {}, 0, 1.f).first, 0.f);
  EXPECT_EQ(norms<float>(GetParam(), {{}}, 0, 1.f).first, 0.f);
  EXPECT_EQ(norms<float>(GetParam(), {{1e30f, 1e30f}}, 0, 1.f).first, float(std::sqrt(2.0) * double(1e30f)));
}

TEST_P(Lists, NormsRaiseTheFlag) {
  for (const float bad : {INFINITY, NAN, 3.4e38f}) {
    Buffer<int32_t> flag(GetParam(), 1, 1);
    flag.fill({0});
    norms<float>(GetParam(), {{1.f}, {bad, bad}}, 0, 1.f, &flag);
    EXPECT_EQ(flag.read()[0], 1);
    flag.fill({0});
    norms<float>(GetParam(), {{1.f}}, 0, 1.f, &flag);
    EXPECT_EQ(flag.read()[0], 0);
  }
}

// ---- FP8 scales ----

TEST_P(Lists, ScalesFromAmaxes) {
  const Floats amaxes{1.f, 0.f, 3.5f, INFINITY, NAN, 1e-45f, 1000.f};
  const auto n = int64_t(amaxes.size());
  for (const int pow_2 : {0, 1}) {
    Buffer<float> amax(GetParam(), 1, n), scale(GetParam(), 1, n), scale_inv(GetParam(), 1, n);
    amax.fill(amaxes);
    const te_optimizer_tensor tensors[] = {{3, {amax.data(), scale.data(), scale_inv.data()}},
                                           {n - 3, {amax.data() + 3, scale.data() + 3, scale_inv.data() + 3}}};
    TE_ASSERT_OK(te_optimizer_compute_scales(tensors, 2, 448.f, pow_2, 1e-3f, GetParam(), nullptr));
    for (size_t i = 0; i < amaxes.size(); ++i) {
      const float want = quantize::scale_of(amaxes[i], 1e-3f, 448.f, pow_2 != 0);
      EXPECT_EQ(scale.read()[i], want);
      EXPECT_EQ(scale_inv.read()[i], 1.f / want);
    }
  }
  EXPECT_EQ(te_optimizer_compute_scales(nullptr, 0, 0.f, 0, 0.f, GetParam(), nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_optimizer_compute_scales(nullptr, 0, 1.f, 0, -1.f, GetParam(), nullptr), TE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace te
