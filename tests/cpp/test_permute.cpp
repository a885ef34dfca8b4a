// permute through the C API, on every device here: maps against a plain sort, moves and sums against loops in double,
// odd sizes and pitches, poisoned outputs, dropped rows, errors.
#include "transformer_engine/permute.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "permute_case.h"

namespace te {
namespace {

using namespace testing;

class Permute : public ::testing::TestWithParam<int32_t> {};
INSTANTIATE_TEST_SUITE_P(On, Permute, ::testing::ValuesIn(devices()), device_name);

template <class T>
constexpr double kHalfUnit = std::is_same_v<T, float>  ? 0x1p-24
                             : std::is_same_v<T, fp16> ? 0x1p-11
                                                       : 0x1p-8;
template <class T>
constexpr double kSmallest = std::is_same_v<T, fp16> ? 0x1p-25 : 0x1p-134;

struct Pair {
  int64_t token, column, row;  // column: of the probabilities
};

// From the routing, without the maps of the engine.
std::vector<Pair> pairs_of(const PermuteShape& s, bool of_mask, unsigned seed) {
  std::vector<Pair> pairs;
  const std::vector<uint8_t> mask = of_mask ? mask_of(s, seed) : std::vector<uint8_t>{};
  const std::vector<int32_t> ids = of_mask ? std::vector<int32_t>{} : ids_of(s, seed);
  int64_t row = 0, pad = 0;
  for (int64_t e = 0; e < s.experts; ++e) {
    if (e > 0 && s.pads && of_mask) pad += (e + seed) % 3;
    for (int64_t t = 0; t < s.tokens; ++t) {
      if (of_mask && mask[size_t(t * s.experts + e)]) pairs.push_back({t, e, row++ + pad});
      for (int64_t i = 0; i < (of_mask ? 0 : s.topk); ++i) {
        if (ids[size_t(t * s.topk + i)] == e) pairs.push_back({t, i, row++});
      }
    }
  }
  std::erase_if(pairs, [&](const Pair& p) { return p.row >= s.rows; });
  return pairs;
}

TEST_P(Permute, MapsOfMasks) {
  unsigned seed = 0;
  for (const PermuteShape& s : kPermuteShapes) {
    ++seed;
    const PermuteCase<float, float> c(GetParam(), s, true, seed);
    PermuteShape whole = s;
    whole.rows = INT64_MAX;
    whole.pads = false;
    std::vector<std::vector<Pair>> of_token(size_t(s.tokens));
    for (const Pair& p : pairs_of(whole, true, seed)) of_token[size_t(p.token)].push_back(p);
    const std::vector<int32_t> map = c.map.read();
    for (int64_t t = 0; t < s.tokens; ++t) {
      const auto& pairs = of_token[size_t(t)];
      const int32_t* const row = map.data() + t * (2 * s.experts + 1);
      ASSERT_EQ(row[2 * s.experts], int32_t(pairs.size())) << name_of(s);
      for (int64_t i = 0; i < s.experts; ++i) {
        const bool there = i < int64_t(pairs.size());
        ASSERT_EQ(row[i], there ? pairs[size_t(i)].row : -1) << name_of(s) << " token " << t;
        ASSERT_EQ(row[s.experts + i], there ? pairs[size_t(i)].column : -1) << name_of(s) << " token " << t;
      }
    }
    EXPECT_TRUE(c.map.padding_untouched());
  }
}

TEST_P(Permute, MapsOfIds) {
  for (const PermuteShape& s : kPermuteShapes) {
    const int32_t first = int32_t(s.experts) / 3, last = int32_t(s.experts);
    const std::vector<int32_t> given = ids_of(s, 5);
    Buffer<int32_t> ids(GetParam(), s.tokens, s.topk), row_of_pair(GetParam(), s.tokens, s.topk);
    Buffer<int32_t> token_of_row(GetParam(), 1, s.rows), offsets(GetParam(), 1, last - first + 1);
    Buffer<int32_t> panels(GetParam(), 1, 1);
    ids.fill(given);
    spoil(row_of_pair);
    spoil(token_of_row);
    const te_permute_row_map_plan plan{ids.tensor(),
                                       row_of_pair.tensor(),
                                       token_of_row.tensor(),
                                       offsets.tensor(),
                                       panels.tensor(),
                                       s.rows,
                                       first,
                                       last,
                                       0,
                                       0,
                                       {},
                                       {},
                                       {},
                                       nullptr,
                                       nullptr,
                                       0,
                                       nullptr,
                                       nullptr};
    TE_ASSERT_OK(te_permute_row_map(&plan, nullptr));
    std::vector<int32_t> tokens(size_t(s.rows), -1), rows(given.size(), -1), begins{0};
    int32_t row = 0, sum = 0;
    for (int32_t e = first; e < last; ++e) {
      for (size_t i = 0; i < given.size(); ++i) {
        if (given[i] != e || row == s.rows) continue;
        tokens[size_t(row)] = int32_t(i) / int32_t(s.topk);
        rows[i] = row++;
      }
      sum += (row - begins.back() + 127) / 128;
      begins.push_back(row);
    }
    EXPECT_EQ(token_of_row.read(), tokens) << name_of(s);
    EXPECT_EQ(row_of_pair.read(), rows) << name_of(s);
    EXPECT_EQ(offsets.read(), begins) << name_of(s);
    EXPECT_EQ(panels.read()[0], sum) << name_of(s);
    EXPECT_TRUE(token_of_row.padding_untouched() && row_of_pair.padding_untouched());
  }
}

template <class T, class P>
void check_forward(int32_t device, const PermuteShape& s, bool of_mask, unsigned seed) {
  const PermuteCase<T, P> c(device, s, of_mask, seed);
  Forwarded<T, P> f(c, of_mask, true);
  TE_ASSERT_OK(te_permute_forward(&f.plan, nullptr));
  const std::vector<T> tokens = c.tokens.read(), out = f.out.read();
  const std::vector<P> probs = c.probs.read(), out_probs = f.probs.read();
  const std::vector<float> scales = c.scales.read(), out_scales = f.scales.read();
  std::vector<double> want(size_t(s.rows * s.hidden), 0), want_probs(size_t(s.rows), 0);
  const int64_t columns = (s.rows + 3) / 4 * 4;
  std::vector<float> want_scales(size_t(3 * columns), 0.f);
  for (int64_t b = 0; b < 3; ++b) std::fill_n(want_scales.begin() + b * columns, s.rows, 1.f);
  for (const Pair& p : pairs_of(s, of_mask, seed)) {
    const double prob = of_mask ? double(to_float(probs[size_t(p.token * c.columns + p.column)])) : 1.0;
    want_probs[size_t(p.row)] = prob;
    if (prob == 0) continue;
    for (int64_t h = 0; h < s.hidden; ++h) {
      want[size_t(p.row * s.hidden + h)] = double(to_float(tokens[size_t(p.token * s.hidden + h)]));
    }
    for (int64_t b = 0; b < 3; ++b) {
      want_scales[size_t(b * columns + p.row)] = scales[size_t(b * (s.tokens + 4) + p.token)];
    }
  }
  EXPECT_EQ(widened(out), want) << name_of(s);
  EXPECT_TRUE(!of_mask || widened(out_probs) == want_probs) << name_of(s);
  EXPECT_EQ(out_scales, want_scales) << name_of(s);
  EXPECT_TRUE(f.out.padding_untouched() && f.probs.padding_untouched() && f.scales.padding_untouched()) << name_of(s);
}

TEST_P(Permute, Forward) {
  unsigned seed = 30;
  for (const PermuteShape& s : kPermuteShapes) {
    ++seed;
    check_forward<float, bf16>(GetParam(), s, true, seed);
    check_forward<bf16, float>(GetParam(), s, true, seed);
    check_forward<fp16, float>(GetParam(), s, false, seed);
  }
}

// A float32 sum of n fused products has an error of n units of the sum of their magnitudes; then one rounding to T.
template <class T>
double bound_of(double value, double magnitude, int64_t n) {
  const double sum = double(n + 1) * 0x1p-24 * std::abs(magnitude);
  return sum + kHalfUnit<T> * (std::abs(value) + sum) + kSmallest<T>;
}

template <class T, class P>
void check_sums(int32_t device, const PermuteShape& s, bool of_mask, unsigned seed) {
  const PermuteCase<T, P> c(device, s, of_mask, seed);
  const int64_t h = s.hidden, pitch = s.hidden + s.pitch;
  Buffer<T> out(device, s.tokens, h, pitch), dinp(device, s.rows, h, pitch);
  Buffer<P> dprobs(device, s.tokens, c.columns, c.columns + 2);
  const te_permute_unpermute_plan plan{c.map_of(), c.rows.tensor(), c.probs.tensor(), c.row_probs.tensor(),
                                       out.tensor()};
  TE_ASSERT_OK(te_permute_unpermute(&plan, nullptr));
  const te_permute_unpermute_backward_plan back{plan.map,      c.tokens.tensor(), c.rows.tensor(),   plan.probs,
                                                dinp.tensor(), dprobs.tensor(),   c.covered.tensor()};
  TE_ASSERT_OK(te_permute_unpermute_backward(&back, nullptr));
  const std::vector<double> rows = widened(c.rows.read()), grad = widened(c.tokens.read());
  const std::vector<double> probs = widened(c.probs.read()), row_probs = widened(c.row_probs.read());
  std::vector<double> sum(size_t(s.tokens * h), 0), sizes = sum, want_dinp(size_t(s.rows * h), 0);
  std::vector<double> want_dprobs(probs.size(), 0), dprob_sizes(probs.size(), 0);
  for (const Pair& p : pairs_of(s, of_mask, seed)) {
    const size_t at = size_t(p.token * c.columns + p.column);
    for (int64_t j = 0; j < h; ++j) {
      const size_t row = size_t(p.row * h + j), token = size_t(p.token * h + j);
      if (row_probs[size_t(p.row)] != 0)
        sum[token] += probs[at] * rows[row], sizes[token] += std::abs(probs[at] * rows[row]);
      want_dinp[row] = probs[at] * grad[token];
      want_dprobs[at] += rows[row] * grad[token];
      dprob_sizes[at] += std::abs(rows[row] * grad[token]);
    }
  }
  const auto expect_near = [&](const auto& got, const std::vector<double>& want, const std::vector<double>& size,
                               int64_t n, auto t, const char* what) {
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], bound_of<decltype(t)>(want[i], size[i], n))
          << what << " " << i << ", " << name_of(s);
    }
  };
  expect_near(widened(out.read()), sum, sizes, s.experts, T{}, "token");
  expect_near(widened(dinp.read()), want_dinp, want_dinp, 0, T{}, "row");
  expect_near(widened(dprobs.read()), want_dprobs, dprob_sizes, h + 8, P{}, "probability");
  EXPECT_TRUE(out.padding_untouched() && dinp.padding_untouched() && dprobs.padding_untouched()) << name_of(s);
}

