// A product in one device's memory with poisoned outputs, and what float64 makes of it. For the suites of gemm;
// computes nothing by the engine itself but by run().
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "device_buffer.h"
#include "rounding.h"
#include "transformer_engine/gemm.h"

namespace te::testing {

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr double kU = 0x1p-24;

struct Shape {
  int64_t rows, cols, depth, extra_pitch;
};
constexpr Shape kShapes[] = {{1, 1, 1, 0},    {3, 5, 7, 0},    {5, 9, 33, 3},
                             {16, 24, 40, 0}, {16, 24, 40, 8}, {48, 64, 520, 0}};
constexpr te_gemm_layout kLayouts[] = {TE_GEMM_TN, TE_GEMM_NN, TE_GEMM_NT};

inline bool a_along_depth(te_gemm_layout layout) { return layout == TE_GEMM_TN; }
inline bool b_along_depth(te_gemm_layout layout) { return layout != TE_GEMM_NT; }

template <class T>
std::vector<T> draw(int64_t n, unsigned seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<T> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(from_float<T>(float(normal(engine))));
  return out;
}

// One problem in one device's memory, outputs poisoned. D is d's element type, which bias and aux share.
template <class T, class D>
struct Problem {
  Problem(int32_t device, te_gemm_layout layout, const Shape& s)
      : shape(s),
        a(device, a_along_depth(layout) ? s.cols : s.depth, a_along_depth(layout) ? s.depth : s.cols,
          (a_along_depth(layout) ? s.depth : s.cols) + s.extra_pitch),
        b(device, b_along_depth(layout) ? s.rows : s.depth, b_along_depth(layout) ? s.depth : s.rows,
          (b_along_depth(layout) ? s.depth : s.rows) + s.extra_pitch),
        d(device, s.rows, s.cols, s.cols + s.extra_pitch),
        aux(device, s.rows, s.cols, s.cols + s.extra_pitch),
        bias(device, 1, s.cols),
        sums(device, 1, s.rows),
        device_(device) {
    a_values = draw<T>(s.cols * s.depth, 1);
    b_values = draw<T>(s.rows * s.depth, 2);
    a.fill(a_values);
    b.fill(b_values);
    problem = te_gemm_problem{};
    problem.a = a.tensor();
    problem.b = b.tensor();
    problem.d = d.tensor();
    problem.bias = problem.aux = kAbsent;
    problem.layout = layout;
    product.assign(size_t(s.rows * s.cols), 0);
    magnitude.assign(size_t(s.rows * s.cols), 0);
    for (int64_t i = 0; i < s.rows; ++i) {
      for (int64_t j = 0; j < s.cols; ++j) {
        for (int64_t k = 0; k < s.depth; ++k) {
          const double left = b_at(i, k);
          const double right = to_float(a_values[size_t(a_along_depth(layout) ? j * s.depth + k : k * s.cols + j)]);
          product[size_t(i * s.cols + j)] += left * right;
          magnitude[size_t(i * s.cols + j)] += std::fabs(left * right);
        }
      }
    }
  }

  double b_at(int64_t row, int64_t k) const {
    return to_float(b_values[size_t(b_along_depth(problem.layout) ? row * shape.depth + k : k * shape.rows + row)]);
  }

  te_status run() {
    size_t bytes = 0;
    const te_status status = te_gemm_workspace(&problem, &bytes);
    if (status != TE_SUCCESS) return status;
    const Buffer<uint8_t> workspace(device_, 1, int64_t(bytes));
    return te_gemm(&problem, bytes > 0 ? workspace.data() : nullptr, bytes, nullptr);
  }

  // cuBLASLt has no algorithm for some fused epilogues at sizes that 8 does not divide; never without them.
  bool refused(te_status status) const {
    const bool fused = problem.epilogue != TE_GEMM_NONE && problem.epilogue != TE_GEMM_BIAS;
    const bool odd = shape.rows % 8 != 0 || shape.cols % 8 != 0 || shape.depth % 8 != 0 || shape.extra_pitch % 8 != 0;
    return status == TE_NOT_IMPLEMENTED && device_ != TE_DEVICE_CPU && fused && odd &&
           std::string(te_last_error()).find("no algorithm") != std::string::npos;
  }

  // The product is a float32 sum of `depth` terms in any order; tensor cores truncate, so a term costs 2u.
  double sum_error(size_t i, double more = 0, int terms = 0) const {
    return double(2 * shape.depth + terms) * kU * (magnitude[i] + std::fabs(more)) * (1 + 1e-3);
  }

  // cuBLASLt may round the product to a 16-bit d's dtype before the next operation (seen on an H200: a bias at sizes
  // that 8 does not divide, gelu, adding to a 16-bit d).
  double first_rounding(double value) const {
    return device_ == TE_DEVICE_CPU || sizeof(D) == 4 ? 0 : Rounding<D>::kRelative * std::fabs(value);
  }

  Shape shape;
  std::vector<T> a_values, b_values;
  Buffer<T> a, b;
  Buffer<D> d, aux, bias, sums;
  te_gemm_problem problem;
  std::vector<double> product, magnitude;

 private:
  int32_t device_;
};

template <class D>
void expect_near(double got, double want, double error, const std::string& what) {
  const double bound =
      error * (1 + Rounding<D>::kRelative) + Rounding<D>::kRelative * std::fabs(want) + Rounding<D>::kAbsolute;
  ASSERT_LE(std::fabs(got - want), bound) << what << ": got " << got << ", wanted " << want;
}

inline std::string name_of(te_gemm_layout layout, const Shape& s) {
  return std::string(layout == TE_GEMM_TN   ? "TN"
                     : layout == TE_GEMM_NN ? "NN"
                                            : "NT") +
         " d " + std::to_string(s.rows) + " x " + std::to_string(s.cols) + ", depth " + std::to_string(s.depth);
}

// f(Problem&, name) for each dtype of the operands and of d, layout and shape.
template <class F>
void for_problems(int32_t device, F&& f) {
  const auto with = [&](auto operand, auto result) {
    for (const te_gemm_layout layout : kLayouts) {
      for (const Shape& s : kShapes) {
        Problem<decltype(operand), decltype(result)> p(device, layout, s);
        ASSERT_NO_FATAL_FAILURE(f(p, name_of(layout, s)));
        EXPECT_TRUE(p.a.padding_untouched() && p.b.padding_untouched() && p.d.padding_untouched());
      }
    }
  };
  with(float{}, float{});
  with(fp16{}, fp16{});
  with(bf16{}, bf16{});
  with(bf16{}, float{});
}

template <class B>
using ElementOf = std::decay_t<decltype(std::declval<B>().read()[0])>;

}  // namespace te::testing
