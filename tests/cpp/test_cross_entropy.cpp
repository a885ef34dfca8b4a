// cross_entropy through the C API, on every device here: losses and gradients against a double oracle, odd sizes and
// pitches, shards merged by their statistics, factors, NaN and Inf, targets out of range, errors.
#include "transformer_engine/cross_entropy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device_buffer.h"

namespace te {
namespace {

using testing::Buffer;

constexpr double kInf = std::numeric_limits<double>::infinity();

template <class T>
constexpr double kHalfUnit = std::is_same_v<T, float>  ? 0x1p-24
                             : std::is_same_v<T, fp16> ? 0x1p-11
                                                       : 0x1p-8;
template <class T>
constexpr double kSmallest = std::is_same_v<T, fp16> ? 0x1p-25 : 0x1p-134;

struct Oracle {
  std::vector<double> loss, grad;
};

Oracle oracle(const std::vector<double>& x, const std::vector<int64_t>& target, int64_t cols, double smoothing,
              int64_t ignore, const std::vector<float>& scale) {
  Oracle out;
  for (size_t row = 0; row < target.size(); ++row) {
    const double* r = x.data() + row * size_t(cols);
    double top = -kInf, sum = 0, all = 0;
    for (int64_t j = 0; j < cols; ++j) top = std::max(top, r[j]);
    for (int64_t j = 0; j < cols; ++j) sum += std::exp(r[j] - top), all += smoothing == 0 ? 0 : r[j];
    const bool ignored = target[row] == ignore;
    const double lse = top + std::log(sum);
    out.loss.push_back(ignored ? 0 : lse - (1 - smoothing) * r[target[row]] - smoothing * all / double(cols));
    const double factor = scale.empty() ? 1 : scale[scale.size() == 1 ? 0 : row];
    for (int64_t j = 0; j < cols; ++j) {
      const double p = std::exp(r[j] - lse) - smoothing / double(cols) - (j == target[row] ? 1 - smoothing : 0);
      out.grad.push_back(ignored ? 0 : p * factor);
    }
  }
  return out;
}

// Logits within 20 of each other: an exponential has an error of |x - top| + 4 units at most on either device, a sum of
// cols of them, in partial sums of at most 512, no more than another 600; all of it relative to p <= 1, and the loss's
// logarithm turns it into an absolute one. The mean of x - top, of magnitude 20, has the sum's error.
constexpr double kArithmetic = 700 * 0x1p-24;

template <class T>
struct Problem {
  Problem(int32_t device, int64_t rows, int64_t cols, int64_t pitch = -1)
      : logits(device, rows, cols, pitch), target(device, 1, rows), loss(device, 1, rows) {
    std::mt19937_64 engine(11);
    std::uniform_real_distribution<double> value(-10, 10);
    std::vector<double> drawn;
    for (int64_t i = 0; i < rows * cols; ++i) drawn.push_back(value(engine));
    const std::vector<T> rounded = testing::rounded<T>(drawn);
    x = testing::widened(rounded);
    logits.fill(rounded);
    for (int64_t row = 0; row < rows; ++row) t.push_back(row % 5 == 3 ? -100 : int64_t(engine() % uint64_t(cols)));
    target.fill(t);
    plan.logits = logits.tensor();
    plan.target = target.tensor();
    plan.loss = loss.tensor();
    plan.ignore_idx = -100;
    plan.ranks = 1;
    plan.gradient = 1;
  }

  Buffer<T> logits;
  Buffer<int64_t> target;
  Buffer<float> loss;
  std::vector<double> x;
  std::vector<int64_t> t;
  te_cross_entropy_plan plan{};
};

void expect_near(const std::vector<double>& got, const std::vector<double>& want, double relative, double absolute,
                 const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], relative * std::abs(want[i]) + absolute) << what << " at " << i;
  }
}

class CrossEntropy : public ::testing::TestWithParam<int32_t> {};

// Single columns, less than a slot, odd, a slot of each type, more than one block of a cluster, and on the GPU two,
// four and eight of them.
const int64_t kColumns[] = {1, 3, 8, 17, 1000, 4099, 33000, 70001, 150000};