TEST_P(Permute, SumsAndTheirGradients) {
  unsigned seed = 60;
  for (const PermuteShape& s : kPermuteShapes) {
    ++seed;
    check_sums<float, float>(GetParam(), s, true, seed);
    check_sums<bf16, float>(GetParam(), s, true, seed);
    check_sums<fp16, bf16>(GetParam(), s, false, seed);
    if (HasFatalFailure()) return;
  }
}

// A token without rows is 0; a sum of one term has its bits.
TEST_P(Permute, SignsOfZero) {
  const PermuteShape s{3, 1, 1, 2, 2};
  PermuteCase<float, float> c(GetParam(), s, false, 1);
  c.map.fill({1, -1, 0});
  c.rows.fill({0.f, 2.f, -0.f, 3.f});
  Buffer<float> out(GetParam(), 3, 2);
  const te_permute_unpermute_plan plan{c.map_of(), c.rows.tensor(), {}, {}, out.tensor()};
  TE_ASSERT_OK(te_permute_unpermute(&plan, nullptr));
  const std::vector<float> got = out.read();
  EXPECT_EQ(got, (std::vector<float>{0, 3, 0, 0, 0, 2}));
  EXPECT_TRUE(std::signbit(got[0]) && !std::signbit(got[2]) && !std::signbit(got[4]));
}

