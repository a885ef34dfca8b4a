// quantize, ranges through the C API, on every device here: the largest amax of all parts is that of the whole, bytes
// and scales equal te_quantize of the whole, for every cut, into the whole and alone; nothing outside a range
// is touched; errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"
#include "transformer_engine/quantize.h"

namespace te {
namespace {

using testing::Buffer;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr int64_t kBlock = 128;

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Options {
  te_scaling scaling;
  bool e5m2, pow_2, given;
  float epsilon;
  te_dtype fp8() const { return e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3; }
};
constexpr Options kOptions[] = {
    {TE_SCALING_TENSOR, false, false, true, 0},    {TE_SCALING_TENSOR, true, false, false, 0},
    {TE_SCALING_TENSOR, false, true, false, 0.5f}, {TE_SCALING_BLOCK_2D, false, true, false, 0},
    {TE_SCALING_BLOCK_2D, true, false, false, 1},
};

// Sizes below, at and beyond a tile, with rows that take 8 elements at once and rows that do not.
struct Shape {
  int64_t rows, cols, extra_pitch;
};
constexpr Shape kShapes[] = {{1, 1, 0}, {5, 33, 15}, {128, 128, 0}, {130, 264, 8}, {257, 260, 12}};

std::vector<float> draw(int64_t n) {
  std::mt19937_64 engine(11);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-6, 6), special(0, 300);
  std::vector<float> out;
  for (int64_t i = 0; i < n; ++i) {
    const int which = special(engine);
    const float x = std::ldexp(normal(engine), exponent(engine));
    out.push_back(which == 0 ? NAN : which == 1 ? -0.f : x);
  }
  return out;
}

std::vector<std::vector<int64_t>> cuts_of(int64_t n) {
  return {{0, n},
          {0, n / 2, n},
          {0, n / 3 / 8 * 8, n / 3 / 8 * 8, n * 2 / 3 / 8 * 8 + (n > 3 ? 3 : 0), n},  // one empty, one off the eights
          {0, std::min<int64_t>(n, 5), n}};
}

template <class T>
class Cut {
 public:
  Cut(int32_t device, Shape s, Options o)
      : device_(device),
        shape_(s),
        options_(o),
        block_rows_(up(s.rows, kBlock) / kBlock),
        block_cols_(up(s.cols, kBlock) / kBlock),
        what_(::testing::PrintToString(std::vector<int64_t>{s.rows, s.cols, o.scaling, o.e5m2, o.pow_2, o.given})),
        tensor_(o.scaling == TE_SCALING_TENSOR),
        scale_(device, 1, 1) {
    for (const float x : draw(s.rows * s.cols)) values_.push_back(from_float<T>(x));
    scale_.fill({2.5f});
  }

  // Of the full matrix, in one call: bytes without pitch, scales, and the updated amax.
  void quantize_whole() {
    Buffer<T> x(device_, shape_.rows, shape_.cols);
    x.fill(values_);
    Buffer<uint8_t> data(device_, shape_.rows, shape_.cols, up(shape_.cols, 16));
    Buffer<float> scale_inv(device_, scale_rows(), scale_cols()), parts(device_, 1, TE_QUANTIZE_PARTS);
    Buffer<float> amax(device_, 1, 1);
    amax.fill({amax_before()});
    te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, options_.pow_2, options_.epsilon};
    if (tensor_) {
      TE_ASSERT_OK(te_quantize_amax(x.tensor(), parts.tensor(), kAbsent, nullptr));
      (options_.given ? plan.scale : plan.amax_parts) = (options_.given ? scale_ : parts).tensor();
      plan.amax = amax.tensor();
    }
    const te_quantized out{options_.scaling, data.tensor(options_.fp8()), kAbsent, scale_inv.tensor(), kAbsent};
    TE_ASSERT_OK(te_quantize(&plan, x.tensor(), &out, nullptr));
    bytes_ = data.read();
    scales_ = scale_inv.read();
    amax_ = amax.read()[0];
  }

