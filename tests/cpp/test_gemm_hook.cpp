// te_set_cpu_gemm and te_gemm_by_loop: what reaches the hook, all that is done around it, by equality with the plain
// loop (of whole numbers, so that sums are exact in any order), NULL, threads, a hook that throws.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/fp8.h"
#include "device_buffer.h"
#include "transformer_engine/gemm.h"

namespace te {
namespace {

using testing::Buffer;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr int32_t kCpu = TE_DEVICE_CPU;
constexpr te_gemm_layout kLayouts[] = {TE_GEMM_TN, TE_GEMM_NN, TE_GEMM_NT};
constexpr int64_t kRows = 6, kCols = 10, kDepth = 17;

std::atomic<int> calls{0}, wrong{0};

// As a BLAS would: from the last term to the first, so that nothing but exact sums have the loop's bits. It notes what
// the contract rules out.
void backwards(te_gemm_layout layout, int64_t rows, int64_t cols, int64_t depth, const float* a, int64_t a_pitch,
               const float* b, int64_t b_pitch, float* d, int64_t d_pitch, int accumulate) {
  ++calls;
  if (rows < 1 || cols < 1 || depth < 1 || a_pitch < (layout == TE_GEMM_TN ? depth : cols) ||
      b_pitch < (layout == TE_GEMM_NT ? rows : depth) || d_pitch < cols) {
    ++wrong;
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      float sum = 0;
      for (int64_t k = depth; k-- > 0;) {
        sum += a[layout == TE_GEMM_TN ? j * a_pitch + k : k * a_pitch + j] *
               b[layout == TE_GEMM_NT ? k * b_pitch + i : i * b_pitch + k];
      }
      d[i * d_pitch + j] = accumulate ? d[i * d_pitch + j] + sum : sum;
    }
  }
}

class GemmHook : public ::testing::Test {
 protected:
  void SetUp() override { calls = 0, wrong = 0; }
  void TearDown() override { te_set_cpu_gemm(nullptr); }
};

std::string path() {
  const char *path = nullptr, *why = nullptr;
  te_noted_path(&path, &why);
  return path != nullptr ? path : "";
}

template <class T>
std::vector<T> whole(int64_t n, unsigned seed) {
  std::mt19937_64 engine(seed);
  std::vector<T> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(from_float<T>(float(int(engine() % 7) - 3)));
  return out;
}

template <class T, class D>
struct Problem {
  explicit Problem(te_gemm_layout layout, te_gemm_epilogue epilogue = TE_GEMM_NONE, int64_t pitch = 3)
      : a(kCpu, layout == TE_GEMM_TN ? kCols : kDepth, layout == TE_GEMM_TN ? kDepth : kCols,
          (layout == TE_GEMM_TN ? kDepth : kCols) + pitch),
        b(kCpu, layout == TE_GEMM_NT ? kDepth : kRows, layout == TE_GEMM_NT ? kRows : kDepth,
          (layout == TE_GEMM_NT ? kRows : kDepth) + pitch),
        d(kCpu, kRows, kCols, kCols + pitch),
        aux(kCpu, kRows, kCols, kCols + pitch),
        bias(kCpu, 1, epilogue == TE_GEMM_BGRAD ? kRows : kCols) {
    a.fill(whole<T>(kCols * kDepth, 1));
    b.fill(whole<T>(kRows * kDepth, 2));
    problem = te_gemm_problem{};
    problem.a = a.tensor();
    problem.b = b.tensor();
    problem.d = d.tensor();
    problem.bias = problem.aux = kAbsent;
    problem.layout = layout;
    problem.epilogue = epilogue;
    if (epilogue == TE_GEMM_BIAS || epilogue == TE_GEMM_GELU || epilogue == TE_GEMM_BGRAD) {
      problem.bias = bias.tensor();
    }
    if (epilogue == TE_GEMM_GELU || epilogue == TE_GEMM_DGELU) problem.aux = aux.tensor();
  }

