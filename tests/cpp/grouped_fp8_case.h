// A grouped product of FP8 operands in one device's memory with poisoned results, what float64 makes of it, and what
// the header's formula makes of it in float32. Data and scales are made here, by no quantizer; whatever belongs to no
// group is NaN.
#pragma once

#include <algorithm>

#include "core/fp8.h"
#include "grouped_case.h"
#include "ops/gemm/gemm_fp8.h"

namespace te::testing {

template <class T>
constexpr te_dtype kFp8Dtype = std::is_same_v<T, e4m3> ? TE_FLOAT8_E4M3 : TE_FLOAT8_E5M2;

constexpr int64_t kBlock = 128;
inline int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Integers from -3 to 3 and scales that are powers of two near 1: all sums are exact in float32, and in Hopper's tensor
// cores, in any order and whether scaled before or after. Or what is drawn from all values.
enum class Draw { kExact, kAny };

// A matrix [outer, depth] of FP8 values and the scale of each row's blocks: what one operand of a product means.
template <class T>
struct Fp8Values {
  int64_t outer, depth;
  std::vector<T> data;
  std::vector<float> floats, scales;

  // scale(row, block)
  template <class Scale>
  Fp8Values(int64_t outer, int64_t depth, std::vector<T> drawn, Scale&& scale)
      : outer(outer), depth(depth), data(std::move(drawn)) {
    for (const T v : data) floats.push_back(to_float(v));
    for (int64_t i = 0; i < outer; ++i) {
      for (int64_t block = 0; block < blocks_of(depth); ++block) scales.push_back(scale(i, block));
    }
  }
  float value(int64_t i, int64_t k) const { return floats[size_t(i * depth + k)]; }
  float scale(int64_t i, int64_t k) const { return scales[size_t(i * blocks_of(depth) + k / kBlock)]; }
};

// To nearest even, saturating; by search, since FP8's bits rise with its magnitudes.
template <class T>
T nearest_fp8(float x) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const float magnitude = std::min(std::fabs(x), kFp8Max<T>);
  uint8_t above = 0;
  while (to_float(T{above}) < magnitude) ++above;
  if (above == 0) return T{sign};
  const uint8_t below = above - 1;
  const float up = to_float(T{above}) - magnitude, down = magnitude - to_float(T{below});
  const uint8_t even = above % 2 == 0 ? above : below;
  return T{uint8_t(sign | (up < down ? above : down < up ? below : even))};
}

template <class T>
std::vector<T> draw_fp8(int64_t count, Draw draw, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.f, 3.f);
  std::vector<T> out;
  for (int64_t i = 0; i < count; ++i) {
    const float x = draw == Draw::kExact ? float(int(engine() % 7) - 3) : normal(engine);
    out.push_back(nearest_fp8<T>(x));
  }
  return out;
}

inline std::vector<float> draw_scales(int64_t count, Draw draw, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i) {
    const float x = std::ldexp(1.f, int(engine() % 4) - 2);
    out.push_back(draw == Draw::kExact ? x : x * (1.f + float(engine() % 1000) / 1001.f));
  }
  return out;
}

// Left: the dtype of rows; D: of results. The shape's n and k are those of the weights whatever the product.
template <class Left, class D>
class Fp8Case {
 public:
  Fp8Case(int32_t device, te_grouped_product product, te_scaling scaling, const GroupedShape& s, Draw draw)
      : shape(s), offsets(offsets_of(s.splits)), product(product), scaling(scaling), device_(device), draw_(draw) {
    problem = te_grouped_gemm_problem{};
    problem.product = product;
    problem.groups = s.groups();
    device_offsets = std::make_unique<Buffer<int32_t>>(device, 1, s.groups() + 1);
    device_offsets->fill(offsets);
    problem.offsets = device_offsets->data();
    problem.scaling = scaling;
    panels_before.push_back(0);
    for (const int32_t split : s.splits) panels_before.push_back(panels_before.back() + blocks_of(split));
    wgrad() ? make_weight_gradient() : make_row_product();
  }

  bool wgrad() const { return product == TE_GROUPED_WGRAD; }
  bool in_blocks() const { return scaling == TE_SCALING_BLOCK_1D; }
  int64_t depth() const { return product == TE_GROUPED_FPROP ? shape.k : shape.n; }     // of a row product
  int64_t row_cols() const { return product == TE_GROUPED_FPROP ? shape.n : shape.k; }  // of its result
  int64_t panels() const { return panels_before.back() + kSparePanels; }

