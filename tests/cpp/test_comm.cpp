// The ordered sum through the C API, on every device here: bits of the same additions in the same order, every dtype
// and pitch, out in the place of a partial, poisoned outputs, errors.
#include "transformer_engine/comm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"

namespace te {
namespace {

using testing::Buffer;
using testing::kDtype;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};

struct Case {
  int32_t ranks;
  int64_t rows, cols, extra_pitch;
};

// 16-byte access and elementwise access on the GPU, more rows than a grid has, one rank, odd sizes, nothing.
const Case kCases[] = {{1, 3, 8, 0},    {2, 5, 64, 0},   {3, 7, 33, 3},   {4, 2, 4096, 8},
                       {8, 129, 40, 8}, {8, 3, 1000, 0}, {2, 1, 1, 0},    {5, 70000, 1, 0},
                       {4, 0, 16, 0},   {4, 16, 0, 0},   {128, 2, 24, 0}, {6, 300, 136, 0}};

template <class T>
std::vector<T> draw(int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(from_float<T>(normal(generator) * std::ldexp(1.f, int(i % 9) - 4)));
  return out;
}

template <class T>
uint32_t bits(T x) {
  uint32_t out = 0;
  std::memcpy(&out, &x, sizeof(T));
  return out;
}

template <class T>
void expect_bits(const std::vector<T>& got, const std::vector<T>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(bits(got[i]), bits(want[i])) << what << " at " << i;
}

class Comm : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(Devices, Comm, ::testing::ValuesIn(testing::devices()), testing::device_name);

template <class T>
void check_case(int32_t device, const Case& c, bool with_bias, int32_t in_place_of) {
  const std::string what = std::string(te_dtype_name(kDtype<T>)) + " ranks " + std::to_string(c.ranks) + " of " +
                           std::to_string(c.rows) + "x" + std::to_string(c.cols) + (with_bias ? " bias" : "") +
                           " in place of " + std::to_string(in_place_of);
  std::vector<std::unique_ptr<Buffer<T>>> buffers;
  std::vector<std::vector<T>> values;
  std::vector<te_tensor> partials;
  for (int32_t rank = 0; rank < c.ranks; ++rank) {
    buffers.push_back(std::make_unique<Buffer<T>>(device, c.rows, c.cols, c.cols + c.extra_pitch));
    values.push_back(draw<T>(c.rows * c.cols, unsigned(rank)));
    buffers.back()->fill(values.back());
    partials.push_back(buffers.back()->tensor());
  }
  Buffer<T> bias(device, 1, c.cols), own(device, c.rows, c.cols);
  const std::vector<T> added = draw<T>(c.cols, 77);
  bias.fill(added);
  Buffer<T>& out = in_place_of < 0 ? own : *buffers[size_t(in_place_of)];

  std::vector<T> want;
  for (int64_t i = 0; i < c.rows * c.cols; ++i) {
    float sum = to_float(values[0][size_t(i)]);
    for (int32_t rank = 1; rank < c.ranks; ++rank) sum += to_float(values[size_t(rank)][size_t(i)]);
    if (with_bias) sum += to_float(added[size_t(i % c.cols)]);
    want.push_back(from_float<T>(sum));
  }
  TE_ASSERT_OK(
      te_comm_ordered_sum(partials.data(), c.ranks, with_bias ? bias.tensor() : kAbsent, out.tensor(), nullptr));
  expect_bits(out.read(), want, what);
  EXPECT_TRUE(out.padding_untouched()) << what;
  for (int32_t rank = 0; rank < c.ranks; ++rank) {
    if (rank != in_place_of) expect_bits(buffers[size_t(rank)]->read(), values[size_t(rank)], what);
  }
}

template <class T>
void check_cases(int32_t device) {
  for (const Case& c : kCases) {
    for (const bool with_bias : {false, true}) {
      check_case<T>(device, c, with_bias, -1);
      check_case<T>(device, c, with_bias, c.ranks - 1);
    }
  }
}

TEST_P(Comm, AddsInTheOrderOfTheRanks) {
  check_cases<float>(GetParam());
  check_cases<fp16>(GetParam());
  check_cases<bf16>(GetParam());
}

// 1 + 2^-8 + 2^-8 is 1 + 2^-7 in bfloat16 where it is rounded once, and 1 where each step is.
TEST_P(Comm, RoundsOnce) {
  Buffer<bf16> one(GetParam(), 1, 1), small(GetParam(), 1, 1), out(GetParam(), 1, 1);
  one.fill(testing::rounded<bf16>({1}));
  small.fill(testing::rounded<bf16>({0x1p-8}));
  const te_tensor partials[] = {one.tensor(), small.tensor(), small.tensor()};
  TE_ASSERT_OK(te_comm_ordered_sum(partials, 3, kAbsent, out.tensor(), nullptr));
  EXPECT_EQ(testing::widened(out.read())[0], 1 + 0x1p-7);
  TE_ASSERT_OK(te_comm_ordered_sum(partials, 2, small.tensor(), out.tensor(), nullptr));
  EXPECT_EQ(testing::widened(out.read())[0], 1 + 0x1p-7);
}

TEST_P(Comm, OnePartialKeepsItsBits) {
  Buffer<float> x(GetParam(), 1, 4), out(GetParam(), 1, 4);
  x.fill({-0.f, 0.f, INFINITY, 1e-42f});
  const te_tensor partial = x.tensor();
  TE_ASSERT_OK(te_comm_ordered_sum(&partial, 1, kAbsent, out.tensor(), nullptr));
  expect_bits(out.read(), x.read(), "one partial");
}

// Shards [rows, m] of T at their pitches; `pad` columns after out's are zeros.
template <class T>
void check_interleave(int32_t device, int32_t ranks, int64_t rows, int64_t m, int64_t shard_pitch, int64_t pad) {
  const std::string what = std::to_string(ranks) + " shards of " + std::to_string(rows) + "x" + std::to_string(m) +
                           " pitch " + std::to_string(shard_pitch) + " pad " + std::to_string(pad);
  const int64_t cols = ranks * m, pitch = cols + pad;
  std::vector<std::unique_ptr<Buffer<T>>> buffers;
  std::vector<te_tensor> shards;
  std::vector<T> want(static_cast<size_t>(rows * pitch), T(0));
  for (int32_t rank = 0; rank < ranks; ++rank) {
    buffers.push_back(std::make_unique<Buffer<T>>(device, rows, m, shard_pitch));
    std::vector<T> values;
    for (int64_t i = 0; i < rows * m; ++i) values.push_back(T(1 + (i * 7 + rank * 31) % 251));
    buffers.back()->fill(values);
    shards.push_back(buffers.back()->tensor());
    for (int64_t i = 0; i < rows * m; ++i) want[size_t(i / m * pitch + rank * m + i % m)] = values[size_t(i)];
  }
  Buffer<T> out(device, rows, pitch);  // as wide as its pitch, so that the tail of each row is read too
  te_tensor target = out.tensor();
  target.cols = cols;
  TE_ASSERT_OK(te_comm_interleave(shards.data(), ranks, target, nullptr));
  if (cols != 0) {
    EXPECT_EQ(out.read(), want) << what;
  }
  EXPECT_TRUE(out.padding_untouched()) << what;
}

TEST_P(Comm, LaysShardsSideBySide) {
  for (const int32_t ranks : {1, 2, 3, 8}) {
    // 16-byte pieces, odd sizes, a shard's padding left out, one row, more rows than a grid has, nothing.
    check_interleave<uint8_t>(GetParam(), ranks, 40, 128, 128, 0);
    check_interleave<uint8_t>(GetParam(), ranks, 40, 48, 64, 16);
    check_interleave<uint8_t>(GetParam(), ranks, 7, 33, 48, 15);
    check_interleave<uint8_t>(GetParam(), ranks, 7, 16, 17, 0);
    check_interleave<uint8_t>(GetParam(), ranks, 1, 16, 16, 3);
    check_interleave<uint8_t>(GetParam(), ranks, 70000, 1, 1, 2);
    check_interleave<uint8_t>(GetParam(), ranks, 0, 16, 16, 0);
    check_interleave<uint8_t>(GetParam(), ranks, 16, 0, 16, 0);
    check_interleave<float>(GetParam(), ranks, 5, 32, 32, 4);
    check_interleave<float>(GetParam(), ranks, 5, 1, 4, 3);
    check_interleave<float>(GetParam(), ranks, 3, 6, 8, 1);
  }
}

TEST_P(Comm, InterleaveRefusesWhatDoesNotFit) {
  Buffer<uint8_t> x(GetParam(), 4, 16), out(GetParam(), 4, 32), odd(GetParam(), 4, 33);
  Buffer<bf16> wide(GetParam(), 4, 32);
  const auto refused = [&](std::vector<te_tensor> shards, int32_t count, te_tensor target, const std::string& word) {
    EXPECT_EQ(te_comm_interleave(shards.data(), count, target, nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find(word), std::string::npos) << te_last_error();
  };
  refused({x.tensor()}, 0, out.tensor(), "'count' is 0");
  refused({x.tensor(), x.tensor()}, 2, odd.tensor(), "'out' is [4, 33]");
  refused({x.tensor()}, 1, out.tensor(), "'shards[0]' is [4, 16], wanted [4, 32]");
  refused({x.tensor(), x.tensor()}, 2, wide.tensor(), "'out' is of dtype bfloat16");
  refused({x.tensor(), x.tensor(TE_FLOAT8_E4M3)}, 2, out.tensor(), "'shards[1]' is of dtype float8_e4m3");
  EXPECT_EQ(te_comm_interleave(nullptr, 2, out.tensor(), nullptr), TE_INVALID_ARGUMENT);
  for (const uint8_t value : out.read()) EXPECT_EQ(value, testing::kPoison) << "written in spite of the error";
}

TEST_P(Comm, SumRefusesWhatDoesNotFit) {
  Buffer<float> x(GetParam(), 2, 8), narrow(GetParam(), 2, 7), out(GetParam(), 2, 8), bias(GetParam(), 1, 7);
  Buffer<bf16> other(GetParam(), 2, 8);
  const auto refused = [&](std::vector<te_tensor> partials, int32_t count, te_tensor added, const std::string& word) {
    EXPECT_EQ(te_comm_ordered_sum(partials.data(), count, added, out.tensor(), nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find(word), std::string::npos) << te_last_error();
  };
  refused({x.tensor()}, 0, kAbsent, "'count' is 0");
  refused({x.tensor()}, TE_COMM_MOST_RANKS + 1, kAbsent, "'count' is 129");
  refused({x.tensor(), narrow.tensor()}, 2, kAbsent, "'partials[1]' is [2, 7], wanted [2, 8]");
  refused({x.tensor(), other.tensor()}, 2, kAbsent, "'partials[1]' is of dtype bfloat16");
  refused({x.tensor()}, 1, bias.tensor(), "'bias' is [1, 7], wanted [1, 8]");
  EXPECT_EQ(te_comm_ordered_sum(nullptr, 1, kAbsent, out.tensor(), nullptr), TE_INVALID_ARGUMENT);
  for (const float value : out.read()) EXPECT_TRUE(std::isnan(value)) << "written in spite of the error";
}

}  // namespace
}  // namespace te