template <class T>
void loss_and_gradient(int32_t device) {
  for (const int64_t cols : kColumns) {
    const int64_t rows = cols > 10000 ? 3 : 7;
    for (const double smoothing : {0.0, 0.3}) {
      for (const int kind : {0, 1, 2}) {  // of scale: none, one, one a row
        Problem<T> p(device, rows, cols, kind == 1 ? cols + 5 : -1);
        std::vector<float> scale;
        for (int64_t i = 0; i < (kind == 0 ? 0 : kind == 1 ? 1 : rows); ++i) scale.push_back(0.5f + float(i));
        Buffer<float> factors(device, 1, std::max<int64_t>(1, int64_t(scale.size())));
        if (!scale.empty()) factors.fill(scale), p.plan.scale = factors.tensor();
        p.plan.label_smoothing = float(smoothing);
        TE_ASSERT_OK(te_cross_entropy_forward(&p.plan, nullptr));
        const Oracle want = oracle(p.x, p.t, cols, double(float(smoothing)), -100, scale);
        const std::string what = concat("cols ", cols, ", smoothing ", smoothing, ", scale ", kind);
        std::vector<double> loss = testing::widened(p.loss.read());
        expect_near(loss, want.loss, 8 * 0x1p-24, 40 * kArithmetic, "loss of " + what);
        expect_near(testing::widened(p.logits.read()), want.grad, kHalfUnit<T> * 1.01,
                    kArithmetic * double(rows) + kSmallest<T>, "gradient of " + what);
        EXPECT_TRUE(p.logits.padding_untouched()) << what;
        EXPECT_TRUE(p.loss.padding_untouched()) << what;
      }
    }
  }
}

TEST_P(CrossEntropy, LossAndGradient) {
  loss_and_gradient<float>(GetParam());
  loss_and_gradient<fp16>(GetParam());
  loss_and_gradient<bf16>(GetParam());
}

TEST_P(CrossEntropy, LossAloneLeavesLogits) {
  Problem<bf16> p(GetParam(), 6, 500);
  const auto before = testing::widened(p.logits.read());
  p.plan.gradient = 0;
  TE_ASSERT_OK(te_cross_entropy_forward(&p.plan, nullptr));
  EXPECT_EQ(testing::widened(p.logits.read()), before);
  const auto alone = p.loss.read();
  p.plan.gradient = 1;
  TE_ASSERT_OK(te_cross_entropy_forward(&p.plan, nullptr));
  EXPECT_EQ(p.loss.read(), alone);
}

// For any caller, and any place of its memory.
TEST_P(CrossEntropy, BitsOfARowAreItsOwn) {
  for (const int64_t cols : {1000, 20001, 70000}) {
    Problem<float> p(GetParam(), 5, cols), odd(GetParam(), 5, cols, cols + 3);
    for (auto* q : {&p, &odd}) {
      q->plan.label_smoothing = 0.125f;
      TE_ASSERT_OK(te_cross_entropy_forward(&q->plan, nullptr));
    }
    EXPECT_EQ(p.loss.read(), odd.loss.read());
    EXPECT_EQ(p.logits.read(), odd.logits.read());
    Problem<float> one(GetParam(), 5, cols);
    one.plan.label_smoothing = 0.125f;
    one.plan.logits.rows = 1;
    one.plan.target.cols = one.plan.loss.cols = 1;
    TE_ASSERT_OK(te_cross_entropy_forward(&one.plan, nullptr));
    const auto whole = p.logits.read(), first = one.logits.read();
    for (int64_t j = 0; j < cols; ++j) ASSERT_EQ(first[size_t(j)], whole[size_t(j)]) << j;
  }
}

void shards_make_the_whole(int32_t device, float smoothing) {
  constexpr int kRanks = 4;
  constexpr int64_t kRows = 6, kCols = 250;
  Problem<float> whole(device, kRows, kRanks * kCols);
  if (smoothing == 0.f) {  // one shard of a row has no possible class
    whole.t[2] = kCols;
    std::fill_n(whole.x.begin() + 2 * kRanks * kCols, kCols, -kInf);
  }
  const Oracle want = oracle(whole.x, whole.t, kRanks * kCols, double(smoothing), -100, {});
  Buffer<float> all(device, kRanks * kRows, 4);
  std::vector<std::unique_ptr<Problem<float>>> shards;
  for (int rank = 0; rank < kRanks; ++rank) {
    auto& p = *shards.emplace_back(std::make_unique<Problem<float>>(device, kRows, kCols));
    std::vector<float> part;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t j = 0; j < kCols; ++j) part.push_back(float(whole.x[size_t((row * kRanks + rank) * kCols + j)]));
    }
    p.logits.fill(part);
    p.target.fill(whole.t);
    p.plan.label_smoothing = smoothing;
    p.plan.ranks = kRanks;
    p.plan.rank = rank;
    te_tensor mine = all.tensor();
    mine.data = all.data() + rank * kRows * 4;
    mine.rows = kRows;
    TE_ASSERT_OK(te_cross_entropy_statistics(&p.plan, mine, nullptr));
  }
  std::vector<float> first;
  for (int rank = 0; rank < kRanks; ++rank) {
    Problem<float>& p = *shards[size_t(rank)];
    p.plan.statistics = all.tensor();
    TE_ASSERT_OK(te_cross_entropy_forward(&p.plan, nullptr));
    if (rank == 0) first = p.loss.read();
    EXPECT_EQ(p.loss.read(), first) << "every rank has the same loss, rank " << rank;
    const auto grad = testing::widened(p.logits.read());
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t j = 0; j < kCols; ++j) {
        ASSERT_NEAR(grad[size_t(row * kCols + j)], want.grad[size_t((row * kRanks + rank) * kCols + j)], kArithmetic);
      }
    }
  }
  expect_near(testing::widened(first), want.loss, 8 * 0x1p-24, 40 * kArithmetic, "loss");
}

