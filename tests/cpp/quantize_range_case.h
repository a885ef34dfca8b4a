// Lists of ranges, and of bytes to transpose, of random sizes, and what the calls of single matrices make of each. For
// the suites of quantize ranges.
#pragma once

#include <memory>

#include "quantize_case.h"

namespace te::testing {

// Sizes below, at and beyond a tile, with rows that take 8 elements at once and rows that do not.
inline int64_t draw_size(std::mt19937& random) {
  constexpr int64_t kSizes[] = {0, 1, 5, 16, 33, 127, 128, 130, 257, 264, 392};
  return kSizes[random() % 11];
}

struct RangeOptions {
  te_scaling scaling;
  bool e5m2, given, pow_2, alone, notes;  // notes: whether the plan has amaxes
  te_dtype source, rounded_to;
  float epsilon;
};

inline RangeOptions draw_options(std::mt19937& random) {
  constexpr te_dtype kFloats[] = {TE_FLOAT32, TE_BFLOAT16, TE_FLOAT16};
  const bool blocks = random() % 2 == 0, given = !blocks && random() % 2 == 0;
  return {blocks ? TE_SCALING_BLOCK_2D : TE_SCALING_TENSOR,
          random() % 4 == 0,
          given,
          random() % 2 == 0,
          random() % 3 == 0,
          !given || random() % 2 == 0,
          kFloats[random() % 4 % 3],
          kFloats[random() % 3],
          random() % 3 == 0 ? 0.5f : 0.f};
}

// The memory that the amaxes' pass and the cast of a range write.
struct RangeOutputs {
  RangeOutputs(int32_t device, int64_t rows, int64_t cols, int64_t length, int64_t pitch, const RangeOptions& o)
      : options(o),
        blocks{up(rows, kBlock) / kBlock, up(cols, kBlock) / kBlock},
        data(device, o.alone ? 1 : rows, o.alone ? length : cols, o.alone ? length : pitch),
        scale_inv(device, tensor() ? 1 : blocks[0], tensor() ? 2 : up(blocks[1], 4)),
        amaxes(device, tensor() ? 1 : blocks[0], tensor() ? 1 : blocks[1]),
        amax(device, 1, 1) {
    amax.fill({0.25f});
  }
  bool tensor() const { return options.scaling == TE_SCALING_TENSOR; }
  te_quantize_range_plan plan(const te_tensor& scale) const {
    return {options.scaling,
            options.given ? scale : kAbsent,
            options.notes ? amaxes.tensor() : kAbsent,
            tensor() ? amax.tensor() : kAbsent,
            options.pow_2,
            options.epsilon};
  }
  te_tensor bytes() const { return data.tensor(options.e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3); }

  RangeOptions options;
  int64_t blocks[2];
  Buffer<uint8_t> data;
  Buffer<float> scale_inv, amaxes, amax;
};

class RangeListCase {
 public:
  RangeListCase(int32_t device, int32_t count, unsigned seed) : scale_(device, 1, 1), random_(seed) {
    scale_.fill({2.5f});
    for (int32_t i = 0; i < count; ++i) add(device, draw_options(random_));
    problem = {count, ranges.data(), plans.data(), data.data(), scale_invs.data()};
  }

  // As single calls make it, on the same memory.
  void quantize_each() {
    for (size_t i = 0; i < ranges.size(); ++i) {
      RangeOutputs& want = *wanted_[i];
      const te_quantize_range_plan plan = want.plan(scale_.tensor());
      const std::vector<float> before = want.amaxes.read();
      if (want.options.notes) {
        TE_ASSERT_OK(te_quantize_range_amax(&ranges[i], plan.scaling, want.amaxes.tensor(), nullptr));
        std::vector<float> larger = want.amaxes.read();
        for (size_t k = 0; k < larger.size(); ++k) larger[k] = std::fmax(larger[k], before[k]);
        want.amaxes.fill(larger);
      }
      TE_ASSERT_OK(te_quantize_range_cast(&ranges[i], &plan, want.bytes(), want.scale_inv.tensor(), nullptr));
    }
  }

