// quantize, lists of ranges and of transposes through the C API, on every device here: each matrix of a list gets what
// a call of its own writes, amaxes are raised and not replaced, lists longer than a launch, repeats, refusals that
// write nothing.
#include "quantize_range_case.h"

namespace te {
namespace {

using namespace testing;

class QuantizeRangeList : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, QuantizeRangeList, ::testing::ValuesIn(testing::devices()), testing::device_name);

constexpr int32_t kCounts[] = {1, 2, 7, TE_QUANTIZE_ITEMS, TE_QUANTIZE_ITEMS + 1, 3 * TE_QUANTIZE_ITEMS};

void run(const te_quantize_range_list_problem& problem) {
  TE_ASSERT_OK(te_quantize_range_list_amaxes(&problem, nullptr));
  TE_ASSERT_OK(te_quantize_range_list_cast(&problem, nullptr));
}

TEST_P(QuantizeRangeList, EachRangeAsAlone) {
  unsigned seed = 0;
  for (const int32_t count : kCounts) {
    for (int draw = 0; draw < 4; ++draw) {
      RangeListCase c(GetParam(), count, ++seed);
      c.quantize_each();
      run(c.problem);
      if (!HasFatalFailure()) c.expect("seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  }
}

// The second time amaxes have been raised already, and an amax is the larger of itself and these.
TEST_P(QuantizeRangeList, TwiceIsOnce) {
  RangeListCase c(GetParam(), 50, 99);
  c.quantize_each();
  for (int i = 0; i < 3; ++i) run(c.problem);
  c.expect("again");
}

TEST_P(QuantizeRangeList, EachTransposeAsAlone) {
  unsigned seed = 0;
  for (const int32_t count : kCounts) {
    for (int draw = 0; draw < 4; ++draw) {
      TransposeListCase c(GetParam(), count, ++seed);
      TE_ASSERT_OK(te_quantize_transpose_list(&c.problem, nullptr));
      c.expect("seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(QuantizeRangeList, NothingAtAll) {
  const te_quantize_range_list_problem ranges{};
  const te_quantize_transpose_list_problem transposes{};
  TE_EXPECT_OK(te_quantize_range_list_amaxes(&ranges, nullptr));
  TE_EXPECT_OK(te_quantize_range_list_cast(&ranges, nullptr));
  TE_EXPECT_OK(te_quantize_transpose_list(&transposes, nullptr));
}

void expect_refused(te_status status, const std::string& message) {
  const std::string said = te_last_error();
  EXPECT_EQ(status, TE_INVALID_ARGUMENT) << message;
  EXPECT_NE(said.find(message), std::string::npos) << said;
}

TEST_P(QuantizeRangeList, RefusedRangesWriteNothing) {
  const int32_t device = GetParam(), other = device == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU;
  Buffer<float> x(device, 1, 200 * 40), amaxes(device, 2, 1), scales(device, 2, 4), one(device, 1, 1);
  Buffer<uint8_t> data(device, 200, 40);
  const te_quantize_range good{200, 40, 0, x.tensor(), TE_BFLOAT16};
  const te_quantize_range_plan plan{TE_SCALING_BLOCK_2D, kAbsent, amaxes.tensor(), kAbsent, 0, 0};
  std::vector<te_quantize_range> ranges;
  std::vector<te_quantize_range_plan> plans;
  std::vector<te_tensor> bytes, inverses;
  const auto list = [&](auto change) {
    ranges.assign(3, good);
    plans.assign(3, plan);
    bytes.assign(3, data.tensor(TE_FLOAT8_E4M3));
    inverses.assign(3, scales.tensor());
    te_quantize_range_list_problem problem{3, ranges.data(), plans.data(), bytes.data(), inverses.data()};
    change(problem);
    return problem;
  };
  const auto amaxes_of = [&](auto change) {
    const auto problem = list(change);
    return te_quantize_range_list_amaxes(&problem, nullptr);
  };
  const auto cast = [&](auto change) {
    const auto problem = list(change);
    return te_quantize_range_list_cast(&problem, nullptr);
  };
  expect_refused(amaxes_of([](auto& p) { p.count = -1; }), "argument 'count' is -1, wanted a number >= 0");
  expect_refused(cast([](auto& p) { p.count = -1; }), "te_quantize_range_list_cast: argument 'count' is -1");
  expect_refused(amaxes_of([](auto& p) { p.plans = nullptr; }), "argument 'list' is one with an array that is NULL");
  expect_refused(cast([](auto& p) { p.data = nullptr; }), "argument 'list' is one with an array that is NULL");
  expect_refused(amaxes_of([&](auto&) { ranges[2].start = 1; }), "It is item 2 of the list.");
  expect_refused(amaxes_of([&](auto&) { plans[1].amaxes = one.tensor(); }), "'plan.amaxes' is [1, 1], wanted [2, 1]");
  expect_refused(cast([&](auto&) { plans[1].amaxes = kAbsent; }), "'plan.amaxes' is [0, 0], wanted [2, 1]");
  expect_refused(cast([&](auto&) { bytes[2].dtype = TE_UINT8; }), "It is item 2 of the list.");
  expect_refused(cast([&](auto&) { inverses[1].cols = 2; }), "It is item 1 of the list.");
  const auto elsewhere = [&](auto&) {
    for (te_tensor* t : {&ranges[1].x, &plans[1].amaxes, &bytes[1], &inverses[1]}) t->device = other;
  };
  expect_refused(amaxes_of(elsewhere), "argument 'range.x' is on ");
  expect_refused(cast(elsewhere), "as the first one. It is item 1 of the list.");
  for (const uint8_t byte : data.read()) ASSERT_EQ(byte, kPoison);
  for (const float value : scales.read()) ASSERT_TRUE(std::isnan(value));
  for (const float value : amaxes.read()) ASSERT_TRUE(std::isnan(value));
}

TEST_P(QuantizeRangeList, RefusedTransposesWriteNothing) {
  const int32_t device = GetParam(), other = device == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU;
  Buffer<uint8_t> rows(device, 200, 40), columns(device, 40, 200, 208);
  Buffer<float> scales(device, 2, 1), column_scales(device, 1, 2);
  std::vector<te_tensor> from, to, of_rows, of_columns;
  const auto refuse = [&](const char* message, auto change) {
    from.assign(2, rows.tensor());
    to.assign(2, columns.tensor());
    of_rows.assign(2, scales.tensor());
    of_columns.assign(2, column_scales.tensor());
    te_quantize_transpose_list_problem list{2, from.data(), to.data(), of_rows.data(), of_columns.data()};
    change(list);
    expect_refused(te_quantize_transpose_list(&list, nullptr), message);
  };
  refuse("argument 'count' is -3", [](auto& list) { list.count = -3; });
  refuse("argument 'list' is one with an array that is NULL", [](auto& list) { list.scales = nullptr; });
  refuse("argument 'columnwise' is [40, 199], wanted [40, 200]", [&](auto&) { to[1].cols = 199; });
  refuse("argument 'columnwise' is of row pitch 204", [&](auto&) { to[1].row_pitch = 204; });
  refuse("argument 'rowwise' is of dtype float32", [&](auto&) { from[0].dtype = TE_FLOAT32; });
  refuse("argument 'scales' is [1, 1], wanted [2, 1]", [&](auto&) { of_rows[1].rows = 1; });
  refuse("argument 'scales' is [0, 0], wanted [2, 1]", [&](auto&) { of_rows[1] = kAbsent; });
  refuse("argument 'column_scales' is [0, 0], wanted [1, 2]. It is item 1", [&](auto&) { of_columns[1] = kAbsent; });
  refuse("argument 'rowwise' is on ", [&](auto&) {
    for (te_tensor* t : {&from[1], &to[1], &of_rows[1], &of_columns[1]}) t->device = other;
  });
  for (const uint8_t byte : columns.read()) ASSERT_EQ(byte, kPoison);
  for (const float value : column_scales.read()) ASSERT_TRUE(std::isnan(value));
}

}  // namespace
}  // namespace te