TEST_P(CrossEntropy, ShardsMakeTheWhole) {
  for (const float smoothing : {0.f, 0.2f}) shards_make_the_whole(GetParam(), smoothing);
}

TEST_P(CrossEntropy, NanAndInf) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kFloatInf = std::numeric_limits<float>::infinity();
  constexpr int64_t kCols = 600;
  Problem<float> p(GetParam(), 6, kCols);
  std::vector<float> x(6 * kCols, 1.f);
  x[0 * kCols + 5] = kNan;
  x[1 * kCols + 7] = kFloatInf;
  for (int64_t j = 0; j < kCols; ++j) x[size_t(2 * kCols + j)] = -kFloatInf;
  for (int64_t j = 0; j < kCols - 2; ++j) x[size_t(3 * kCols + j)] = -kFloatInf;  // two classes are left
  x[4 * kCols + 9] = kNan;                                                        // ignored
  x[5 * kCols + 3] = -kFloatInf;                                                  // the target
  p.logits.fill(x);
  p.target.fill({1, 1, 1, kCols - 1, -100, 3});
  TE_ASSERT_OK(te_cross_entropy_forward(&p.plan, nullptr));
  const auto loss = p.loss.read(), grad = p.logits.read();
  for (const int64_t row : {0, 1, 2}) {
    EXPECT_TRUE(std::isnan(loss[size_t(row)])) << row;
    for (int64_t j = 0; j < kCols; ++j) ASSERT_TRUE(std::isnan(grad[size_t(row * kCols + j)])) << row << ", " << j;
  }
  EXPECT_NEAR(loss[3], std::log(2.0), 1e-6);
  EXPECT_EQ(grad[3 * kCols], 0.f);
  EXPECT_NEAR(grad[4 * kCols - 1], -0.5, 1e-6);
  EXPECT_EQ(loss[4], 0.f);
  for (int64_t j = 0; j < kCols; ++j) ASSERT_EQ(grad[size_t(4 * kCols + j)], 0.f);
  EXPECT_EQ(loss[5], kFloatInf);
  EXPECT_EQ(grad[5 * kCols + 3], -1.f);
}

TEST_P(CrossEntropy, TargetsOutOfRange) {
  Problem<float> p(GetParam(), 3, 50);
  p.target.fill({4, 50, -1});
  Buffer<float> inverse(GetParam(), 1, 1);
  if (GetParam() == TE_DEVICE_CPU) {
    const auto before = p.logits.read();
    EXPECT_EQ(te_cross_entropy_forward(&p.plan, nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find("50 in row 1, wanted 0 to 49"), std::string::npos) << te_last_error();
    EXPECT_EQ(p.logits.read(), before);
    EXPECT_EQ(te_cross_entropy_count(p.plan.target, 50, -100, inverse.tensor(), nullptr), TE_INVALID_ARGUMENT);
    return;
  }
  TE_ASSERT_OK(te_cross_entropy_forward(&p.plan, nullptr));
  const auto loss = p.loss.read(), grad = p.logits.read();
  EXPECT_FALSE(std::isnan(loss[0]) || std::isnan(grad[0]));
  for (const size_t row : {1, 2}) EXPECT_TRUE(std::isnan(loss[row]) && std::isnan(grad[row * 50 + 7])) << row;
}

TEST_P(CrossEntropy, CountAndMean) {
  Buffer<float> inverse(GetParam(), 1, 1), mean(GetParam(), 1, 1);
  for (const int64_t n : {0, 1, 5, 3000}) {
    Buffer<int64_t> target(GetParam(), 1, n);
    Buffer<float> loss(GetParam(), 1, n);
    std::vector<int64_t> t;
    std::vector<float> l;
    int64_t count = 0;
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      t.push_back(i % 3 == 1 ? 7 : 2);
      l.push_back(i % 3 == 1 ? 0.f : 0.25f * float(i % 11));
      count += t.back() != 7;
      sum += l.back();
    }
    if (n > 0) target.fill(t), loss.fill(l);
    TE_ASSERT_OK(te_cross_entropy_count(target.tensor(), 50, 7, inverse.tensor(), nullptr));
    TE_ASSERT_OK(te_cross_entropy_mean(loss.tensor(), inverse.tensor(), mean.tensor(), nullptr));
    EXPECT_EQ(inverse.read()[0], 1.f / float(count));
    if (count == 0) {
      EXPECT_TRUE(std::isnan(mean.read()[0]));
    } else {
      EXPECT_NEAR(mean.read()[0], sum / double(count), 1e-6 * sum / double(count));
    }
  }
}