  // All outputs of a run; inputs are set first, all other memory is poisoned.
  template <class Run>
  std::vector<std::vector<double>> after(Run&& run) {
    d.poison(), aux.poison(), bias.poison();
    if (problem.accumulate) d.fill(whole<D>(kRows * kCols, 3));
    if (problem.epilogue == TE_GEMM_DGELU) aux.fill(whole<D>(kRows * kCols, 4));
    if (problem.epilogue == TE_GEMM_BIAS || problem.epilogue == TE_GEMM_GELU) bias.fill(whole<D>(kCols, 5));
    TE_EXPECT_OK(run(&problem));
    EXPECT_TRUE(d.padding_untouched() && aux.padding_untouched());
    std::vector<std::vector<double>> left{testing::widened(d.read())};
    if (problem.aux.data != nullptr) left.push_back(testing::widened(aux.read()));
    if (problem.bias.data != nullptr) left.push_back(testing::widened(bias.read()));
    for (const auto& values : left) {
      for (const double v : values) EXPECT_FALSE(std::isnan(v)) << "not written";
    }
    return left;
  }

  Buffer<T> a, b;
  Buffer<D> d, aux, bias;
  te_gemm_problem problem;
};

te_status run(const te_gemm_problem* problem) { return te_gemm(problem, nullptr, 0, nullptr); }

TEST_F(GemmHook, TheLoopsValuesAroundIt) {
  const auto with = [](auto operand, auto result) {
    using T = decltype(operand);
    using D = decltype(result);
    for (const te_gemm_layout layout : kLayouts) {
      for (const te_gemm_epilogue epilogue : {TE_GEMM_NONE, TE_GEMM_BIAS, TE_GEMM_GELU, TE_GEMM_DGELU, TE_GEMM_BGRAD}) {
        for (const int accumulate : {0, 1}) {
          if (epilogue == TE_GEMM_BGRAD && layout != TE_GEMM_NT) continue;
          if (accumulate && (epilogue == TE_GEMM_GELU || epilogue == TE_GEMM_DGELU)) continue;
          Problem<T, D> p(layout, epilogue);
          p.problem.accumulate = accumulate;
          te_set_cpu_gemm(nullptr);
          const auto by_loop = p.after(run);
          EXPECT_EQ(path(), "CPU loop");
          te_set_cpu_gemm(backwards);
          const int before = calls;
          const auto by_hook = p.after(run);
          EXPECT_EQ(path(), "the CPU product that te_set_cpu_gemm installed");
          EXPECT_EQ(calls, before + 1);
          EXPECT_EQ(p.after(te_gemm_by_loop), by_loop);
          EXPECT_EQ(path(), "CPU loop");
          EXPECT_EQ(calls, before + 1) << "te_gemm_by_loop is the plain loop, also where another path is installed";
          EXPECT_EQ(by_hook, by_loop) << "layout " << layout << ", epilogue " << epilogue << ", accumulate "
                                      << accumulate;
        }
      }
    }
  };
  with(float{}, float{});
  with(fp16{}, fp16{});
  with(bf16{}, bf16{});
  with(bf16{}, float{});
  EXPECT_EQ(wrong, 0);
}

// Values that are not exact: two sums of the same `depth` terms in two orders differ by less than 2 depth u times the
// sum of their magnitudes.
TEST_F(GemmHook, AnotherOrderStaysInItsBound) {
  std::mt19937_64 engine(7);
  std::normal_distribution<float> normal;
  for (const te_gemm_layout layout : kLayouts) {
    Problem<float, float> p(layout);
    std::vector<float> a, b;
    for (int64_t i = 0; i < kCols * kDepth; ++i) a.push_back(normal(engine));
    for (int64_t i = 0; i < kRows * kDepth; ++i) b.push_back(normal(engine));
    const auto magnitudes = [](std::vector<float> values) {
      for (float& v : values) v = std::fabs(v);
      return values;
    };
    p.a.fill(magnitudes(a)), p.b.fill(magnitudes(b));
    const std::vector<double> magnitude = p.after(te_gemm_by_loop)[0];
    p.a.fill(a), p.b.fill(b);
    const std::vector<double> loop = p.after(te_gemm_by_loop)[0];
    te_set_cpu_gemm(backwards);
    const std::vector<double> by_hook = p.after(run)[0];
    EXPECT_NE(by_hook, loop) << "the hook did not run, or both orders give the same sums";
    for (size_t i = 0; i < loop.size(); ++i) {
      ASSERT_LE(std::fabs(by_hook[i] - loop[i]), 2 * kDepth * 0x1p-24 * magnitude[i] * (1 + 1e-3)) << i;
    }
    te_set_cpu_gemm(nullptr);
    EXPECT_EQ(p.after(run)[0], loop) << "NULL restores the plain loop";
  }
}

// In each layout: what the compiler makes of the loop may not show in the bits.
TEST_F(GemmHook, TheLoopIsAChainOfFusedMultiplyAdds) {
  std::mt19937_64 engine(8);
  std::normal_distribution<float> normal;
  std::vector<float> a, b, want;  // a [cols, depth], b [rows, depth]
  for (int64_t i = 0; i < kCols * kDepth; ++i) a.push_back(normal(engine));
  for (int64_t i = 0; i < kRows * kDepth; ++i) b.push_back(normal(engine));
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kCols; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < kDepth; ++k) sum = std::fma(a[size_t(j * kDepth + k)], b[size_t(i * kDepth + k)], sum);
      want.push_back(sum);
    }
  }
  const auto transposed = [](const std::vector<float>& values, int64_t outer) {
    std::vector<float> out;
    for (int64_t k = 0; k < kDepth; ++k) {
      for (int64_t i = 0; i < outer; ++i) out.push_back(values[size_t(i * kDepth + k)]);
    }
    return out;
  };
  for (const te_gemm_layout layout : kLayouts) {
    Problem<float, float> p(layout);
    p.a.fill(layout == TE_GEMM_TN ? a : transposed(a, kCols));
    p.b.fill(layout == TE_GEMM_NT ? transposed(b, kRows) : b);
    EXPECT_EQ(p.after(te_gemm_by_loop)[0], testing::widened(want)) << "layout " << layout;
  }
}

