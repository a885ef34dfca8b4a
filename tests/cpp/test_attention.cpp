// attention through the C API, on every device here: the law of a sink and its gradient against a long double oracle,
// padding of NaN, pieces of packed sequences, zeros in padding, errors.
#include "transformer_engine/attention.h"

#include <functional>

#include "attention_case.h"

namespace te {
namespace {

using namespace testing;

class Attention : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, Attention, ::testing::ValuesIn(testing::devices()), testing::device_name);

TEST_P(Attention, ForwardAndBackward) {
  for (const AttentionShape& shape : kAttentionShapes) {
    for_attention_dtypes([&](auto t) {
      AttentionProblem<decltype(t)> p(GetParam(), shape);
      TE_ASSERT_OK(te_attention_forward(&p.plan, p.kernel_lse->tensor(), p.out->tensor(), p.lse->tensor(), nullptr));
      p.expect_forward();
      p.start_backward();
      p.out->fill(p.given);
      TE_ASSERT_OK(te_attention_backward(&p.plan, p.lse->tensor(), te_tensor{}, te_tensor{}, p.kernel_lse->tensor(),
                                         te_tensor{}, te_tensor{}, nullptr));
      p.expect_backward(false);
      if (!shape.sink) return;
      p.kernel_lse->poison();
      TE_ASSERT_OK(te_attention_backward(&p.plan, p.lse->tensor(), p.dout->tensor(), p.out->tensor(),
                                         p.kernel_lse->tensor(), p.dsink->tensor(), p.workspace->tensor(), nullptr));
      p.expect_backward(true);
    });
    if (HasFatalFailure()) return;
  }
}

// More tiles than parts.
TEST_P(Attention, ManyRows) {
  const AttentionShape shape{{9000, 1, 300}, 5, 70, 2, 16};
  AttentionProblem<bf16> p(GetParam(), shape);
  p.start_backward();
  for (int repeat = 0; repeat < 3; ++repeat) {
    const std::vector<float> before = p.dsink->read();
    TE_ASSERT_OK(te_attention_backward(&p.plan, p.lse->tensor(), p.dout->tensor(), p.out->tensor(),
                                       p.kernel_lse->tensor(), p.dsink->tensor(), p.workspace->tensor(), nullptr));
    p.expect_backward(true);
    if (repeat == 0) continue;
    EXPECT_EQ(std::memcmp(before.data(), p.dsink->read().data(), before.size() * sizeof(float)), 0);
  }
}

te_attention_rows rows_of(Buffer<int32_t>& lengths, Buffer<int32_t>* starts, int64_t rows) {
  return {rows, lengths.tensor(), starts == nullptr ? te_tensor{} : starts->tensor(), 0, 0};
}

TEST_P(Attention, Pieces) {
  Buffer<int32_t> lengths(GetParam(), 1, 4), starts(GetParam(), 1, 4), keys(GetParam(), 1, 4), begins(GetParam(), 1, 4);
  Buffer<int32_t> of_q(GetParam(), 1, 10), of_kv(GetParam(), 1, 10);
  lengths.fill({0, 3, 3, 5}), starts.fill({1, 6, 6, 9}), keys.fill({0, 4, 5, 8}), begins.fill({0, 5, 6, 10});
  const te_attention_rows q = rows_of(lengths, &starts, 9), kv = rows_of(keys, nullptr, 8);
  const te_attention_rows apart = rows_of(keys, &begins, 10);
  TE_ASSERT_OK(te_attention_sequences(&q, 3, &kv, 4, of_q.tensor(), of_kv.tensor(), nullptr));
  EXPECT_EQ(of_q.read(), (std::vector<int32_t>{1, 4, 6, 6, 6, 6, 6, 8, 9, 9}));
  EXPECT_EQ(of_kv.read(), (std::vector<int32_t>{0, 4, 4, 4, 5, 5, 5, 8, 8, 8}));
  TE_ASSERT_OK(te_attention_sequences(&q, 3, &apart, 4, of_q.tensor(), of_kv.tensor(), nullptr));
  EXPECT_EQ(of_kv.read(), (std::vector<int32_t>{0, 4, 4, 5, 6, 6, 6, 9, 9, 10}));
  EXPECT_TRUE(of_q.padding_untouched() && of_kv.padding_untouched());
  TE_EXPECT_OK(te_attention_sequences(&q, -1, nullptr, -1, te_tensor{}, te_tensor{}, nullptr));
}

TEST_P(Attention, ZeroPadding) {
  for (const int32_t gap : {0, 2}) {
    AttentionProblem<bf16> p(GetParam(), {{5, 0, 33, 1}, gap, 70, 2, 12, false, 0, 0, false, gap});
    AttentionProblem<float> keys(GetParam(), {{4, 1, 0, 2}, gap, 3, 1, 7, false});
    p.out->poison(), keys.out->poison();
    TE_ASSERT_OK(te_attention_zero_padding(&p.plan.queries, &keys.plan.queries, p.out->tensor(), te_tensor{},
                                           keys.out->tensor(), nullptr));
    expect_zero_padding(p), expect_zero_padding(keys);
  }
}

TEST_P(Attention, ZeroPaddingOfABatch) {
  constexpr int64_t kSeq = 37, kCols = 24;
  const std::vector<int32_t> sums{0, 5, 5, 42, 80};  // the last is longer than the sequence
  const int64_t sequences = int64_t(sums.size()) - 1;
  Buffer<int32_t> lengths(GetParam(), 1, sequences + 1);
  lengths.fill(sums);
  for (const bool batch_first : {false, true}) {
    Buffer<bf16> t(GetParam(), kSeq * sequences, kCols);
    t.poison();
    te_attention_rows rows = rows_of(lengths, nullptr, kSeq * sequences);
    rows.seq = kSeq, rows.batch_first = batch_first;
    TE_ASSERT_OK(te_attention_zero_padding(&rows, &rows, te_tensor{}, t.tensor(), te_tensor{}, nullptr));
    const auto values = t.read();
    for (int64_t i = 0; i < int64_t(values.size()); ++i) {
      const int64_t row = i / kCols, of = batch_first ? row / kSeq : row % sequences;
      const bool padding = (batch_first ? row % kSeq : row / sequences) >= sums[of + 1] - sums[of];
      ASSERT_TRUE(padding ? to_float(values[i]) == 0.f : std::isnan(to_float(values[i]))) << batch_first << " " << i;
    }
  }
}

void expect_refused(te_status status, const std::vector<std::string>& words) {
  EXPECT_EQ(status, TE_INVALID_ARGUMENT);
  const std::string error = te_last_error();
  for (const std::string& word : words) EXPECT_NE(error.find(word), std::string::npos) << word << ": " << error;
}

TEST(AttentionErrors, LengthsThatDoNotFit) {
  const auto check = [](std::vector<int32_t> values, std::vector<int32_t> begins, int64_t longest,
                        const std::vector<std::string>& words) {
    Buffer<int32_t> lengths(TE_DEVICE_CPU, 1, int64_t(values.size())), starts(TE_DEVICE_CPU, 1, int64_t(begins.size()));
    lengths.fill(values), starts.fill(begins);
    const te_attention_rows side = rows_of(lengths, begins.empty() ? nullptr : &starts, 7);
    expect_refused(te_attention_sequences(&side, longest, nullptr, -1, te_tensor{}, te_tensor{}, nullptr), words);
  };
  check({1, 4, 7}, {}, -1, {"'cu_seqlens_q'", "[1, 4, 7]"});
  check({0, 4, 3}, {}, -1, {"'cu_seqlens_q'", "[0, 4, 3]", "7 tokens"});
  check({0, 4, 8}, {}, -1, {"'cu_seqlens_q'", "[0, 4, 8]", "7 tokens"});
  check({1}, {}, -1, {"'cu_seqlens_q'", "[1]"});
  check({0, 4, 7}, {0, 3, 7}, -1, {"'cu_seqlens_q_padded'", "[0, 3, 7]", "room"});
  check({0, 4, 6}, {-1, 4, 7}, -1, {"'cu_seqlens_q_padded'", "-1"});
  check({0, 2, 4}, {0, 4, 8}, -1, {"'cu_seqlens_q_padded'", "7 rows"});
  check({0, 4, 6}, {}, 3, {"'max_seqlen_q'", "3", "longest sequence"});
  check({0, 2147483647, -2147483647}, {}, -1, {"'cu_seqlens_q'"});
}

TEST(AttentionErrors, Tensors) {
  AttentionProblem<float> p(TE_DEVICE_CPU, {{3, 4}, 1, 0, 2, 8});
  const auto forward = [&](const te_attention_plan& plan, te_tensor kernel_lse, te_tensor out, te_tensor lse) {
    return te_attention_forward(&plan, kernel_lse, out, lse, nullptr);
  };
  const te_tensor kernel_lse = p.kernel_lse->tensor(), out = p.out->tensor(), lse = p.lse->tensor();
  te_tensor wrong = lse;
  wrong.dtype = TE_BFLOAT16;
  expect_refused(forward(p.plan, kernel_lse, out, wrong), {"te_attention_forward", "'lse'", "bfloat16", "float32"});
  wrong = out, wrong.cols = 15;
  expect_refused(forward(p.plan, kernel_lse, wrong, lse), {"'out'", "[9, 15]", "a multiple of 2"});
  wrong.cols = 0;
  expect_refused(forward(p.plan, kernel_lse, wrong, lse), {"'out'", "[9, 0]", "a multiple of 2 above 0"});
  expect_refused(forward(p.plan, lse, out, lse), {"'kernel_lse'", "[9, 2]", "[2, 9]"});
  te_attention_plan plan = p.plan;
  plan.batch = 3;
  expect_refused(forward(plan, kernel_lse, out, lse), {"'plan.batch'", "3", "1 with lengths"});
  plan = p.plan, plan.sink.cols = 1;
  expect_refused(forward(plan, kernel_lse, out, lse), {"'plan.sink'", "[1, 1]", "[1, 2]"});
  plan = p.plan, plan.queries.starts.cols = 2;
  expect_refused(forward(plan, kernel_lse, out, lse), {"'plan.queries.starts'", "[1, 2]", "[1, 3]"});
  plan = p.plan, plan.queries.lengths.dtype = TE_INT64;
  expect_refused(forward(plan, kernel_lse, out, lse), {"'plan.queries.lengths'", "int64", "int32"});
  wrong = p.dout->tensor(), wrong.rows = 8;
  expect_refused(te_attention_backward(&p.plan, lse, wrong, out, kernel_lse, p.dsink->tensor(), te_tensor{}, nullptr),
                 {"te_attention_backward", "'dout'", "[8, 16]", "[9, 16]"});
  wrong = out, wrong.rows = 8;
  expect_refused(te_attention_zero_padding(&p.plan.queries, &p.plan.queries, wrong, te_tensor{}, te_tensor{}, nullptr),
                 {"te_attention_zero_padding", "'dq'", "[8, 16]"});
  te_attention_rows batch = p.plan.queries;
  batch.starts = te_tensor{}, batch.seq = 5;
  expect_refused(te_attention_zero_padding(&batch, &p.plan.queries, out, te_tensor{}, te_tensor{}, nullptr),
                 {"te_attention_zero_padding", "'queries.rows'", "9", "each of 5"});
  expect_refused(te_attention_sequences(&batch, -1, nullptr, -1, te_tensor{}, te_tensor{}, nullptr),
                 {"te_attention_sequences", "'queries.seq'", "5"});
  expect_refused(te_attention_sequences(&p.plan.queries, -1, nullptr, -1, lse, lse, nullptr), {"'pieces_kv'"});
  expect_refused(te_attention_sequences(nullptr, -1, nullptr, -1, te_tensor{}, te_tensor{}, nullptr), {"'queries'"});
}

}  // namespace
}  // namespace te