  void with_bias() {
    using B = std::conditional_t<std::is_same_v<D, fp16>, fp16, bf16>;
    for (int32_t g = 0; g < shape.groups(); ++g) {
      std::vector<B> values(static_cast<size_t>(shape.n));
      draw_integers(values, 500 + unsigned(g));
      auto buffer = std::make_shared<Buffer<B>>(device_, 1, shape.n);
      buffer->fill(values);
      bias_tensors.push_back(buffer->tensor());
      kept_.push_back(buffer);
      bias_values.push_back(widened(values));
    }
    problem.biases = bias_tensors.data();
  }
  void fill_results() {
    for (int32_t g = 0; g < shape.groups(); ++g) {
      std::vector<D> old(size_t(shape.n * shape.k));
      draw_integers(old, 900 + unsigned(g));
      results[size_t(g)]->fill(old);
      old_values.push_back(widened(old));
    }
  }

  int32_t group_of(int64_t row) const {
    for (int32_t g = 0; g < shape.groups(); ++g) {
      if (row < offsets[size_t(g) + 1]) return g;
    }
    return -1;
  }

  // Element (i, j) of group g's product, bias and what is added to left aside: in float64, and by the formula.
  struct Sum {
    double value = 0, magnitude = 0;
    float formula = 0;
  };
  Sum sum(int32_t g, int64_t i, int64_t j) const {
    const Fp8Values<Left>& a = left[size_t(g)];
    const Fp8Values<e4m3>& b = right[size_t(g)];
    Sum s;
    float partial = 0.f, scale = 0.f;
    for (int64_t k = 0; k < a.depth; ++k) {
      const double term = double(a.value(i, k)) * a.scale(i, k) * b.value(j, k) * double(b.scale(j, k));
      s.value += term;
      s.magnitude += std::fabs(term);
      partial = std::fma(a.value(i, k), b.value(j, k), partial);
      scale = a.scale(i, k) * b.scale(j, k);
      if (k + 1 < a.depth && (k + 1) % kBlock != 0) continue;
      s.formula = in_blocks() ? std::fma(partial, scale, s.formula) : s.formula + partial;
      partial = 0.f;
    }
    if (!in_blocks() && a.depth > 0) s.formula = std::fma(s.formula, scale, -0.f);  // rounded, whatever is added
    return s;
  }

  GroupedShape shape;
  std::vector<int32_t> offsets;
  te_grouped_product product;
  te_scaling scaling;
  te_grouped_gemm_problem problem;
  std::vector<int64_t> panels_before;
  std::vector<Fp8Values<Left>> left;  // one a group
  std::vector<Fp8Values<e4m3>> right;
  std::unique_ptr<Buffer<int32_t>> device_offsets;
  std::unique_ptr<Buffer<D>> result;
  std::vector<std::unique_ptr<Buffer<D>>> results;
  std::vector<te_tensor> weight_tensors, scale_tensors, bias_tensors, result_tensors;
  std::vector<std::vector<double>> bias_values, old_values;

 private:
  static constexpr int64_t kSparePanels = 2;

  template <class T>
  te_tensor kept(const std::vector<T>& values, int64_t rows, int64_t cols, int64_t pitch, te_dtype dtype) {
    auto buffer = std::make_shared<Buffer<T>>(device_, rows, cols, pitch);
    buffer->fill(values);
    kept_.push_back(buffer);
    return buffer->tensor(dtype);
  }
  template <class T>
  te_tensor kept_data(const std::vector<T>& data, int64_t rows, int64_t cols) {
    std::vector<uint8_t> bytes;
    for (const T value : data) bytes.push_back(value.bits);
    return kept(bytes, rows, cols, round_up(cols, 16) + 16 * shape.extra_pitch, kFp8Dtype<T>);
  }
  te_tensor kept_scales(const std::vector<float>& scales, int64_t rows, int64_t cols) {
    return kept(scales, rows, cols, cols, TE_FLOAT32);
  }

  void make_row_product() {
    const int64_t rows = shape.rows(), width = round_up(rows, 4), blocks = blocks_of(depth());
    const std::vector<float> groups = draw_scales(shape.groups(), draw_, 3);
    std::vector<Left> all(size_t(rows * depth()), Left{0xff});
    std::vector<float> scales(size_t(blocks * width), std::nanf(""));
    const std::vector<float> drawn = draw_scales(blocks * width, draw_, 4);
    for (int32_t g = 0; g < shape.groups(); ++g) {
      const int64_t first = offsets[size_t(g)], count = shape.splits[size_t(g)];
      Fp8Values<Left> a(count, depth(), draw_fp8<Left>(count * depth(), draw_, 20 + unsigned(g)),
                        [&](int64_t i, int64_t block) {
                          return in_blocks() ? drawn[size_t(block * width + first + i)] : groups[size_t(g)];
                        });
      std::copy(a.data.begin(), a.data.end(), all.begin() + first * depth());
      for (int64_t b = 0; b < blocks; ++b) {
        std::copy_n(drawn.begin() + b * width + first, count, scales.begin() + b * width + first);
      }
      left.push_back(std::move(a));
      make_weight(g);
    }
    problem.rows = kept_data(all, rows, depth());
    problem.rows_scale_inv = in_blocks() ? kept_scales(scales, blocks, width) : kept_scales(groups, 1, shape.groups());
    problem.weights = weight_tensors.data();
    problem.weights_scale_inv = scale_tensors.data();
    result = std::make_unique<Buffer<D>>(device_, rows, row_cols(), row_cols() + shape.extra_pitch);
    problem.result = result->tensor();
  }