TEST_F(GemmHook, FloatsAreHandedOverWhereTheyLie) {
  static Problem<float, float>* problem = nullptr;
  static bool in_place = false;
  Problem<float, float> p(TE_GEMM_NN);
  problem = &p;
  te_set_cpu_gemm([](te_gemm_layout layout, int64_t rows, int64_t cols, int64_t depth, const float* a, int64_t a_pitch,
                     const float* b, int64_t b_pitch, float* d, int64_t d_pitch, int accumulate) {
    const te_gemm_problem& q = problem->problem;
    in_place = a == q.a.data && b == q.b.data && d == q.d.data && a_pitch == q.a.row_pitch &&
               b_pitch == q.b.row_pitch && d_pitch == q.d.row_pitch;
    backwards(layout, rows, cols, depth, a, a_pitch, b, b_pitch, d, d_pitch, accumulate);
  });
  p.after(run);
  EXPECT_TRUE(in_place);
}

TEST_F(GemmHook, NothingEmptyReachesIt) {
  te_set_cpu_gemm(backwards);
  for (const int64_t rows : {int64_t(0), int64_t(4)}) {
    for (const int64_t depth : {int64_t(0), int64_t(5)}) {
      if (rows != 0 && depth != 0) continue;
      Buffer<float> a(kCpu, 3, depth), b(kCpu, rows, depth), d(kCpu, rows, 3);
      te_gemm_problem p{};
      p.a = a.tensor(), p.b = b.tensor(), p.d = d.tensor();
      p.bias = p.aux = kAbsent;
      TE_EXPECT_OK(run(&p));
      for (const float v : d.read()) EXPECT_EQ(v, 0);
    }
  }
  EXPECT_EQ(calls, 0);
}

