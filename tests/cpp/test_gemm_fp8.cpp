// gemm with FP8 operands through the C API, on every device here: formats, scalings, bias, accumulation, FP8 outputs
// with their amax, pitches, repeatability, choices, refusals by name. Mutant: exchange a_scale_inv and b_scale_inv in
// run_fp8 (on CUDA: their pointers in cublaslt.h's set_fp8) and WholeNumbersAreExact turns red.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/fp8.h"
#include "device_buffer.h"
#include "transformer_engine/gemm.h"

namespace te {
namespace {

using testing::Buffer;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr te_scaling kTensor = TE_SCALING_TENSOR, k1D = TE_SCALING_BLOCK_1D, k2D = TE_SCALING_BLOCK_2D;
constexpr te_dtype kE4M3 = TE_FLOAT8_E4M3, kE5M2 = TE_FLOAT8_E5M2;

struct Shape {
  int64_t rows, cols, depth, extra_pitch;
};
constexpr Shape kShapes[] = {{16, 16, 16, 0}, {4, 32, 48, 16}, {144, 272, 400, 0}, {32, 16, 512, 32}};

struct Scalings {
  te_scaling a, b;
};
constexpr Scalings kScalings[] = {{kTensor, kTensor}, {k1D, k1D}, {k1D, k2D}, {k2D, k1D}};

struct Formats {
  te_dtype a, b;
};
constexpr Formats kFormats[] = {{kE4M3, kE4M3}, {kE4M3, kE5M2}, {kE5M2, kE4M3}};

double value_of(te_dtype dtype, uint8_t bits) { return dtype == kE4M3 ? to_float(e4m3{bits}) : to_float(e5m2{bits}); }

int64_t blocks(int64_t n) { return (n + 127) / 128; }
int64_t padded(int64_t n) { return (n + 3) / 4 * 4; }

// [outer, depth] FP8 data of small integers, scaled by powers of two: products and their sums are exact in any order
// and in the 14 bits that a tensor core keeps.
struct Operand {
  Operand(int32_t device, te_dtype dtype, te_scaling scaling, int64_t outer, int64_t depth, int64_t extra_pitch,
          unsigned seed)
      : dtype(dtype),
        data(device, outer, depth, depth + extra_pitch),
        scales(device,
               scaling == k1D   ? blocks(depth)
               : scaling == k2D ? blocks(outer)
                                : 1,
               scaling == k1D   ? padded(outer)
               : scaling == k2D ? padded(blocks(depth))
                                : 2) {
    std::mt19937_64 engine(seed);
    const uint8_t two = 0x40, one = dtype == kE4M3 ? 0x38 : 0x3c;
    const uint8_t numbers[] = {0, one, two, uint8_t(one | 0x80), uint8_t(two | 0x80)};
    std::vector<uint8_t> bytes;
    for (int64_t i = 0; i < outer * depth; ++i) bytes.push_back(numbers[engine() % 5]);
    data.fill(bytes);
    const te_tensor t = scales.tensor();
    std::vector<float> factors;
    for (int64_t i = 0; i < t.rows * t.cols; ++i) factors.push_back(std::ldexp(1.f, int(engine() % 5) - 2));
    scales.fill(factors);
    for (int64_t row = 0; row < outer; ++row) {
      for (int64_t col = 0; col < depth; ++col) {
        const int64_t at = scaling == k1D   ? col / 128 * t.cols + row
                           : scaling == k2D ? row / 128 * t.cols + col / 128
                                            : 0;
        values.push_back(value_of(dtype, bytes[size_t(row * depth + col)]) * factors[size_t(at)]);
      }
    }
  }

  te_dtype dtype;
  Buffer<uint8_t> data;
  Buffer<float> scales;
  std::vector<double> values;
};

// One problem in one device's memory, outputs poisoned.
template <class D>
struct Problem {
  Problem(int32_t device, const Formats& f, const Scalings& g, const Shape& s)
      : shape(s),
        a(device, f.a, g.a, s.cols, s.depth, s.extra_pitch, 1),
        b(device, f.b, g.b, s.rows, s.depth, s.extra_pitch, 2),
        d(device, s.rows, s.cols, s.cols + s.extra_pitch),
        device_(device) {
    problem = te_gemm_problem{};
    problem.a = a.data.tensor(f.a);
    problem.b = b.data.tensor(f.b);
    problem.d = d.tensor();
    problem.bias = problem.aux = kAbsent;
    problem.layout = TE_GEMM_TN;
    problem.a_scale_inv = a.scales.tensor();
    problem.b_scale_inv = b.scales.tensor();
    problem.a_scaling = g.a;
    problem.b_scaling = g.b;
    for (int64_t i = 0; i < s.rows; ++i) {
      for (int64_t j = 0; j < s.cols; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < s.depth; ++k)
          sum += b.values[size_t(i * s.depth + k)] * a.values[size_t(j * s.depth + k)];
        product.push_back(sum);
      }
    }
  }

