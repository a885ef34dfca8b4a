// rope through the C API, on every device here: values and gradients against a long double oracle, strides of every
// layout, what is copied, in place, start positions, errors.
#include "transformer_engine/rope.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "ops/rope/rope_math.h"
#include "rope_case.h"

namespace te {
namespace {

using namespace testing;

class Rope : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, Rope, ::testing::ValuesIn(testing::devices()), testing::device_name);

void expect_all_cases(int32_t device, bool backward) {
  for (const Case& c : kCases) {
    for_dtypes([&](auto t) {
      SCOPED_TRACE(concat(describe(c), " ", te_dtype_name(testing::kDtype<decltype(t)>)));
      Problem<decltype(t)> problem(device, c, backward);
      TE_ASSERT_OK(te_rope_apply(&problem.plan, nullptr));
      problem.expect_oracle();
    });
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(Rope, ForwardMatchesTheOracle) { expect_all_cases(GetParam(), false); }

TEST_P(Rope, BackwardIsTheTranspose) { expect_all_cases(GetParam(), true); }

TEST_P(Rope, InPlaceGivesTheSameBits) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(describe(c));
    Problem<bf16> apart(GetParam(), c), in_place(GetParam(), c);
    TE_ASSERT_OK(te_rope_apply(&apart.plan, nullptr));
    in_place.plan.q_out = in_place.plan.q;
    in_place.plan.k_out = in_place.plan.k;
    in_place.plan.v_out = in_place.plan.v;
    TE_ASSERT_OK(te_rope_apply(&in_place.plan, nullptr));
    const std::vector<bf16> got = in_place.in->read();
    const te_rope_tensor* const inputs[] = {&apart.plan.q, &apart.plan.k, &apart.plan.v};
    const te_rope_tensor* const outputs[] = {&apart.plan.q_out, &apart.plan.k_out, &apart.plan.v_out};
    for (int part = 0; part < 3; ++part) {
      const std::vector<bf16> want = apart.out[part]->read();
      apart.for_each(part, [&](int64_t s, int64_t b, int64_t h, int64_t i) {
        const int64_t from = apart.offset(*inputs[part], apart.in->data(), s, b, h) + i;
        const int64_t to = apart.offset(*outputs[part], apart.out[part]->data(), s, b, h) + i;
        ASSERT_EQ(got[size_t(from)].bits, want[size_t(to)].bits) << "part " << part << " i " << i;
      });
    }
  }
}

// Where positions are many, a warp of the GPU walks over more heads than it loads ahead; where they are few, heads
// are split over warps. A position's bits do not follow from the others.
TEST_P(Rope, ManyPositionsGiveTheBitsOfFew) {
  for (const Case& c :
       {Case{3200, 1, 60, 8, 3, 32, 32, false, kSbhd, true}, Case{1700, 2, 25, 5, 5, 32, 16, true, kPacked},
        Case{1600, 2, 130, 7, 7, 5, 4, false, kBshd, false, true}}) {
    SCOPED_TRACE(describe(c));
    Problem<bf16> whole(GetParam(), c), cut(GetParam(), c);
    TE_ASSERT_OK(te_rope_apply(&whole.plan, nullptr));
    constexpr int64_t kStep = 100;
    for (int64_t first = 0; first < c.seq; first += kStep) {
      te_rope_plan plan = cut.plan;
      plan.seq = std::min(kStep, c.seq - first);
      for (te_rope_tensor* t : {&plan.q, &plan.k, &plan.v, &plan.q_out, &plan.k_out, &plan.v_out}) {
        t->data = static_cast<bf16*>(t->data) + first * t->seq_stride;
      }
      for (te_tensor* t : {&plan.q_freqs, &plan.k_freqs}) {
        if (t->data == nullptr) continue;
        t->data = static_cast<float*>(t->data) + first * t->row_pitch;
        t->rows -= first;
      }
      TE_ASSERT_OK(te_rope_apply(&plan, nullptr));
    }
    for (int part = 0; part < 3; ++part) {
      const std::vector<bf16> got = whole.out[part]->read(), want = cut.out[part]->read();
      ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(bf16)), 0) << "part " << part;
      EXPECT_TRUE(whole.out[part]->padding_untouched());
    }
  }
}