  // In parts. Values that come in float32 are rounded to T on the way.
  template <class Source>
  void quantize_cut(const std::vector<int64_t>& cuts, bool alone, te_dtype rounded_to) {
    const int64_t rows = tensor_ ? 1 : block_rows_, cols = tensor_ ? 1 : block_cols_;
    std::vector<float> largest(size_t(rows * cols), 0.f);
    Buffer<float> amaxes(device_, rows, cols);
    for_ranges<Source>(cuts, rounded_to, [&](const te_quantize_range& range) {
      amaxes.poison();
      TE_ASSERT_OK(te_quantize_range_amax(&range, options_.scaling, amaxes.tensor(), nullptr));
      const std::vector<float> found = amaxes.read();
      for (size_t i = 0; i < found.size(); ++i) {
        ASSERT_GE(found[i], 0.f) << what_;  // and written
        largest[i] = std::fmax(largest[i], found[i]);
      }
      EXPECT_TRUE(amaxes.padding_untouched()) << what_;
    });
    amaxes.fill(largest);
    Buffer<uint8_t> whole(device_, shape_.rows, shape_.cols, shape_.cols + shape_.extra_pitch);
    std::vector<uint8_t> got(bytes_.size());
    for_ranges<Source>(cuts, rounded_to, [&](const te_quantize_range& range) {
      const int64_t length = range.x.cols;
      Buffer<uint8_t> part(device_, 1, length);
      Buffer<float> scale_inv(device_, scale_rows(), scale_cols()), amax(device_, 1, 1);
      amax.fill({amax_before()});
      te_quantize_range_plan plan{options_.scaling, kAbsent,        amaxes.tensor(),
                                  kAbsent,          options_.pow_2, options_.epsilon};
      if (tensor_) plan.amax = amax.tensor();
      if (options_.given) plan.scale = scale_.tensor();
      const std::vector<uint8_t> before = whole.read();
      const te_tensor data = (alone ? part : whole).tensor(options_.fp8());
      TE_ASSERT_OK(te_quantize_range_cast(&range, &plan, data, scale_inv.tensor(), nullptr));
      EXPECT_EQ(scale_inv.read(), scales_) << what_;
      EXPECT_TRUE(scale_inv.padding_untouched() && whole.padding_untouched() && part.padding_untouched()) << what_;
      if (tensor_) {
        EXPECT_EQ(amax.read()[0], amax_) << what_;
      }
      const std::vector<uint8_t> after = alone ? part.read() : whole.read();
      for (int64_t i = 0; i < int64_t(got.size()); ++i) {
        const bool inside = i >= range.start && i < range.start + length;
        if (inside) got[size_t(i)] = after[size_t(i - (alone ? range.start : 0))];
        if (!inside && !alone) {
          ASSERT_EQ(after[size_t(i)], before[size_t(i)]) << what_ << " outside, at " << i;
        }
      }
    });
    ASSERT_EQ(got, bytes_) << what_ << " alone " << alone << " cuts " << ::testing::PrintToString(cuts);
  }

 private:
  template <class Source, class Body>
  void for_ranges(const std::vector<int64_t>& cuts, te_dtype rounded_to, Body&& body) {
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t length = cuts[i + 1] - cuts[i];
      Buffer<Source> x(device_, 1, length);
      std::vector<Source> part;
      for (int64_t j = cuts[i]; j < cuts[i + 1]; ++j) {
        // Not representable in T, but for what float32 itself cannot tell apart: rounding takes it back.
        const float value = to_float(values_[size_t(j)]);
        part.push_back(from_float<Source>(sizeof(T) < sizeof(Source) ? value * (1 + 0x1p-14f) : value));
      }
      x.fill(part);
      body(te_quantize_range{shape_.rows, shape_.cols, cuts[i], x.tensor(), rounded_to});
      if (::testing::Test::HasFatalFailure()) return;
    }
  }

  // Above what is drawn, or below.
  float amax_before() const { return shape_.rows % 2 == 0 ? 1e6f : 0.25f; }
  int64_t scale_rows() const { return tensor_ ? 1 : block_rows_; }
  int64_t scale_cols() const { return tensor_ ? 2 : up(block_cols_, 4); }

  int32_t device_;
  Shape shape_;
  Options options_;
  int64_t block_rows_, block_cols_;
  std::string what_;
  bool tensor_;
  Buffer<float> scale_;
  std::vector<T> values_;
  std::vector<uint8_t> bytes_;
  std::vector<float> scales_;
  float amax_ = 0;
};

class QuantizeRange : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, QuantizeRange, ::testing::ValuesIn(testing::devices()), testing::device_name);