  te_status run() {
    size_t bytes = 0;
    const te_status status = te_gemm_workspace(&problem, &bytes);
    if (status != TE_SUCCESS) return status;
    const Buffer<uint8_t> workspace(device_, 1, int64_t(bytes));
    return te_gemm(&problem, bytes > 0 ? workspace.data() : nullptr, bytes, nullptr);
  }

  Shape shape;
  Operand a, b;
  Buffer<D> d;
  te_gemm_problem problem;
  std::vector<double> product;

 private:
  int32_t device_;
};

// f(Problem&, name) for each dtype of d, pair of formats, pair of scalings and shape.
template <class F>
void for_problems(int32_t device, F&& f) {
  const auto with = [&](auto result) {
    for (const Formats& formats : kFormats) {
      for (const Scalings& scalings : kScalings) {
        for (const Shape& s : kShapes) {
          Problem<decltype(result)> p(device, formats, scalings, s);
          const std::string name = std::string(te_dtype_name(formats.a)) + " x " + te_dtype_name(formats.b) +
                                   ", scalings " + std::to_string(scalings.a) + ", " + std::to_string(scalings.b) +
                                   ", d " + std::to_string(s.rows) + " x " + std::to_string(s.cols);
          ASSERT_NO_FATAL_FAILURE(f(p, name));
          EXPECT_TRUE(p.d.padding_untouched()) << name;
        }
      }
    }
  };
  with(float{});
  with(fp16{});
  with(bf16{});
}

template <class B>
using ElementOf = std::decay_t<decltype(std::declval<B>().read()[0])>;

class GemmFp8 : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, GemmFp8, ::testing::ValuesIn(testing::devices()), testing::device_name);

// Exact values, so that d is the value rounded once: equality, not a bound.
TEST_P(GemmFp8, WholeNumbersAreExact) {
  for_problems(GetParam(), [&](auto& p, const std::string& name) {
    using D = ElementOf<decltype(p.d)>;
    const std::vector<double> want = testing::widened(testing::rounded<D>(p.product));
    TE_ASSERT_OK(p.run());
    ASSERT_EQ(testing::widened(p.d.read()), want) << name;
    if (p.problem.a_scaling != kTensor) return;
    p.d.poison();
    p.problem.fast_accumulation = 1;
    TE_ASSERT_OK(p.run());
    ASSERT_EQ(testing::widened(p.d.read()), want) << name << ", fast";
  });
}

// A second addend may be added to the product after that was rounded to a 16-bit d's dtype.
template <class D>
void expect_sum(const std::vector<D>& d, const std::vector<double>& product, const std::function<double(size_t)>& add,
                const std::string& name) {
  for (size_t i = 0; i < d.size(); ++i) {
    const float whole = float(product[i] + add(i)), late = to_float(from_float<D>(float(product[i]))) + float(add(i));
    const float got = to_float(d[i]);
    ASSERT_TRUE(got == to_float(from_float<D>(whole)) || got == to_float(from_float<D>(late)))
        << name << ": got " << got << ", wanted " << whole;
  }
}

TEST_P(GemmFp8, Bias) {
  for_problems(GetParam(), [&](auto& p, const std::string& name) {
    using D = ElementOf<decltype(p.d)>;
    const auto with = [&](auto type) {
      using B = decltype(type);
      std::vector<double> bias;
      for (int64_t j = 0; j < p.shape.cols; ++j) bias.push_back(double(j % 13) - 6);
      Buffer<B> buffer(GetParam(), 1, p.shape.cols);
      buffer.fill(testing::rounded<B>(bias));
      p.problem.bias = buffer.tensor();
      p.problem.epilogue = TE_GEMM_BIAS;
      TE_ASSERT_OK(p.run());
      const auto add = [&](size_t i) { return bias[i % size_t(p.shape.cols)]; };
      expect_sum<D>(p.d.read(), p.product, add, name);
    };
    if constexpr (std::is_same_v<D, fp16>) {
      with(fp16{});
    } else {
      with(bf16{});
    }
  });
}