// Gradients of a sum arrive with strides of 0: one token's head stands for all.
TEST_P(Rope, ReadsStridesOfZero) {
  const Case c{6, 3, 4, 2, 0, 32, 32};
  Problem<float> repeated(GetParam(), c), spelled(GetParam(), c);
  for (te_rope_tensor* t : {&repeated.plan.q, &repeated.plan.k}) t->seq_stride = t->batch_stride = t->head_stride = 0;
  repeated.plan.k.data = repeated.plan.q.data;
  std::vector<float> head(spelled.x.begin(), spelled.x.begin() + c.head_dim), all;
  while (all.size() < spelled.x.size()) all.insert(all.end(), head.begin(), head.end());
  spelled.in->fill(all);
  TE_ASSERT_OK(te_rope_apply(&repeated.plan, nullptr));
  TE_ASSERT_OK(te_rope_apply(&spelled.plan, nullptr));
  EXPECT_EQ(repeated.out[0]->read(), spelled.out[0]->read());
  EXPECT_EQ(repeated.out[1]->read(), spelled.out[1]->read());
}

// Elements that are not rotated are copied as bits, NaN payloads and subnormals included.
TEST_P(Rope, CopiesBits) {
  for (const int64_t rot_dim : {0, 16, 6}) {
    const Case c{3, 2, 2, 1, 2, 64, rot_dim};
    Problem<fp16> problem(GetParam(), c);
    std::mt19937 engine(3);
    for (fp16& v : problem.x) v.bits = uint16_t(engine());
    problem.in->fill(problem.x);
    TE_ASSERT_OK(te_rope_apply(&problem.plan, nullptr));
    const te_rope_tensor* const inputs[] = {&problem.plan.q, &problem.plan.k, &problem.plan.v};
    const te_rope_tensor* const outputs[] = {&problem.plan.q_out, &problem.plan.k_out, &problem.plan.v_out};
    for (int part = 0; part < 3; ++part) {
      const std::vector<fp16> got = problem.out[part]->read();
      problem.for_each(part, [&](int64_t s, int64_t b, int64_t h, int64_t i) {
        if (part < 2 && i < rot_dim) return;
        const int64_t from = problem.offset(*inputs[part], problem.in->data(), s, b, h) + i;
        const int64_t to = problem.offset(*outputs[part], problem.out[part]->data(), s, b, h) + i;
        ASSERT_EQ(got[size_t(to)].bits, problem.x[size_t(from)].bits);
      });
    }
  }
}

TEST_P(Rope, NonFiniteValuesAndAnglesPropagate) {
  const Case c{4, 1, 1, 0, 0, 4, 4};
  Problem<float> problem(GetParam(), c);
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  problem.in->fill({inf, 1, 2, 3, nan, 1, 2, 3, 1, 1, 1, 1, 1, 1, 1, 1});
  problem.freqs[0].memory->fill({0, 0, 0, 0, 0, 0, 0, 0, inf, 0, 0, 0, 0x1p31f, 0, 0, 0});
  TE_ASSERT_OK(te_rope_apply(&problem.plan, nullptr));
  const std::vector<float> y = problem.out[0]->read();
  EXPECT_EQ(y[0], inf);           // inf * 1 - 2 * 0
  EXPECT_TRUE(std::isnan(y[2]));  // 2 * 1 + inf * 0
  EXPECT_TRUE(std::isnan(y[4]) && std::isnan(y[6]));
  EXPECT_TRUE(std::isnan(y[8]) && y[10] == 1);   // only the element whose angle it is
  EXPECT_TRUE(std::isnan(y[12]) && y[14] == 1);  // finite, and beyond 2^30
  EXPECT_EQ(y[1], 1);
}