TEST_P(CrossEntropy, BackwardTouchesOnlyOtherFactors) {
  constexpr int64_t kRows = 4, kCols = 333;
  Buffer<bf16> grad(GetParam(), kRows, kCols);
  Buffer<float> dloss(GetParam(), 1, kRows), scale(GetParam(), 1, 1);
  std::vector<bf16> before;
  for (int64_t i = 0; i < kRows * kCols; ++i) before.push_back(from_float<bf16>(float(i % 37) - 18.f));
  before[5] = bf16{0x7f81};  // a signalling NaN: a multiplication by 1 would make it quiet
  grad.fill(before);
  dloss.fill({1.f, 0.25f, 2.f, 1.f});
  scale.fill({1.f});
  TE_ASSERT_OK(te_cross_entropy_backward(grad.tensor(), dloss.tensor(), scale.tensor(), nullptr));
  const auto after = grad.read();
  const float factors[] = {1.f, 0.25f, 2.f, 1.f};
  EXPECT_EQ(after[5].bits, before[5].bits);
  for (size_t i = 6; i < after.size(); ++i) {
    ASSERT_EQ(to_float(after[i]), to_float(before[i]) * factors[i / size_t(kCols)]) << i;
  }
  scale.fill({0.5f});
  te_tensor one = dloss.tensor();
  one.cols = one.row_pitch = 1;
  TE_ASSERT_OK(te_cross_entropy_backward(grad.tensor(), one, scale.tensor(), nullptr));
  EXPECT_EQ(to_float(grad.read()[7]), to_float(after[7]) * 0.5f);
}

TEST_P(CrossEntropy, Errors) {
  const auto refused = [](te_cross_entropy_plan plan, const char* words) {
    EXPECT_EQ(te_cross_entropy_forward(&plan, nullptr), TE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(te_last_error()).find(words), std::string::npos) << te_last_error();
  };
  Problem<float> p(GetParam(), 3, 50);
  te_cross_entropy_plan plan = p.plan;
  plan.label_smoothing = 1.5f;
  refused(plan, "'plan.label_smoothing' is 1.5, wanted a number in [0, 1]");
  plan.label_smoothing = std::numeric_limits<float>::quiet_NaN();
  refused(plan, "'plan.label_smoothing'");
  plan = p.plan;
  plan.target.cols = 2;
  refused(plan, "'plan.target' is [1, 2], wanted [1, 3]");
  plan = p.plan;
  plan.target.dtype = TE_INT32;
  refused(plan, "'plan.target' is of dtype int32, wanted int64");
  plan = p.plan;
  plan.logits.dtype = TE_INT32;
  refused(plan, "'plan.logits' is of dtype int32");
  plan = p.plan;
  plan.ranks = 2;
  refused(plan, "'plan.statistics'");
  plan = p.plan;
  plan.rank = 1;
  refused(plan, "'plan.rank' is 1 of 1");
  plan = p.plan;
  plan.logits.cols = plan.logits.row_pitch = 0;
  refused(plan, "at least one column");
  plan = p.plan;
  plan.logits.rows = 0;
  plan.target.cols = plan.loss.cols = 0;
  TE_EXPECT_OK(te_cross_entropy_forward(&plan, nullptr));
}

INSTANTIATE_TEST_SUITE_P(Devices, CrossEntropy, ::testing::ValuesIn(testing::devices()), testing::device_name);

}  // namespace
}  // namespace te