TEST_P(GemmFp8, AccumulateAdds) {
  for_problems(GetParam(), [&](auto& p, const std::string& name) {
    using D = ElementOf<decltype(p.d)>;
    std::vector<double> before;
    for (size_t i = 0; i < p.product.size(); ++i) before.push_back(double(i % 11) - 5);
    p.d.fill(testing::rounded<D>(before));
    p.problem.accumulate = 1;
    TE_ASSERT_OK(p.run());
    expect_sum<D>(
        p.d.read(), p.product, [&](size_t i) { return before[i]; }, name);
  });
}

TEST_P(GemmFp8, EmptyExtents) {
  for (const Scalings& scalings : kScalings) {
    for (const Shape& s : {Shape{0, 16, 32, 0}, Shape{16, 0, 32, 0}, Shape{16, 32, 0, 16}}) {
      Problem<bf16> p(GetParam(), kFormats[0], scalings, s);
      TE_ASSERT_OK(p.run());
      for (const double v : testing::widened(p.d.read())) EXPECT_EQ(v, 0);
    }
  }
}

TEST_P(GemmFp8, CandidatesAreRightAndChoicesAreTaken) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "cuBLASLt's algorithms are on CUDA";
  for (const Scalings& scalings : kScalings) {
    Problem<float> p(GetParam(), kFormats[1], scalings, {256, 272, 1024, 0});
    te_gemm_key key;
    TE_ASSERT_OK(te_gemm_key_of(&p.problem, &key));
    std::vector<te_gemm_choice> choices(16);
    int32_t found = 0;
    TE_ASSERT_OK(te_gemm_candidates(&key, 16, choices.data(), &found));
    ASSERT_GT(found, 0);
    for (int32_t i = 0; i < found; ++i) {
      TE_ASSERT_OK(te_gemm_choose(&key, &choices[size_t(i)], 1));
      p.d.poison();
      TE_ASSERT_OK(p.run());
      EXPECT_EQ(testing::widened(p.d.read()), p.product) << "candidate " << i;
      p.d.poison();
      const Buffer<uint8_t> workspace(GetParam(), 1, int64_t(choices[size_t(i)].workspace_bytes));
      const te_gemm_operands operands{p.a.data.data(), p.b.data.data(),   p.d.data(),       nullptr,
                                      nullptr,         p.a.scales.data(), p.b.scales.data()};
      TE_ASSERT_OK(te_gemm_try(&key, &choices[size_t(i)], &operands, 2, workspace.data(),
                               choices[size_t(i)].workspace_bytes, nullptr));
      EXPECT_EQ(testing::widened(p.d.read()), p.product) << "candidate " << i;
    }
    te_gemm_operands bare{p.a.data.data(), p.b.data.data(), p.d.data(), nullptr, nullptr, nullptr, nullptr};
    EXPECT_EQ(te_gemm_try(&key, &choices[0], &bare, 1, nullptr, 0, nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find("'operands'"), std::string::npos) << te_last_error();
    TE_ASSERT_OK(te_gemm_forget_choices());
  }
}

struct Refused {
  const char* words;
  te_status status;
  std::function<void(te_gemm_problem&)> change;
};