TEST_P(Rope, DevicesGiveTheSameBits) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "compares a GPU with the CPU";
  for (const Case& c : kCases) {
    for_dtypes([&](auto t) {
      SCOPED_TRACE(describe(c));
      Problem<decltype(t)> cpu(TE_DEVICE_CPU, c), gpu(GetParam(), c);
      TE_ASSERT_OK(te_rope_apply(&cpu.plan, nullptr));
      TE_ASSERT_OK(te_rope_apply(&gpu.plan, nullptr));
      for (int part = 0; part < 3; ++part) {
        const auto want = cpu.out[part]->read(), got = gpu.out[part]->read();
        ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(got[0])), 0) << "part " << part;
      }
    });
  }
}

// Sine and cosine themselves: random angles of every magnitude, and those nearest to multiples of pi / 2.
TEST(RopeMath, SineAndCosineAreWithinTheirBound) {
  std::mt19937_64 engine(5);
  std::uniform_real_distribution<double> exponent(-40, 30);
  const Real half_pi = std::acos(Real(-1)) / 2;
  Real worst = 0;
  const auto check = [&worst](float angle) {
    const rope::SinCos got = rope::sin_cos(angle);
    worst = std::max({worst, std::fabs(got.sin - std::sin(Real(angle))), std::fabs(got.cos - std::cos(Real(angle)))});
  };
  for (int i = 0; i < 1000000; ++i) {
    const float angle = float(std::exp2(exponent(engine)));
    check(i % 2 ? angle : -angle);
    const float multiple = float(std::round(Real(angle) / half_pi) * half_pi);
    for (const float near : {multiple, std::nextafter(multiple, 0.f), std::nextafter(multiple, 2e9f)}) {
      if (near <= rope::kMaxAngle) check(near);
    }
  }
  EXPECT_LE(worst, Real(0x1p-23));
  EXPECT_EQ(rope::sin_cos(0.f).sin, 0.f);
  EXPECT_EQ(rope::sin_cos(0.f).cos, 1.f);
  EXPECT_TRUE(std::isnan(rope::sin_cos(std::nextafter(rope::kMaxAngle, 2e9f)).sin));
}

// Offsets beyond 2^32 bytes and 2^31 elements. The pages between are never touched, so they cost nothing.
TEST(RopeCpu, OffsetsAre64Bit) {
  constexpr int64_t kStride = int64_t(3) << 30;
  constexpr size_t kBytes = size_t(kStride + 64) * sizeof(float);
  const auto reserve = [] {
    void* p = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(p, MAP_FAILED);
    return static_cast<float*>(p);
  };
  float* x = reserve();
  float* y = reserve();
  float angles[4] = {0.5f, 0.5f, 0.5f, 0.5f};
  x[kStride] = 3;
  te_rope_plan plan{};
  plan.seq = 2;
  plan.batch = plan.q_heads = 1;
  plan.head_dim = plan.rot_dim = 2;
  plan.dtype = TE_FLOAT32;
  plan.device = TE_DEVICE_CPU;
  plan.q = {x, kStride, 0, 0, 0, 0};
  plan.q_out = {y, kStride, 0, 0, 0, 0};
  plan.q_freqs = {angles, 2, 2, 2, TE_FLOAT32, TE_DEVICE_CPU};
  TE_EXPECT_OK(te_rope_apply(&plan, nullptr));
  EXPECT_NEAR(y[kStride], 3 * std::cos(0.5), 1e-6);
  EXPECT_NEAR(y[kStride + 1], 3 * std::sin(0.5), 1e-6);
  EXPECT_EQ(y[0], 0);
  munmap(x, kBytes);
  munmap(y, kBytes);
}

