// quantize through the C API, on every device here: bytes and scales equal to a reference that picks the nearest code
// from a table, in both directions of every scaling, with pitches, tails and guards watched; amax parts, column sums,
// dequantization, transposes, scale updates, errors.
#include "transformer_engine/quantize.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/fp8.h"
#include "quantize_case.h"

namespace te {
namespace {

using namespace testing;

class Quantize : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, Quantize, ::testing::ValuesIn(testing::devices()), testing::device_name);

// Empty, single, odd (elementwise access), aligned, more than a tile, input pitch that breaks 16 bytes, output tails.
struct Shape {
  int64_t rows, cols, extra_pitch, extra_out;
};
constexpr Shape kShapes[] = {{0, 8, 0, 0},  {3, 0, 5, 0},     {1, 1, 0, 0},       {1, 257, 0, 16},  {5, 33, 3, 32},
                             {7, 64, 8, 0}, {128, 128, 0, 0}, {130, 512, 0, 160}, {300, 136, 1, 0}, {257, 260, 0, 0}};

constexpr Options kOptions[] = {
    {TE_SCALING_TENSOR, false, false, 0},   {TE_SCALING_TENSOR, true, true, 0.f},
    {TE_SCALING_BLOCK_1D, false, false, 0}, {TE_SCALING_BLOCK_1D, false, true, 0.5f},
    {TE_SCALING_BLOCK_1D, true, true, 0},   {TE_SCALING_BLOCK_2D, false, true, 0},
    {TE_SCALING_BLOCK_2D, true, false, 0},
};

template <class T>
void check(int32_t device, Shape s, Options o, bool rowwise, bool columnwise, bool given) {
  const std::string what = ::testing::PrintToString(
      std::vector<int64_t>{s.rows, s.cols, o.scaling, o.e5m2, o.pow_2, rowwise, columnwise, given, int64_t(sizeof(T))});
  const std::vector<T> values = draw<T>(s.rows * s.cols, 7);
  const std::vector<float> x = as_floats(values);
  const float amax = amax_over(x, s.cols, 0, s.rows, 0, s.cols);
  const float scale = given ? 2.5f : scale_from(amax, o.e5m2, o.pow_2, o.epsilon);
  const Direction row = reference(x, s.rows, s.cols, o, scale);
  const Direction col = reference(transposed(x, s.rows, s.cols), s.cols, s.rows, o, scale);
  Buffer<T> source(device, s.rows, s.cols, s.cols + s.extra_pitch);
  source.fill(values);
  Data row_data(device, s.rows, s.cols, row, s.extra_out), col_data(device, s.cols, s.rows, col, s.extra_out);
  Buffer<float> parts(device, 1, TE_QUANTIZE_PARTS), one(device, 1, 1), largest(device, 1, 1), flag(device, 1, 1);
  Buffer<float> sums(device, up(s.rows, kBlock) / kBlock, s.cols);
  one.fill({scale});
  largest.fill({0.25f});
  flag.fill({0.f});
  te_quantize_plan plan{kAbsent, kAbsent, kAbsent, sums.tensor(), flag.tensor(), o.pow_2, o.epsilon};
  if (o.scaling == TE_SCALING_TENSOR) {
    TE_ASSERT_OK(te_quantize_amax(source.tensor(), parts.tensor(), kAbsent, nullptr));
    (given ? plan.scale : plan.amax_parts) = (given ? one : parts).tensor();
    plan.amax = largest.tensor();
  }
  const te_quantized out{
      o.scaling, rowwise ? row_data.tensor(o.e5m2) : kAbsent, columnwise ? col_data.tensor(o.e5m2) : kAbsent,
      rowwise ? row_data.scale_inv.tensor() : kAbsent, columnwise ? col_data.scale_inv.tensor() : kAbsent};
  TE_ASSERT_OK(te_quantize(&plan, source.tensor(), &out, nullptr));
  if (rowwise) row_data.expect(row, s.rows, what + " rowwise");
  if (columnwise) col_data.expect(col, s.cols, what + " columnwise");
  if (o.scaling == TE_SCALING_TENSOR) {
    EXPECT_EQ(largest.read()[0], given ? std::fmax(0.25f, amax) : amax) << what;
    const std::vector<float> maxima = parts.read();
    EXPECT_EQ(amax_over(maxima, int64_t(maxima.size()), 0, 1, 0, int64_t(maxima.size())), amax) << what;
    for (const float part : maxima) ASSERT_FALSE(std::isnan(part)) << what << ": a part was not written";
  }
  EXPECT_TRUE(source.padding_untouched()) << what;

  // Nothing at all happens when the flag is set.
  flag.fill({1.f});
  for (Buffer<uint8_t>* buffer : {&row_data.data, &col_data.data}) buffer->poison();
  for (Buffer<float>* buffer : {&row_data.scale_inv, &col_data.scale_inv, &sums}) buffer->poison();
  TE_ASSERT_OK(te_quantize(&plan, source.tensor(), &out, nullptr));
  for (const Buffer<uint8_t>* buffer : {&row_data.data, &col_data.data}) {
    for (const uint8_t byte : buffer->read()) ASSERT_EQ(byte, testing::kPoison) << what;
  }
  for (const Buffer<float>* buffer : {&row_data.scale_inv, &col_data.scale_inv, &sums}) {
    for (const float value : buffer->read()) ASSERT_TRUE(std::isnan(value)) << what;
  }
}

TEST_P(Quantize, BytesAndScales) {
  for (const Shape& s : kShapes) {
    for (const Options& o : kOptions) {
      for (const auto& [rowwise, columnwise] : {std::pair{true, true}, {true, false}, {false, true}}) {
        for_dtypes([&](auto t) {
          check<decltype(t)>(GetParam(), s, o, rowwise, columnwise, false);
          if (o.scaling == TE_SCALING_TENSOR) check<decltype(t)>(GetParam(), s, o, rowwise, columnwise, true);
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Sums of 128 rows, within (rows + 16) u of the sum of magnitudes of float64's; and in the fixed order: small integers
// are summed without error, and the bias gradient is the sum of the sums.
TEST_P(Quantize, ColumnSums) {
  const int64_t rows = 300, cols = 140, blocks = 3;
  std::vector<float> values;
  for (int64_t i = 0; i < rows * cols; ++i) values.push_back(float(i % 251) - 125);
  Buffer<float> x(GetParam(), rows, cols), sums(GetParam(), blocks, cols), dbias(GetParam(), 1, cols);
  x.fill(values);
  const te_quantize_plan plan{kAbsent, kAbsent, kAbsent, sums.tensor(), kAbsent, 0, 0};
  const te_quantized nothing{TE_SCALING_BLOCK_1D, kAbsent, kAbsent, kAbsent, kAbsent};
  TE_ASSERT_OK(te_quantize(&plan, x.tensor(), &nothing, nullptr));
  TE_ASSERT_OK(te_quantize_sum_columns(sums.tensor(), dbias.tensor(), nullptr));
  const std::vector<float> got = sums.read(), total = dbias.read();
  for (int64_t c = 0; c < cols; ++c) {
    double all = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      double want = 0;
      for (int64_t r = b * kBlock; r < std::min(rows, (b + 1) * kBlock); ++r) want += values[size_t(r * cols + c)];
      ASSERT_EQ(double(got[size_t(b * cols + c)]), want) << b << ", " << c;
      all += want;
    }
    ASSERT_EQ(double(total[size_t(c)]), all) << c;
  }
}

TEST_P(Quantize, DequantizeAndTranspose) {
  for (const Shape& s : kShapes) {
    for (const Options& o : kOptions) {
      const std::vector<float> x = as_floats(draw<float>(s.rows * s.cols, 9));
      const Direction row = reference(x, s.rows, s.cols, o, 0.75f);
      const Direction col = reference(transposed(x, s.rows, s.cols), s.cols, s.rows, o, 0.75f);
      Buffer<float> source(GetParam(), s.rows, s.cols), one(GetParam(), 1, 1), y(GetParam(), s.rows, s.cols);
      source.fill(x);
      one.fill({0.75f});
      te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, o.pow_2, o.epsilon};
      if (o.scaling == TE_SCALING_TENSOR) plan.scale = one.tensor();
      Data row_data(GetParam(), s.rows, s.cols, row, 0), col_data(GetParam(), s.cols, s.rows, col, 0);
      const te_quantized out{o.scaling, row_data.tensor(o.e5m2), col_data.tensor(o.e5m2), row_data.scale_inv.tensor(),
                             col_data.scale_inv.tensor()};
      TE_ASSERT_OK(te_quantize(&plan, source.tensor(), &out, nullptr));
      for (const bool rowwise : {true, false}) {
        te_quantized in = out;
        if (!rowwise) in.rowwise = in.rowwise_scale_inv = kAbsent;
        y.poison();
        TE_ASSERT_OK(te_dequantize(&in, y.tensor(), nullptr));
        const std::vector<float> got = y.read();
        for (int64_t r = 0; r < s.rows; ++r) {
          for (int64_t c = 0; c < s.cols; ++c) {
            const Direction& d = rowwise ? row : col;
            const int64_t i = rowwise ? r : c, j = rowwise ? c : r, width = rowwise ? s.cols : s.rows;
            const int64_t at = o.scaling == TE_SCALING_TENSOR     ? 0
                               : o.scaling == TE_SCALING_BLOCK_1D ? j / kBlock * d.scale_cols + i
                                                                  : i / kBlock * d.scale_cols + j / kBlock;
            const float want = float(decode(d.data[size_t(i * width + j)], o.e5m2)) * d.scale_inv[size_t(at)];
            const float value = got[size_t(r * s.cols + c)];
            ASSERT_TRUE(value == want || (std::isnan(value) && std::isnan(want))) << value << " " << want;
          }
        }
        EXPECT_TRUE(y.padding_untouched());
      }
      if (o.scaling == TE_SCALING_BLOCK_1D) continue;  // the columnwise bytes are others
      col_data.data.poison();
      TE_ASSERT_OK(te_quantize_transpose(out.rowwise, out.columnwise, nullptr));
      col_data.expect(col, s.cols, "transpose");
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(Quantize, ScalesBetweenSteps) {
  const int64_t rows = 700, cols = 3;
  std::vector<float> values;
  for (int64_t i = 0; i < rows * cols; ++i) values.push_back(float(i % 97) + 1);
  values[2] = 0.f;  // not quantized in this step
  values[3] = NAN;
  Buffer<float> history(GetParam(), rows, cols, cols + 2), scale(GetParam(), 1, cols);
  history.fill(values);
  scale.fill({9.f, 9.f, 9.f});
  const te_scale_update update{history.tensor(), scale.tensor(), 448.f, 1, 0, 1};
  TE_ASSERT_OK(te_quantize_update_scales(&update, 1, nullptr));
  EXPECT_EQ(scale.read(), (std::vector<float>{2.f, 2.f, 2.f}));  // 448 / 97 / 2 = 2.3
  const std::vector<float> rolled = history.read();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const bool rests = c == 2;
      const float want = r == 0 ? 0.f : values[size_t((rests ? r : (r + 1) % rows) * cols + c)];
      ASSERT_EQ(rolled[size_t(r * cols + c)], want) << r << ", " << c;
    }
  }
  EXPECT_TRUE(history.padding_untouched());
}

te_tensor with(te_tensor t, const std::function<void(te_tensor&)>& change) {
  change(t);
  return t;
}

TEST_P(Quantize, BadArgumentsAreNamedAndNothingIsWritten) {
  Buffer<float> x(GetParam(), 4, 32), one(GetParam(), 1, 1), scales(GetParam(), 1, 4), pair(GetParam(), 1, 2);
  Buffer<uint8_t> row(GetParam(), 4, 32), col(GetParam(), 32, 16);
  const te_tensor tx = x.tensor(), data = row.tensor(TE_FLOAT8_E4M3);
  const te_tensor turned = with(col.tensor(TE_FLOAT8_E4M3), [](te_tensor& t) { t.cols = 4; });
  const te_quantized block{TE_SCALING_BLOCK_1D, data, kAbsent, scales.tensor(), kAbsent};
  const te_quantized tensor{TE_SCALING_TENSOR, data, kAbsent, pair.tensor(), kAbsent};
  const te_quantize_plan plain{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, 0, 0};
  const auto change = [](auto value, auto&& edit) {
    edit(value);
    return value;
  };
  struct Bad {
    const char* argument;
    te_quantize_plan plan;
    te_tensor x;
    te_quantized out;
  };
  using Q = te_quantized;
  using P = te_quantize_plan;
  const te_tensor half = with(one.tensor(), [](te_tensor& t) { t.dtype = TE_FLOAT16; });
  const Bad cases[] = {
      {"'x'", plain, with(tx, [](te_tensor& t) { t.dtype = TE_INT32; }), block},
      {"'x'", plain, with(tx, [](te_tensor& t) { t.data = nullptr; }), block},
      {"'out.rowwise'", plain, with(tx, [](te_tensor& t) { t.rows = 3; }), block},
      {"'out.rowwise'", plain, tx, change(block, [](Q& q) { q.rowwise.dtype = TE_UINT8; })},
      {"'out.rowwise'", plain, tx, change(block, [](Q& q) { q.rowwise.row_pitch = 40; })},
      {"'out.rowwise'", plain, tx,
       change(block, [](Q& q) { q.rowwise.data = static_cast<uint8_t*>(q.rowwise.data) + 8; })},
      {"'out.rowwise'", plain, tx,
       change(block, [](Q& q) { q.rowwise.device = q.rowwise.device == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU; })},
      {"'out.rowwise_scale_inv'", plain, tx, change(block, [](Q& q) { q.rowwise_scale_inv = kAbsent; })},
      {"'out.rowwise_scale_inv'", plain, tx, change(block, [](Q& q) { q.rowwise_scale_inv.cols = 3; })},
      {"'out.columnwise'", plain, tx,
       change(block,
              [&](Q& q) {
                q.columnwise = with(turned, [](te_tensor& t) { t.dtype = TE_FLOAT8_E5M2; });
                q.columnwise_scale_inv = with(scales.tensor(), [](te_tensor& t) { t.cols = 32, t.row_pitch = 32; });
              })},
      {"'plan'", plain, tx, tensor},
      {"'plan'", change(plain, [&](P& p) { p.scale = p.amax_parts = one.tensor(); }), tx, tensor},
      {"'plan'", change(plain, [&](P& p) { p.scale = one.tensor(); }), tx, block},
      {"'plan'", change(plain, [&](P& p) { p.amax = one.tensor(); }), tx, block},
      {"'plan.scale'", change(plain, [&](P& p) { p.scale = half; }), tx, tensor},
      {"'plan.amax'", change(plain, [&](P& p) { p.scale = one.tensor(), p.amax = pair.tensor(); }), tx, tensor},
      {"'plan.column_sums'", change(plain, [&](P& p) { p.column_sums = pair.tensor(); }), tx, block},
      {"'plan.noop'", change(plain, [&](P& p) { p.noop = pair.tensor(); }), tx, block},
      {"'plan.amax_epsilon'", change(plain, [](P& p) { p.amax_epsilon = -1; }), tx, block},
      {"'plan.amax_epsilon'", change(plain, [](P& p) { p.amax_epsilon = NAN; }), tx, block},
  };
  for (const Bad& bad : cases) {
    EXPECT_EQ(te_quantize(&bad.plan, bad.x, &bad.out, nullptr), TE_INVALID_ARGUMENT) << bad.argument;
    EXPECT_NE(std::string(te_last_error()).find(bad.argument), std::string::npos)
        << bad.argument << ": " << te_last_error();
    EXPECT_NE(std::string(te_last_error()).find("te_quantize"), std::string::npos) << te_last_error();
  }
  EXPECT_EQ(te_quantize_amax(tx, one.tensor(), kAbsent, nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_dequantize(&tensor, with(tx, [](te_tensor& t) { t.cols = 31; }), nullptr), TE_INVALID_ARGUMENT);
  EXPECT_EQ(te_quantize_transpose(data, data, nullptr), TE_INVALID_ARGUMENT);
  for (const te_scale_update& bad : {te_scale_update{tx, pair.tensor(), 448.f, 0, 0, 0},
                                     te_scale_update{one.tensor(), one.tensor(), 448.f, -1, 0, 0},
                                     te_scale_update{one.tensor(), one.tensor(), 0.f, 0, 0, 0}}) {
    EXPECT_EQ(te_quantize_update_scales(&bad, 1, nullptr), TE_INVALID_ARGUMENT);
  }
  for (const uint8_t byte : row.read()) EXPECT_EQ(byte, testing::kPoison) << "a refused call wrote";
  for (const float value : scales.read()) EXPECT_TRUE(std::isnan(value)) << "a refused call wrote";
}

}  // namespace
}  // namespace te
