// A grouped product in one device's memory with poisoned results, and what float64 makes of it. For the suites of the
// grouped products; computes nothing by the engine itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/grouped_gemm.h"

namespace te::testing {

struct GroupedShape {
  std::vector<int32_t> splits;
  int64_t tail;  // rows after the last group
  int64_t n, k;
  int64_t extra_pitch = 0;

  int64_t live() const { return std::accumulate(splits.begin(), splits.end(), int64_t(0)); }
  int64_t rows() const { return live() + tail; }
  int32_t groups() const { return int32_t(splits.size()); }
};

inline std::vector<int32_t> offsets_of(const std::vector<int32_t>& splits) {
  std::vector<int32_t> offsets(1, 0);
  for (const int32_t split : splits) offsets.push_back(offsets.back() + split);
  return offsets;
}

inline std::string name_of(const GroupedShape& s, te_grouped_product product) {
  const char* product_name = product == TE_GROUPED_FPROP ? "fprop" : product == TE_GROUPED_DGRAD ? "dgrad" : "wgrad";
  std::string text = concat(product_name, " n ", s.n, " k ", s.k, " tail ", s.tail, " splits");
  for (const int32_t split : s.splits) text += concat(" ", split);
  return text;
}

template <class T>
std::vector<T> normals(int64_t n, unsigned seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  std::vector<T> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(from_float<T>(float(normal(engine))));
  return out;
}

// Lays tensors one distance apart, `spare` rows between them, which are NaN. Returns their memory.
inline std::shared_ptr<void> lay_apart(std::vector<te_tensor>& tensors, int64_t spare) {
  const int64_t pitch = tensors[0].row_pitch * int64_t(te_dtype_bytes(tensors[0].dtype));
  const int64_t bytes = tensors[0].rows * pitch, step = bytes + spare * pitch;
  auto memory = std::make_shared<Buffer<uint8_t>>(tensors[0].device, 1, step * int64_t(tensors.size()));
  for (size_t g = 0; g < tensors.size(); ++g) {
    uint8_t* const to = memory->data() + int64_t(g) * step;
    copy_bytes(to, tensors[g].data, size_t(bytes), tensors[g].device);
    tensors[g].data = to;
  }
  return memory;
}

// T: operands and row results; D: results of the weight gradient.
template <class T, class D = T>
class GroupedCase {
 public:
  using Buffers = std::vector<std::unique_ptr<Buffer<T>>>;

  GroupedCase(int32_t device, te_grouped_product product, const GroupedShape& s)
      : shape(s),
        offsets(offsets_of(s.splits)),
        x(device, s.rows(), s.k, aligned(s.k) + 8 * s.extra_pitch),
        dy(device, s.rows(), s.n, aligned(s.n) + 8 * s.extra_pitch),
        y(device, s.rows(), s.n, s.n + s.extra_pitch),
        dx(device, s.rows(), s.k, s.k + s.extra_pitch),
        x_values(normals<T>(s.rows() * s.k, 1)),
        dy_values(normals<T>(s.rows() * s.n, 2)),
        device_offsets(device, 1, s.groups() + 1),
        product_(product) {
    x.fill(x_values);
    dy.fill(dy_values);
    device_offsets.fill(offsets);
    for (int32_t g = 0; g < s.groups(); ++g) {
      weight_values.push_back(normals<T>(s.n * s.k, 100 + unsigned(g)));
      bias_values.push_back(normals<T>(s.n, 1000 + unsigned(g)));
      weights.push_back(std::make_unique<Buffer<T>>(device, s.n, s.k, aligned(s.k) + 8 * s.extra_pitch));
      weights.back()->fill(weight_values.back());
      biases.push_back(std::make_unique<Buffer<T>>(device, 1, s.n));
      biases.back()->fill(bias_values.back());
      results.push_back(std::make_unique<Buffer<D>>(device, s.n, s.k, s.k + s.extra_pitch));
      weight_tensors.push_back(weights.back()->tensor());
      bias_tensors.push_back(biases.back()->tensor());
      result_tensors.push_back(results.back()->tensor());
    }
    problem = te_grouped_gemm_problem{};
    problem.product = product;
    problem.groups = s.groups();
    problem.offsets = device_offsets.data();
    problem.rows = product == TE_GROUPED_FPROP ? x.tensor() : dy.tensor();
    if (product == TE_GROUPED_WGRAD) {
      problem.depth_rows = x.tensor();
      problem.results = result_tensors.data();
    } else {
      problem.result = row_result().tensor();
      problem.weights = weight_tensors.data();
    }
  }

