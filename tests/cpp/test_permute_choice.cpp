// The map of a router's choice through the C API, on every device here: against a plain sort, with the probabilities of
// rows and their gradient, dropped rows, probabilities of 0, errors.
#include "transformer_engine/permute.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "permute_case.h"

namespace te {
namespace {

using namespace testing;

class PermuteChoice : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(On, PermuteChoice, ::testing::ValuesIn(devices()), device_name);

// The map of a router's choice: rows of a token by their experts, probabilities of rows, and their gradient. Every
// third probability is 0.
template <class P>
void check_choice(int32_t device, const PermuteShape& s) {
  const int32_t first = int32_t(s.experts) / 3, last = int32_t(s.experts), topk = int32_t(s.topk);
  const std::vector<int32_t> given = choice_of(s, 5);
  std::vector<P> values = drawn<P>(s.tokens * s.experts, 6), gradients = drawn<P>(s.rows, 7);
  for (size_t i = 0; i < values.size(); i += 3) values[i] = from_float<P>(i % 2 ? 0.f : -0.f);
  Buffer<int32_t> ids(device, s.tokens, topk), row_of_pair(device, s.tokens, topk), token_of_row(device, 1, s.rows);
  Buffer<P> probs(device, s.tokens, s.experts, s.experts + 2), row_probs(device, 1, s.rows), drow(device, 1, s.rows);
  Buffer<P> dprobs(device, s.tokens, s.experts, s.experts + 1);
  ids.fill(given);
  probs.fill(values);
  drow.fill(gradients);
  spoil(row_of_pair);
  spoil(token_of_row);
  te_permute_row_map_plan plan{};
  plan.ids = ids.tensor(), plan.row_of_pair = row_of_pair.tensor(), plan.token_of_row = token_of_row.tensor();
  plan.rows = s.rows, plan.first_expert = first, plan.last_expert = last, plan.ascending = 1;
  plan.probs = probs.tensor(), plan.row_probs = row_probs.tensor();
  Buffer<int64_t> counts(device, 1, s.experts);
  Buffer<int32_t> cut(device, 1, 1);
  Buffer<float> factor(device, 1, 1);
  cut.fill({5});
  factor.fill({0.25f});
  plan.tokens_per_expert = counts.tensor(), plan.cut = reinterpret_cast<uint32_t*>(cut.data());
  plan.factor = factor.data(), plan.even = 8;
  Buffer<int32_t> outside(device, 1, 1);
  outside.fill({3});
  plan.outside = reinterpret_cast<uint32_t*>(outside.data());
  Buffer<float> zero(device, 1, 1);
  zero.fill({7.f});
  plan.zero = zero.data();
  TE_ASSERT_OK(te_permute_row_map(&plan, nullptr));
  TE_ASSERT_OK(
      te_permute_row_probs_backward(ids.tensor(), row_of_pair.tensor(), drow.tensor(), dprobs.tensor(), nullptr));
  std::vector<int32_t> tokens(size_t(s.rows), -1);
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(s.tokens));
  std::vector<float> of_rows(size_t(s.rows), 0.f), of_experts(values.size(), 0.f);
  std::vector<int64_t> of_each(size_t(s.experts), 0);
  int32_t row = 0, lost = 0;
  for (int32_t e = 0; e < last; ++e) {
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i] != e) continue;
      ++of_each[size_t(e)];
      const size_t token = i / size_t(topk), at = token * size_t(s.experts) + size_t(e);
      const bool has_row = e >= first && row < s.rows, alive = has_row && to_float(values[at]) != 0.f;
      if (has_row) of_rows[size_t(row)] = to_float(values[at]);
      if (alive) tokens[size_t(row)] = int32_t(token), of_experts[at] = to_float(gradients[size_t(row)]);
      rows[token].push_back(alive ? row : -1);
      row += has_row ? 1 : 0;
      lost += e >= first && !has_row ? 1 : 0;
    }
  }
  std::vector<int32_t> want;
  for (const auto& of_token : rows) want.insert(want.end(), of_token.begin(), of_token.end());
  EXPECT_EQ(token_of_row.read(), tokens) << name_of(s);
  EXPECT_EQ(row_of_pair.read(), want) << name_of(s);
  EXPECT_EQ(counts.read(), of_each) << name_of(s);
  EXPECT_EQ(cut.read()[0], 5 + lost) << name_of(s);
  EXPECT_EQ(outside.read()[0], 3 + int32_t(given.size()) - row - lost) << name_of(s);
  EXPECT_EQ(zero.read()[0], 0.f) << name_of(s);
  const float wanted = float(row + lost) / 8;
  EXPECT_EQ(factor.read()[0], lost > 0 && wanted > 0.25f ? wanted : 0.25f) << name_of(s);
  const auto floats = [](const std::vector<P>& read) {
    std::vector<float> all;
    for (const P& value : read) all.push_back(to_float(value));
    return all;
  };
  EXPECT_EQ(floats(row_probs.read()), of_rows) << name_of(s);
  EXPECT_EQ(floats(dprobs.read()), of_experts) << name_of(s);
  EXPECT_TRUE(row_of_pair.padding_untouched() && row_probs.padding_untouched() && dprobs.padding_untouched());
}

TEST_P(PermuteChoice, Maps) {
  for (const PermuteShape& s : kPermuteShapes) {
    check_choice<float>(GetParam(), s);
    check_choice<bf16>(GetParam(), s);
  }
}

TEST(PermuteChoiceContents, Errors) {
  constexpr int32_t kCpu = TE_DEVICE_CPU;
  Buffer<int32_t> ids(kCpu, 1, 2), pairs(kCpu, 1, 2), tokens(kCpu, 1, 2);
  ids.fill({3, 0});
  Buffer<float> probs(kCpu, 1, 3), rows(kCpu, 1, 2);
  te_permute_row_map_plan plan{};
  plan.ids = ids.tensor(), plan.row_of_pair = pairs.tensor(), plan.token_of_row = tokens.tensor();
  plan.rows = 2, plan.last_expert = 4, plan.probs = probs.tensor(), plan.row_probs = rows.tensor();
  expect_error(te_permute_row_map(&plan, nullptr), "te_permute_row_map", "plan.probs", "at least 4 columns");
  expect_error(te_permute_row_probs_backward(ids.tensor(), pairs.tensor(), tokens.tensor(), probs.tensor(), nullptr),
               "te_permute_row_probs_backward", "drow_probs", "float32");
}

}  // namespace
}  // namespace te