TEST_P(GemmFp8, RefusalsAreNamedAndWriteNothing) {
  const int32_t elsewhere = GetParam() == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU;
  Problem<float> p(GetParam(), kFormats[0], kScalings[0], {16, 32, 128, 0});
  Buffer<float> blocks_a(GetParam(), 1, 32), blocks_b(GetParam(), 1, 16), wide(GetParam(), 1, 32);
  const te_tensor a_blocks = blocks_a.tensor(), b_blocks = blocks_b.tensor(), bias = wide.tensor();
  const auto one_d = [=](te_gemm_problem& q) {
    q.a_scaling = q.b_scaling = k1D, q.a_scale_inv = a_blocks, q.b_scale_inv = b_blocks;
  };
  const Refused cases[] = {
      {"layout NN", TE_NOT_IMPLEMENTED,
       [](auto& q) { q.layout = TE_GEMM_NN, std::swap(q.a.rows, q.a.cols), q.a.row_pitch = 32; }},
      {"both float8_e5m2", TE_NOT_IMPLEMENTED, [](auto& q) { q.a.dtype = q.b.dtype = kE5M2; }},
      {"'b' is of dtype bfloat16", TE_INVALID_ARGUMENT, [](auto& q) { q.b.dtype = TE_BFLOAT16; }},
      {"'a' is of dtype float32", TE_INVALID_ARGUMENT, [](auto& q) { q.a.dtype = TE_FLOAT32; }},
      {"BLOCK_1D and TENSOR", TE_NOT_IMPLEMENTED, [](auto& q) { q.a_scaling = k1D; }},
      {"BLOCK_2D and BLOCK_2D", TE_NOT_IMPLEMENTED, [](auto& q) { q.a_scaling = q.b_scaling = k2D; }},
      {"'a_scaling'", TE_INVALID_ARGUMENT, [](auto& q) { q.a_scaling = te_scaling(3); }},
      {"fast_accumulation", TE_NOT_IMPLEMENTED, [=](auto& q) { one_d(q), q.fast_accumulation = 1; }},
      {"epilogue 2", TE_NOT_IMPLEMENTED, [](auto& q) { q.epilogue = TE_GEMM_GELU; }},
      {"'a_scale_inv'", TE_INVALID_ARGUMENT, [](auto& q) { q.a_scale_inv = kAbsent; }},
      {"'b_scale_inv'", TE_INVALID_ARGUMENT, [=](auto& q) { one_d(q), q.b_scale_inv.cols -= 4; }},
      {"'b_scale_inv' is of dtype", TE_INVALID_ARGUMENT, [](auto& q) { q.b_scale_inv.dtype = TE_INT32; }},
      {"'a_scale_inv' is at an address", TE_INVALID_ARGUMENT,
       [](auto& q) { q.a_scale_inv.data = static_cast<float*>(q.a_scale_inv.data) + 1; }},
      {"'b_scale_inv' is on", TE_INVALID_ARGUMENT, [=](auto& q) { q.b_scale_inv.device = elsewhere; }},
      {"row pitch", TE_INVALID_ARGUMENT, [](auto& q) { q.a.row_pitch += 1; }},
      {"'b' is at an address", TE_INVALID_ARGUMENT, [](auto& q) { q.b.data = static_cast<char*>(q.b.data) + 1; }},
      {"multiples of 16", TE_INVALID_ARGUMENT, [](auto& q) { q.a.rows -= 1, q.d.cols -= 1; }},
      {"multiple of 4", TE_INVALID_ARGUMENT, [=](auto& q) { one_d(q), q.b.rows -= 1, q.d.rows -= 1; }},
      {"'d' is of dtype int32", TE_INVALID_ARGUMENT, [](auto& q) { q.d.dtype = TE_INT32; }},
      {"'bias' is of dtype", TE_INVALID_ARGUMENT, [=](auto& q) { q.epilogue = TE_GEMM_BIAS, q.bias = bias; }},
      {"'d' is of dtype float8_e4m3", TE_INVALID_ARGUMENT, [](auto& q) { q.d.dtype = kE4M3; }},
  };
  for (const Refused& refused : cases) {
    const te_gemm_problem good = p.problem;
    refused.change(p.problem);
    EXPECT_EQ(te_gemm(&p.problem, nullptr, 0, nullptr), refused.status) << refused.words;
    const std::string message = te_last_error();
    EXPECT_NE(message.find(refused.words), std::string::npos) << refused.words << ": " << message;
    EXPECT_NE(message.find("te_gemm"), std::string::npos) << message;
    p.problem = good;
  }
  for (const float v : p.d.read()) EXPECT_TRUE(std::isnan(v)) << "a refused call wrote";
  TE_EXPECT_OK(p.run());
}

TEST_P(GemmFp8, ItsArgumentsAreRefusedBesideOtherOperands) {
  Buffer<float> a(GetParam(), 8, 16), d(GetParam(), 8, 8), scale(GetParam(), 1, 1);
  te_gemm_problem p{};
  p.a = p.b = a.tensor();
  p.d = d.tensor();
  p.bias = p.aux = kAbsent;
  p.a_scale_inv = scale.tensor();
  EXPECT_EQ(te_gemm(&p, nullptr, 0, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'a_scale_inv'"), std::string::npos) << te_last_error();
  p.a_scale_inv = kAbsent;
  p.fast_accumulation = 1;
  EXPECT_EQ(te_gemm(&p, nullptr, 0, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("'fast_accumulation'"), std::string::npos) << te_last_error();
}

}  // namespace
}  // namespace te