template <class T>
void check_cuts(int32_t device) {
  for (const Shape& s : kShapes) {
    for (const Options& o : kOptions) {
      Cut<T> cut(device, s, o);
      cut.quantize_whole();
      for (const std::vector<int64_t>& cuts : cuts_of(s.rows * s.cols)) {
        for (const bool alone : {false, true}) {
          cut.template quantize_cut<T>(cuts, alone, TE_FLOAT32);
          cut.template quantize_cut<float>(cuts, alone, testing::kDtype<T>);
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(QuantizeRange, EveryCutGivesTheWhole) {
  check_cuts<float>(GetParam());
  check_cuts<fp16>(GetParam());
  check_cuts<bf16>(GetParam());
}

// A matrix without elements, and a rank that has nothing of one with some.
TEST_P(QuantizeRange, Nothing) {
  Buffer<float> amax(GetParam(), 1, 1), scale_inv(GetParam(), 1, 1), x(GetParam(), 1, 0);
  Buffer<uint8_t> data(GetParam(), 3, 40);
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{0, 40}, {3, 40}}) {
    const te_quantize_range range{rows, cols, 0, x.tensor(), TE_BFLOAT16};
    amax.poison();
    scale_inv.poison();
    TE_ASSERT_OK(te_quantize_range_amax(&range, TE_SCALING_TENSOR, amax.tensor(), nullptr));
    EXPECT_EQ(amax.read()[0], 0.f);
    amax.fill({7.f});
    te_tensor bytes = data.tensor(TE_FLOAT8_E4M3);
    bytes.rows = rows;
    const te_quantize_range_plan plan{TE_SCALING_TENSOR, kAbsent, amax.tensor(), kAbsent, 0, 0};
    TE_ASSERT_OK(te_quantize_range_cast(&range, &plan, bytes, scale_inv.tensor(), nullptr));
    EXPECT_EQ(scale_inv.read()[0], 1.f / 64.f);
    for (const uint8_t byte : data.read()) ASSERT_EQ(byte, testing::kPoison);
  }
}

TEST_P(QuantizeRange, Errors) {
  const int32_t device = GetParam();
  Buffer<float> x(device, 1, 100), amaxes(device, 2, 2), one(device, 1, 1), scales(device, 2, 4);
  Buffer<uint8_t> data(device, 200, 200);
  const te_quantize_range good{200, 200, 300, x.tensor(), TE_BFLOAT16};
  const te_quantize_range_plan blocks{TE_SCALING_BLOCK_2D, kAbsent, amaxes.tensor(), kAbsent, 0, 0};
  const te_quantize_range_plan given{TE_SCALING_TENSOR, one.tensor(), kAbsent, kAbsent, 0, 0};
  const auto refused = [&](te_status status, const std::string& message, te_status wanted = TE_INVALID_ARGUMENT) {
    EXPECT_EQ(status, wanted) << message;
    EXPECT_NE(std::string(te_last_error()).find(message), std::string::npos) << te_last_error();
  };
  const auto amax = [&](auto change, te_scaling scaling = TE_SCALING_BLOCK_2D) {
    te_quantize_range range = good;
    te_tensor out = amaxes.tensor();
    change(range, out);
    return te_quantize_range_amax(&range, scaling, out, nullptr);
  };
  const auto cast = [&](te_quantize_range_plan plan, auto change) {
    te_quantize_range range = good;
    te_tensor out = data.tensor(TE_FLOAT8_E4M3), inverse = (plan.scaling == TE_SCALING_TENSOR ? one : scales).tensor();
    change(range, plan, out, inverse);
    return te_quantize_range_cast(&range, &plan, out, inverse, nullptr);
  };
  refused(amax([](auto& r, auto&) { r.start = -1; }), "argument 'range' is elements -1 to 99");
  refused(amax([](auto& r, auto&) { r.start = 39901; }), "wanted some of the 40000 of a matrix [200, 200]");
  refused(amax([](auto& r, auto&) { r.rows = -2; }), "argument 'range' is of a matrix [-2, 200]");
  refused(amax([](auto& r, auto&) { r.x.dtype = TE_INT32; }), "argument 'range.x' is of dtype int32");
  refused(amax([](auto& r, auto&) { r.rounded_to = TE_UINT8; }), "argument 'range.rounded_to' is of dtype uint8");
  refused(amax([](auto&, auto& out) { out.cols = 1; }), "argument 'amaxes' is [2, 1], wanted [2, 2]");
  refused(amax([](auto&, auto&) {}, TE_SCALING_TENSOR), "argument 'amaxes' is [2, 2], wanted [1, 1]");
  refused(amax([](auto&, auto&) {}, TE_SCALING_BLOCK_1D), "1x128 blocks", TE_NOT_IMPLEMENTED);
  refused(cast(blocks, [](auto&, auto& plan, auto&, auto&) { plan.scaling = TE_SCALING_BLOCK_1D; }), "1x128 blocks",
          TE_NOT_IMPLEMENTED);
  refused(cast(blocks, [&](auto&, auto& plan, auto&, auto&) { plan.scale = one.tensor(); }), "with scale or amax");
  refused(cast(blocks, [](auto&, auto& plan, auto&, auto&) { plan.amaxes = kAbsent; }), "argument 'plan.amaxes'");
  refused(cast(given, [](auto&, auto& plan, auto&, auto&) { plan.scale = kAbsent; }), "argument 'plan.amaxes'");
  refused(cast(given, [](auto&, auto& plan, auto&, auto&) { plan.amax_epsilon = NAN; }), "'plan.amax_epsilon' is nan");
  refused(cast(blocks, [](auto&, auto&, auto& out, auto&) { out.cols = 100; }), "argument 'data' is [200, 100]");
  refused(cast(blocks, [](auto&, auto&, auto& out, auto&) { out.dtype = TE_UINT8; }), "'data' is of dtype uint8");
  refused(cast(blocks, [](auto&, auto&, auto&, auto& out) { out.cols = 2; }), "argument 'scale_inv' is [2, 2]");
  for (const uint8_t byte : data.read()) ASSERT_EQ(byte, testing::kPoison);
  for (const float value : scales.read()) ASSERT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace te