// FP8 operands, scaled by powers of two.
TEST_F(GemmHook, Fp8OperandsComeWidened) {
  constexpr int64_t rows = 20, cols = 32, depth = 144;
  const uint8_t numbers[] = {0, 0x38, 0x40, 0xb8, 0xc0};
  std::mt19937_64 engine(3);
  Buffer<uint8_t> a(kCpu, cols, depth), b(kCpu, rows, depth);
  Buffer<float> d(kCpu, rows, cols);
  const auto bytes = [&](int64_t n) {
    std::vector<uint8_t> out;
    for (int64_t i = 0; i < n; ++i) out.push_back(numbers[engine() % 5]);
    return out;
  };
  const auto powers = [&](int64_t n) {
    std::vector<float> out;
    for (int64_t i = 0; i < n; ++i) out.push_back(std::ldexp(1.f, int(engine() % 3) - 1));
    return out;
  };
  a.fill(bytes(cols * depth)), b.fill(bytes(rows * depth));
  for (const bool blocks : {false, true}) {
    Buffer<float> a_scales(kCpu, 1, blocks ? 4 : 1), b_scales(kCpu, blocks ? 2 : 1, blocks ? rows : 1);
    a_scales.fill(powers(blocks ? 4 : 1)), b_scales.fill(powers(blocks ? 2 * rows : 1));
    te_gemm_problem p{};
    p.a = a.tensor(TE_FLOAT8_E4M3), p.b = b.tensor(TE_FLOAT8_E4M3), p.d = d.tensor();
    p.bias = p.aux = kAbsent;
    p.a_scale_inv = a_scales.tensor(), p.b_scale_inv = b_scales.tensor();
    p.a_scaling = blocks ? TE_SCALING_BLOCK_2D : TE_SCALING_TENSOR;
    p.b_scaling = blocks ? TE_SCALING_BLOCK_1D : TE_SCALING_TENSOR;
    TE_ASSERT_OK(te_gemm_by_loop(&p));
    const std::vector<float> loop = d.read();
    d.poison();
    te_set_cpu_gemm(backwards);
    const int before = calls;
    TE_ASSERT_OK(run(&p));
    EXPECT_EQ(calls, before + 1);
    EXPECT_EQ(d.read(), loop);
  }
  EXPECT_EQ(wrong, 0);
}

// Several calls run while the installed product changes: each call uses one product from its beginning to its end.
TEST_F(GemmHook, ManyThreads) {
  std::atomic<bool> done{false};
  std::atomic<int> bad{0};
  Problem<bf16, bf16> reference(TE_GEMM_TN, TE_GEMM_BIAS);
  const auto want = reference.after(te_gemm_by_loop);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      Problem<bf16, bf16> p(TE_GEMM_TN, TE_GEMM_BIAS);
      for (int n = 0; n < 200; ++n) bad += p.after(run) != want;
    });
  }
  std::thread lender([&] {
    while (!done) te_set_cpu_gemm(backwards), te_set_cpu_gemm(nullptr);
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  lender.join();
  EXPECT_EQ(bad, 0);
  EXPECT_EQ(wrong, 0);
}

TEST_F(GemmHook, OneThatThrowsFailsTheCall) {
  te_set_cpu_gemm([](te_gemm_layout, int64_t, int64_t, int64_t, const float*, int64_t, const float*, int64_t, float*,
                     int64_t, int) { throw std::runtime_error("no BLAS here"); });
  Problem<float, float> p(TE_GEMM_TN);
  EXPECT_EQ(run(&p.problem), TE_RUNTIME_ERROR);
  EXPECT_NE(std::string(te_last_error()).find("no BLAS here"), std::string::npos) << te_last_error();
  te_set_cpu_gemm(nullptr);
  TE_EXPECT_OK(run(&p.problem));
}

TEST_F(GemmHook, BadProblemsAreRefusedBeforeIt) {
  te_set_cpu_gemm(backwards);
  Problem<float, float> p(TE_GEMM_TN);
  p.problem.d.rows -= 1;
  EXPECT_EQ(run(&p.problem), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_gemm_by_loop(&p.problem), TE_INVALID_ARGUMENT);
  EXPECT_EQ(calls, 0);
  p.problem.d.rows += 1;
  p.problem.a.device = p.problem.b.device = p.problem.d.device = 0;
  EXPECT_EQ(te_gemm_by_loop(&p.problem), TE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(te_last_error()).find("te_gemm_by_loop"), std::string::npos) << te_last_error();
}

}  // namespace
}  // namespace te