  void expect(const std::string& what) const {
    for (size_t i = 0; i < ranges.size(); ++i) {
      const RangeOutputs &got = *got_[i], &want = *wanted_[i];
      const std::string where = what + ", item " + std::to_string(i);
      ASSERT_EQ(got.data.read(), want.data.read()) << where;
      const auto same = [&](const Buffer<float>& a, const Buffer<float>& b, const char* name) {
        const std::vector<float> x = a.read(), y = b.read();
        ASSERT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(float)), 0) << where << ", " << name;
        ASSERT_TRUE(a.padding_untouched()) << where << ", " << name;
      };
      same(got.scale_inv, want.scale_inv, "scale_inv");
      same(got.amaxes, want.amaxes, "amaxes");
      same(got.amax, want.amax, "amax");
      ASSERT_TRUE(got.data.padding_untouched()) << where;
    }
  }

  std::vector<te_quantize_range> ranges;
  std::vector<te_quantize_range_plan> plans;
  std::vector<te_tensor> data, scale_invs;
  te_quantize_range_list_problem problem;

 private:
  void add(int32_t device, const RangeOptions& o) {
    const int64_t rows = draw_size(random_), cols = draw_size(random_), n = rows * cols;
    int64_t start = n == 0 ? 0 : int64_t(random_()) % (n + 1), end = n == 0 ? 0 : int64_t(random_()) % (n + 1);
    if (random_() % 3 == 0) start = 0, end = n;
    if (random_() % 3 == 0) start = start / 8 * 8, end = end / 8 * 8;
    if (start > end) std::swap(start, end);
    const int64_t pitch = cols + (random_() % 2 == 0 ? 0 : int64_t(random_() % 9));
    ranges.push_back({rows, cols, start, source(device, end - start, o.source), o.rounded_to});
    for (auto* side : {&got_, &wanted_}) {
      side->push_back(std::make_unique<RangeOutputs>(device, rows, cols, end - start, pitch, o));
    }
    std::vector<float> before(size_t(got_.back()->amaxes.read().size()), random_() % 2 == 0 ? 0.f : 1.5f);
    for (auto* side : {&got_, &wanted_}) side->back()->amaxes.fill(before);
    plans.push_back(got_.back()->plan(scale_.tensor()));
    data.push_back(got_.back()->bytes());
    scale_invs.push_back(got_.back()->scale_inv.tensor());
  }

  te_tensor source(int32_t device, int64_t n, te_dtype dtype) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(n));
    for (float& v : values) v = random_() % 300 == 0 ? NAN : std::ldexp(normal(random_), int(random_() % 12) - 6);
    const auto keep = [&](auto& list, auto zero) {
      using T = decltype(zero);
      std::vector<T> rounded;
      for (const float v : values) rounded.push_back(from_float<T>(v));
      list.push_back(std::make_unique<Buffer<T>>(device, 1, n));
      list.back()->fill(rounded);
      return list.back()->tensor();
    };
    if (dtype == TE_BFLOAT16) return keep(bf16_, bf16{});
    return dtype == TE_FLOAT16 ? keep(fp16_, fp16{}) : keep(fp32_, 0.f);
  }

  Buffer<float> scale_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Buffer<float>>> fp32_;
  std::vector<std::unique_ptr<Buffer<bf16>>> bf16_;
  std::vector<std::unique_ptr<Buffer<fp16>>> fp16_;
  std::vector<std::unique_ptr<RangeOutputs>> got_, wanted_;
};

class TransposeListCase {
 public:
  TransposeListCase(int32_t device, int32_t count, unsigned seed) : random_(seed) {
    for (int32_t i = 0; i < count; ++i) add(device);
    problem = {count, rowwise.data(), columnwise.data(), scales.data(), column_scales.data()};
  }

  void expect(const std::string& what) const {
    for (size_t i = 0; i < rowwise.size(); ++i) {
      const std::string where = what + ", item " + std::to_string(i);
      TE_ASSERT_OK(te_quantize_transpose(rowwise[i], wanted_[i]->tensor(TE_FLOAT8_E4M3), nullptr));
      // With the tails, which both write.
      ASSERT_EQ(whole(*columns_[i]), whole(*wanted_[i])) << where;
      const std::vector<float> from = scales_[i]->read(), to = column_scales_[i]->read();
      const size_t m = size_t(up(rowwise[i].rows, kBlock) / kBlock), n = size_t(up(rowwise[i].cols, kBlock) / kBlock);
      for (size_t k = 0; k < m * n && scales[i].data != nullptr; ++k) {
        const size_t r = k / n, c = k % n;
        ASSERT_EQ(to[c * m + r], from[r * size_t(scales[i].row_pitch) + c]) << where << ", scales";
      }
      ASSERT_TRUE(column_scales_[i]->padding_untouched()) << where;
      for (const float v : to) ASSERT_EQ(std::isnan(v), scales[i].data == nullptr) << where;
    }
  }

  std::vector<te_tensor> rowwise, columnwise, scales, column_scales;
  te_quantize_transpose_list_problem problem;

 private:
  static std::vector<uint8_t> whole(const Buffer<uint8_t>& b) {
    const te_tensor t = b.tensor();
    std::vector<uint8_t> out = b.read();
    out.push_back(b.padding_untouched() ? 1 : t.row_pitch == t.cols ? 2 : 3);
    return out;
  }

  void add(int32_t device) {
    const int64_t rows = draw_size(random_), cols = draw_size(random_);
    const int64_t m = up(rows, kBlock) / kBlock, n = up(cols, kBlock) / kBlock;
    const int64_t pitch = up(rows, 16) + (random_() % 4 == 0 ? 144 : 0);  // also with tiles of a tail alone
    const bool scaled = random_() % 2 == 0;
    rows_.push_back(std::make_unique<Buffer<uint8_t>>(device, rows, cols, cols + int64_t(random_() % 3) * 4));
    std::vector<uint8_t> bytes(size_t(rows * cols));
    for (uint8_t& b : bytes) b = uint8_t(random_());
    rows_.back()->fill(bytes);
    for (auto* side : {&columns_, &wanted_}) {
      side->push_back(std::make_unique<Buffer<uint8_t>>(device, cols, rows, pitch));
    }
    scales_.push_back(std::make_unique<Buffer<float>>(device, m + 1, up(n, 4)));  // with others beyond those of blocks
    column_scales_.push_back(std::make_unique<Buffer<float>>(device, n, m, up(m, 4)));
    std::vector<float> values(size_t((m + 1) * up(n, 4)));
    for (float& v : values) v = float(random_() % 1000);
    scales_.back()->fill(values);
    const te_dtype fp8 = TE_FLOAT8_E4M3;
    rowwise.push_back(rows_.back()->tensor(fp8));
    columnwise.push_back(columns_.back()->tensor(fp8));
    scales.push_back(scaled ? te_tensor{scales_.back()->data(), m, n, up(n, 4), TE_FLOAT32, device} : kAbsent);
    if (m * n == 0) scales.back().data = nullptr;
    column_scales.push_back(scaled ? column_scales_.back()->tensor() : kAbsent);
  }

  std::mt19937 random_;
  std::vector<std::unique_ptr<Buffer<uint8_t>>> rows_, columns_, wanted_;
  std::vector<std::unique_ptr<Buffer<float>>> scales_, column_scales_;
};

}  // namespace te::testing