TEST_P(Permute, GradientsOfProbabilities) {
  for (const PermuteShape& s : kPermuteShapes) {
    const PermuteCase<bf16, fp16> c(GetParam(), s, true, 3);
    Buffer<fp16> out(GetParam(), s.tokens, s.experts, s.experts + 5);
    const te_permute_map map = c.map_of();
    TE_ASSERT_OK(te_permute_probs_backward(&map, c.row_probs.tensor(), out.tensor(), nullptr));
    const std::vector<double> given = widened(c.row_probs.read());
    std::vector<double> want(size_t(s.tokens * s.experts), 0);
    for (const Pair& p : pairs_of(s, true, 3)) want[size_t(p.token * s.experts + p.column)] = given[size_t(p.row)];
    EXPECT_EQ(widened(out.read()), want) << name_of(s);
    EXPECT_TRUE(out.padding_untouched());
  }
}

TEST_P(Permute, ChunksAndGather) {
  const std::vector<int64_t> sizes{3, 0, 5, 2}, order{2, 0, 3, 1};
  Buffer<int64_t> s(GetParam(), 1, 4), o(GetParam(), 1, 4), starts(GetParam(), 3, 5);
  Buffer<int32_t> source(GetParam(), 1, 12), destination(GetParam(), 1, 12);
  s.fill(sizes);
  o.fill(order);
  TE_ASSERT_OK(te_permute_chunk_map(s.tensor(), o.tensor(), source.tensor(), destination.tensor(), starts.tensor(),
                                    nullptr, nullptr));
  EXPECT_EQ(source.read(), (std::vector<int32_t>{3, 4, 5, 6, 7, 0, 1, 2, 8, 9, 10, 11}));
  EXPECT_EQ(destination.read(), (std::vector<int32_t>{5, 6, 7, 0, 1, 2, 3, 4, 8, 9, 10, 11}));
  for (const int64_t cols : {1, 8, 37}) {
    Buffer<bf16> inp(GetParam(), 12, cols, cols + 3), out(GetParam(), 12, cols, cols + 1);
    Buffer<bf16> back(GetParam(), 12, cols);
    const std::vector<bf16> given = drawn<bf16>(12 * cols, 1);
    inp.fill(given);
    TE_ASSERT_OK(te_permute_gather(inp.tensor(), source.tensor(), out.tensor(), nullptr));
    TE_ASSERT_OK(te_permute_gather(out.tensor(), destination.tensor(), back.tensor(), nullptr));
    EXPECT_EQ(widened(back.read()), widened(given));
    EXPECT_EQ(to_float(out.read()[size_t(5 * cols)]), to_float(given[0]));
    EXPECT_TRUE(out.padding_untouched());
  }
  Buffer<float> inp(GetParam(), 2, 3), out(GetParam(), 4, 3);
  Buffer<int32_t> from(GetParam(), 1, 4);
  inp.fill({1, 2, 3, 4, 5, 6});
  from.fill({1, -1, 2, 0});
  TE_ASSERT_OK(te_permute_gather(inp.tensor(), from.tensor(), out.tensor(), nullptr));
  EXPECT_EQ(out.read(), (std::vector<float>{4, 5, 6, 0, 0, 0, 0, 0, 0, 1, 2, 3}));
}