  void make_weight(int32_t g) {
    const int64_t outer = row_cols(), width = round_up(blocks_of(depth()), 4);
    const int64_t lines = in_blocks() ? blocks_of(outer) : 1, cols = in_blocks() ? width : g % 2 + 1;
    const std::vector<float> scales = draw_scales(lines * cols, draw_, 700 + unsigned(g));
    Fp8Values<e4m3> b(
        outer, depth(), draw_fp8<e4m3>(outer * depth(), draw_, 300 + unsigned(g)),
        [&](int64_t j, int64_t block) { return scales[in_blocks() ? size_t(j / kBlock * cols + block) : 0]; });
    weight_tensors.push_back(kept_data(b.data, outer, depth()));
    scale_tensors.push_back(kept_scales(scales, lines, cols));
    right.push_back(std::move(b));
  }

  template <class T>
  void make_panels(int64_t cols, unsigned seed, std::vector<Fp8Values<T>>& values, te_tensor& data, te_tensor& scales) {
    const int64_t width = round_up(cols, 4);
    const std::vector<float> drawn = draw_scales(panels() * width, draw_, seed);
    const std::vector<float> groups = draw_scales(shape.groups(), draw_, seed + 1);
    std::vector<uint8_t> bytes(size_t(panels() * cols * kBlock), 0xff);
    std::vector<float> blocks(size_t(panels() * width), std::nanf(""));
    for (int32_t g = 0; g < shape.groups(); ++g) {
      const int64_t first = panels_before[size_t(g)], count = shape.splits[size_t(g)];
      Fp8Values<T> v(cols, count, draw_fp8<T>(cols * count, draw_, seed + 10 + unsigned(g)),
                     [&](int64_t i, int64_t block) {
                       return in_blocks() ? drawn[size_t((first + block) * width + i)] : groups[size_t(g)];
                     });
      for (int64_t p = first; p < panels_before[size_t(g) + 1]; ++p) {
        for (int64_t i = 0; i < cols * kBlock; ++i) {
          const int64_t k = (p - first) * kBlock + i % kBlock;
          bytes[size_t(p * cols * kBlock + i)] = k < count ? v.data[size_t(i / kBlock * count + k)].bits : 0;
        }
        std::copy_n(drawn.begin() + p * width, cols, blocks.begin() + p * width);
      }
      values.push_back(std::move(v));
    }
    data = kept(bytes, panels() * cols, kBlock, kBlock + 16 * shape.extra_pitch, kFp8Dtype<T>);
    scales = in_blocks() ? kept_scales(blocks, panels(), width) : kept_scales(groups, 1, shape.groups());
  }

  void make_weight_gradient() {
    make_panels(shape.n, 2000, left, problem.rows, problem.rows_scale_inv);
    make_panels(shape.k, 4000, right, problem.depth_rows, problem.depth_rows_scale_inv);
    for (int32_t g = 0; g < shape.groups(); ++g) {
      results.push_back(std::make_unique<Buffer<D>>(device_, shape.n, shape.k, shape.k + shape.extra_pitch));
      result_tensors.push_back(results.back()->tensor());
    }
    problem.results = result_tensors.data();
  }

  int32_t device_;
  Draw draw_;
  std::vector<std::shared_ptr<void>> kept_;
};

inline const char* scaling_name(te_scaling scaling) { return scaling == TE_SCALING_TENSOR ? " tensor" : " blocks"; }

// Calls f(element of `got`, group or -1, row, col) for each element of a row product's result.
template <class Left, class D, class F>
void for_rows(const Fp8Case<Left, D>& c, F&& f) {
  const std::vector<D> got = c.result->read();
  for (int64_t row = 0; row < c.shape.rows(); ++row) {
    const int32_t g = c.group_of(row);
    const int64_t i = g < 0 ? row : row - c.offsets[size_t(g)];
    for (int64_t col = 0; col < c.row_cols(); ++col) f(got[size_t(row * c.row_cols() + col)], g, i, col);
  }
}

}  // namespace te::testing