TEST_P(Rope, StartPositionsOutsideOfFreqsAreSeen) {
  const Case c{2, 2, 2, 1, 0, 16, 16, false, kSbhd, false, true};  // freqs has 6 rows
  for (const int32_t bad : {-1, 5}) {
    Problem<float> problem(GetParam(), c);
    problem.start->fill({4, bad});
    if (GetParam() == TE_DEVICE_CPU) {
      EXPECT_EQ(te_rope_apply(&problem.plan, nullptr), TE_INVALID_ARGUMENT);
      EXPECT_NE(std::string(te_last_error()).find("plan.start_positions"), std::string::npos) << te_last_error();
      continue;
    }
    TE_ASSERT_OK(te_rope_apply(&problem.plan, nullptr));
    const std::vector<float> y = problem.out[0]->read();
    const int64_t token = c.q_heads * c.head_dim;
    const int64_t s = bad < 0 ? 0 : 1;  // the one row outside
    for (int64_t i = 0; i < 2 * c.batch * token; ++i) {
      const bool outside = i / token == s * c.batch + 1;
      ASSERT_EQ(std::isnan(y[size_t(i)]), outside) << i;
    }
  }
}

TEST_P(Rope, BadPlansAreNamed) {
  const Case c{4, 2, 4, 2, 2, 16, 8, false, kSbhd, true, true};
  const struct {
    const char* argument;
    std::function<void(te_rope_plan&)> spoil;
  } mistakes[] = {
      {"plan.seq", [](te_rope_plan& p) { p.seq = -1; }},
      {"plan.k_heads", [](te_rope_plan& p) { p.k_heads = -2; }},
      {"plan.rot_dim", [](te_rope_plan& p) { p.rot_dim = 7; }},
      {"plan.rot_dim", [](te_rope_plan& p) { p.rot_dim = 18; }},
      {"plan.dtype", [](te_rope_plan& p) { p.dtype = TE_INT32; }},
      {"plan.q", [](te_rope_plan& p) { p.q.data = nullptr; }},
      {"plan.v_out", [](te_rope_plan& p) { p.v_out.data = nullptr; }},
      {"plan.k", [](te_rope_plan& p) { p.k.seq_stride = -1; }},
      {"plan.q_out", [](te_rope_plan& p) { p.q_out.head_stride = 15; }},
      {"plan.k_out", [](te_rope_plan& p) { p.k_out.batch_stride = 0; }},
      {"plan.q", [](te_rope_plan& p) { p.q.heads_per_group = 3; }},
      {"plan.q_out", [](te_rope_plan& p) { p.q_out.heads_per_group = 2; }},  // group_stride is 0
      {"plan.q_freqs", [](te_rope_plan& p) { p.q_freqs.rows = 3; }},
      {"plan.q_freqs", [](te_rope_plan& p) { p.q_freqs.dtype = TE_BFLOAT16; }},
      {"plan.q_freqs", [](te_rope_plan& p) { p.q_freqs = te_tensor{}; }},
      {"plan.k_freqs", [](te_rope_plan& p) { p.k_freqs.cols = 6; }},
      {"plan.k_freqs", [](te_rope_plan& p) { p.k_freqs.device = 63; }},
      {"plan.start_positions", [](te_rope_plan& p) { p.start_positions.dtype = TE_INT64; }},
      {"plan.start_positions", [](te_rope_plan& p) { p.start_positions.cols = 1; }},
  };
  for (const auto& mistake : mistakes) {
    Problem<bf16> problem(GetParam(), c);
    mistake.spoil(problem.plan);
    EXPECT_EQ(te_rope_apply(&problem.plan, nullptr), TE_INVALID_ARGUMENT) << mistake.argument;
    const std::string message = te_last_error();
    EXPECT_EQ(message.rfind("te_rope_apply: argument '", 0), 0u) << message;
    EXPECT_NE(message.find(concat("'", mistake.argument, "'")), std::string::npos) << message;
    EXPECT_TRUE(problem.out[0]->padding_untouched());
  }
  EXPECT_EQ(te_rope_apply(nullptr, nullptr), TE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace te