TEST_P(Permute, Errors) {
  const PermuteShape s{7, 4, 2, 33, 14};
  const PermuteCase<bf16, float> c(GetParam(), s, true, 1);
  Forwarded<bf16, float> f(c, true, true);
  const te_permute_forward_plan good = f.plan;
  const auto expect = [&](const char* argument, const std::string& got, auto change) {
    te_permute_forward_plan plan = good;
    change(plan);
    expect_error(te_permute_forward(&plan, nullptr), "te_permute_forward", argument, got);
  };
  expect("plan.out", "[14, 32]", [](auto& p) { p.out.cols = 32; });
  expect("plan.map.rows", "[6, 9]", [](auto& p) { p.map.rows.rows = 6; });
  expect("plan.map.rows", "[7, 8]", [](auto& p) { p.map.rows.cols = 8, p.map.rows.row_pitch = 8; });
  expect("plan.probs", "[7, 3]", [](auto& p) { p.probs.cols = 3; });
  expect("plan.out_probs", "float16", [](auto& p) { p.out_probs.dtype = TE_FLOAT16; });
  expect("plan.covered", "[1, 13]", [](auto& p) { p.covered.cols = 13; });
  expect("plan.scales", "[3, 6]", [](auto& p) { p.scales.cols = 6; });
  expect("plan.out", "float16", [](auto& p) { p.out.dtype = TE_FLOAT16; });
  expect_error(te_permute_forward(nullptr, nullptr), "te_permute_forward", "plan", "NULL");
  EXPECT_TRUE(f.out.read()[0].bits == 0xffff) << "written before the checks";

  Buffer<float> mask(GetParam(), 7, 4);
  Buffer<int32_t> counts(GetParam(), 1, 4);
  expect_error(te_permute_mask_map(mask.tensor(), c.map.tensor(), counts.tensor(), nullptr), "te_permute_mask_map",
               "mask", "float32");
  Buffer<int64_t> sizes(GetParam(), 1, 2), order(GetParam(), 1, 2), starts(GetParam(), 3, 3);
  Buffer<int32_t> source(GetParam(), 1, 9), destination(GetParam(), 1, 9);
  expect_error(te_permute_chunk_map(sizes.tensor(), source.tensor(), source.tensor(), destination.tensor(),
                                    starts.tensor(), nullptr, nullptr),
               "te_permute_chunk_map", "order", "[1, 9]");
}