  void with_bias() { problem.biases = bias_tensors.data(); }
  void stack() {
    stacked_weights_ = lay_apart(weight_tensors, 0);
    stacked_biases_ = lay_apart(bias_tensors, 1);
  }

  Buffer<T>& row_result() { return product_ == TE_GROUPED_FPROP ? y : dx; }
  int64_t depth() const { return product_ == TE_GROUPED_FPROP ? shape.k : shape.n; }
  int64_t row_cols() const { return product_ == TE_GROUPED_FPROP ? shape.n : shape.k; }

  // The group of a row; -1 in the tail.
  int32_t group_of(int64_t row) const {
    for (int32_t g = 0; g < shape.groups(); ++g) {
      if (row < offsets[size_t(g) + 1]) return g;
    }
    return -1;
  }

  // An element and the sum of its terms' magnitudes.
  struct Sum {
    double value = 0, magnitude = 0;
    void add(double left, double right) {
      value += left * right;
      magnitude += std::fabs(left * right);
    }
  };
  Sum row_sum(int64_t row, int64_t col) const {
    const std::vector<T>& weight = weight_values[size_t(group_of(row))];
    Sum sum;
    for (int64_t i = 0; i < depth(); ++i) {
      if (product_ == TE_GROUPED_FPROP) {
        sum.add(to_float(x_values[size_t(row * shape.k + i)]), to_float(weight[size_t(col * shape.k + i)]));
      } else {
        sum.add(to_float(dy_values[size_t(row * shape.n + i)]), to_float(weight[size_t(i * shape.k + col)]));
      }
    }
    return sum;
  }
  Sum weight_sum(int32_t g, int64_t n, int64_t k) const {
    Sum sum;
    for (int64_t row = offsets[size_t(g)]; row < offsets[size_t(g) + 1]; ++row) {
      sum.add(to_float(dy_values[size_t(row * shape.n + n)]), to_float(x_values[size_t(row * shape.k + k)]));
    }
    return sum;
  }

  GroupedShape shape;
  std::vector<int32_t> offsets;
  Buffer<T> x, dy, y, dx;
  std::vector<T> x_values, dy_values;
  std::vector<std::vector<T>> weight_values, bias_values;
  Buffer<int32_t> device_offsets;
  Buffers weights, biases;
  std::vector<std::unique_ptr<Buffer<D>>> results;
  std::vector<te_tensor> weight_tensors, bias_tensors, result_tensors;
  te_grouped_gemm_problem problem;

 private:
  static int64_t aligned(int64_t cols) { return (cols + 7) / 8 * 8; }

  std::shared_ptr<void> stacked_weights_, stacked_biases_;
  te_grouped_product product_;
};

template <class T>
void draw_integers(std::vector<T>& values, unsigned seed) {
  std::mt19937 engine(seed);
  for (T& value : values) value = from_float<T>(float(int(engine() % 7) - 3));
}

// Operands and what is added to: small integers, whose products and sums are exact in float32 in any order.
template <class T, class D>
void fill_with_integers(GroupedCase<T, D>& c) {
  draw_integers(c.x_values, 1);
  draw_integers(c.dy_values, 2);
  c.x.fill(c.x_values);
  c.dy.fill(c.dy_values);
  for (size_t g = 0; g < c.weights.size(); ++g) {
    draw_integers(c.weight_values[g], 10 + unsigned(g));
    draw_integers(c.bias_values[g], 500 + unsigned(g));
    c.weights[g]->fill(c.weight_values[g]);
    c.biases[g]->fill(c.bias_values[g]);
    std::vector<D> old(size_t(c.shape.n * c.shape.k));
    draw_integers(old, 900 + unsigned(g));
    c.results[g]->fill(old);
  }
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// How far a result of dtype D may be from `want`: a float32 sum of `terms` terms in any order, which tensor cores cut
// off instead of rounding, so that a term costs 2u; then one rounding to D.
template <class D>
double grouped_bound(double want, double magnitude, int64_t terms) {
  constexpr double kRelative = sizeof(D) == 4 ? 0x1p-24 : std::is_same_v<D, bf16> ? 0x1p-8 : 0x1p-11;
  constexpr double kAbsolute = sizeof(D) == 4 ? 0x1p-149 : std::is_same_v<D, bf16> ? 0x1p-133 : 0x1p-24;
  const double sum = double(2 * terms) * 0x1p-24 * magnitude * (1 + 1e-3);
  return sum * (1 + kRelative) + kRelative * std::fabs(want) + kAbsolute;
}

template <class T>
bool is_poison(const T& value) {
  unsigned char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  for (const unsigned char byte : bytes) {
    if (byte != testing::kPoison) return false;
  }
  return true;
}

}  // namespace te::testing