// Contents are read on the CPU alone.
TEST(PermuteContents, Errors) {
  constexpr int32_t kCpu = TE_DEVICE_CPU;
  const PermuteCase<bf16, float> c(kCpu, {7, 4, 2, 33, 14}, true, 1);
  Forwarded<bf16, float> f(c, false, false);
  const std::vector<int32_t> map = c.map.read();
  for (const auto& [place, value] : {std::pair<size_t, int32_t>{8, 5}, {4, 4}, {4, -1}, {9, map[0]}}) {
    c.map.data()[place] = value;
    expect_error(te_permute_forward(&f.plan, nullptr), "te_permute_forward", "plan.map.rows", "of other contents");
    c.map.data()[place] = map[place];
  }
  TE_EXPECT_OK(te_permute_forward(&f.plan, nullptr));
  Buffer<int64_t> sizes(kCpu, 1, 2), order(kCpu, 1, 2), starts(kCpu, 3, 3);
  Buffer<int32_t> source(kCpu, 1, 9), destination(kCpu, 1, 9);
  const auto chunks = [&](std::vector<int64_t> s, std::vector<int64_t> o) {
    sizes.fill(s);
    order.fill(o);
    return te_permute_chunk_map(sizes.tensor(), order.tensor(), source.tensor(), destination.tensor(), starts.tensor(),
                                nullptr, nullptr);
  };
  expect_error(chunks({4, 6}, {1, 0}), "te_permute_chunk_map", "sizes", "above 9");
  expect_error(chunks({4, -1}, {1, 0}), "te_permute_chunk_map", "sizes", "-1 at 1");
  expect_error(chunks({4, 5}, {1, 1}), "te_permute_chunk_map", "order", "1 at 1");
  TE_EXPECT_OK(chunks({4, 5}, {1, 0}));
  Buffer<int32_t> ids(kCpu, 1, 2), pairs(kCpu, 1, 2), tokens(kCpu, 1, 2);
  ids.fill({3, 4});
  te_permute_row_map_plan plan{};
  plan.ids = ids.tensor(), plan.row_of_pair = pairs.tensor(), plan.token_of_row = tokens.tensor();
  plan.rows = 2, plan.last_expert = 4, plan.strict = 1;
  expect_error(te_permute_row_map(&plan, nullptr), "te_permute_row_map", "plan.ids", "4 for token 0");
  plan.strict = 0;
  TE_EXPECT_OK(te_permute_row_map(&plan, nullptr));
  EXPECT_EQ(pairs.read(), (std::vector<int32_t>{0, -1}));
}

}  // namespace
}  // namespace te
