// The kernels of permute themselves, on emulated blocks (emulated_intrinsics.h), against the CPU path, byte for byte:
// maps, moves by words of every width, sums, gradients, chunks.
#include "emulated_intrinsics.h"

#include <gtest/gtest.h>

#include "ops/permute/permute.cuh"
#include "ops/permute/permute_map.cuh"
#include "permute_case.h"

namespace te {
namespace {

using namespace testing;
using namespace permute;

constexpr int32_t kCpu = TE_DEVICE_CPU;

TEST(PermuteKernels, MapsOfMasks) {
  unsigned seed = 0;
  for (const PermuteShape& s : kPermuteShapes) {
    if (s.tokens == 0) continue;
    ++seed;
    const int64_t chunks = (s.tokens + TE_PERMUTE_CHUNK - 1) / TE_PERMUTE_CHUNK;
    Buffer<uint8_t> mask(kCpu, s.tokens, s.experts, s.experts + 1);
    Buffer<int32_t> want(kCpu, s.tokens, 2 * s.experts + 1), got(kCpu, s.tokens, 2 * s.experts + 1);
    Buffer<int32_t> counts(kCpu, chunks, s.experts);
    mask.fill(mask_of(s, seed));
    for (Buffer<int32_t>* map : {&want, &got}) spoil(*map);
    TE_ASSERT_OK(te_permute_mask_map(mask.tensor(), want.tensor(), counts.tensor(), nullptr));
    const Mask<uint8_t> view{mask.data(), s.experts + 1, int32_t(s.tokens), int32_t(s.experts)};
    run_blocks(unsigned(chunks), kMaskThreads, seed, [&] { count_kernel(view, counts.data()); });
    run_blocks(unsigned(chunks), kMaskThreads, seed + 9, [&] { place_kernel(view, counts.data(), got.data()); });
    expect_same_bytes(got, want, name_of(s));
  }
}

struct RowMapOutputs {
  RowMapOutputs(const PermuteShape& s, int32_t experts)
      : row_of_pair(kCpu, s.tokens, s.topk),
        token_of_row(kCpu, 1, s.rows),
        offsets(kCpu, 1, experts + 1),
        panels(kCpu, 1, 1) {}
  Buffer<int32_t> row_of_pair, token_of_row, offsets, panels;
};

// Blocks of 256 threads, so that a span of pairs has several turns of them, and there are several spans.
void check_row_map(const PermuteShape& s, int32_t first, int32_t last, int blocks, unsigned seed) {
  constexpr int kThreads = 256;
  Buffer<int32_t> ids(kCpu, s.tokens, s.topk);
  ids.fill(ids_of(s, seed));
  RowMapOutputs want(s, last - first), got(s, last - first);
  for (Buffer<int32_t>* map : {&want.row_of_pair, &want.token_of_row, &got.row_of_pair, &got.token_of_row}) spoil(*map);
  te_permute_row_map_plan plan{ids.tensor(),
                               want.row_of_pair.tensor(),
                               want.token_of_row.tensor(),
                               want.offsets.tensor(),
                               want.panels.tensor(),
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
  const int pairs = int(s.tokens * s.topk);
  RowMap map{};
  map.ids = ids.data(), map.row_of_pair = got.row_of_pair.data(), map.token_of_row = got.token_of_row.data();
  map.offsets = got.offsets.data(), map.panels = got.panels.data();
  map.pairs = pairs, map.of_token = int32_t(s.topk), map.rows = int32_t(s.rows);
  map.first_expert = first, map.experts = last - first, map.span = pairs / blocks + 1;
  Buffer<float> zero(kCpu, 1, 1);
  zero.fill({7.f});
  map.zero = zero.data();
  run_blocks(unsigned(blocks), kThreads, seed, [&] { row_map_kernel<kThreads>(map); });
  EXPECT_EQ(zero.read()[0], 0.f);
  expect_same_bytes(got.row_of_pair, want.row_of_pair, "row of pair, " + name_of(s));
  expect_same_bytes(got.token_of_row, want.token_of_row, "token of row, " + name_of(s));
  expect_same_bytes(got.offsets, want.offsets, "offsets, " + name_of(s));
  expect_same_bytes(got.panels, want.panels, "panels, " + name_of(s));
}

// The same of a router's choice, with the probabilities of rows; and their gradient.
template <class P>
void check_choice(const PermuteShape& s, int32_t first, int blocks, unsigned seed) {
  constexpr int kThreads = 256;
  using Bits = std::conditional_t<sizeof(P) == 2, uint16_t, uint32_t>;
  const int32_t last = int32_t(s.experts);
  const int64_t pitch = s.experts + 3;
  Buffer<int32_t> ids(kCpu, s.tokens, s.topk);
  Buffer<P> probs(kCpu, s.tokens, s.experts, pitch), want_probs(kCpu, 1, s.rows), got_probs(kCpu, 1, s.rows);
  Buffer<P> want_back(kCpu, s.tokens, s.experts, pitch), got_back(kCpu, s.tokens, s.experts, pitch);
  std::vector<P> values = drawn<P>(s.tokens * s.experts, seed);
  for (size_t i = 0; i < values.size(); i += 3) values[i] = from_float<P>(i % 2 ? 0.f : -0.f);
  ids.fill(choice_of(s, seed));
  probs.fill(values);
  RowMapOutputs want(s, last - first), got(s, last - first);
  for (Buffer<int32_t>* map : {&want.row_of_pair, &want.token_of_row, &got.row_of_pair, &got.token_of_row}) spoil(*map);
  te_permute_row_map_plan plan{};
  plan.ids = ids.tensor(), plan.row_of_pair = want.row_of_pair.tensor(), plan.token_of_row = want.token_of_row.tensor();
  plan.rows = s.rows, plan.first_expert = first, plan.last_expert = last, plan.ascending = 1;
  plan.probs = probs.tensor(), plan.row_probs = want_probs.tensor();
  Buffer<int64_t> want_counts(kCpu, 1, last), got_counts(kCpu, 1, last);
  Buffer<int32_t> want_cut(kCpu, 1, 1), got_cut(kCpu, 1, 1);
  Buffer<float> want_factor(kCpu, 1, 1), got_factor(kCpu, 1, 1);
  for (Buffer<int32_t>* cut : {&want_cut, &got_cut}) cut->fill({-20});  // it saturates for some shapes
  for (Buffer<float>* factor : {&want_factor, &got_factor}) factor->fill({1.5f});
  plan.tokens_per_expert = want_counts.tensor(), plan.cut = reinterpret_cast<uint32_t*>(want_cut.data());
  plan.factor = want_factor.data(), plan.even = 7;
  Buffer<int32_t> want_outside(kCpu, 1, 1), got_outside(kCpu, 1, 1);
  for (Buffer<int32_t>* outside : {&want_outside, &got_outside}) outside->fill({-30});
  plan.outside = reinterpret_cast<uint32_t*>(want_outside.data());
  TE_ASSERT_OK(te_permute_row_map(&plan, nullptr));
  RowMap map{};
  map.ids = ids.data(), map.row_of_pair = got.row_of_pair.data(), map.token_of_row = got.token_of_row.data();
  map.pairs = int32_t(s.tokens * s.topk), map.of_token = int32_t(s.topk), map.rows = int32_t(s.rows);
  map.first_expert = first, map.experts = last - first, map.span = map.pairs / blocks + 1, map.ascending = 1;
  map.probs = reinterpret_cast<const char*>(probs.data()), map.probs_pitch = pitch, map.prob_bytes = sizeof(P);
  map.row_probs = reinterpret_cast<char*>(got_probs.data());
  map.tokens_per_expert = got_counts.data(), map.all_experts = last;
  map.cut = reinterpret_cast<uint32_t*>(got_cut.data());
  map.factor = reinterpret_cast<uint32_t*>(got_factor.data()), map.even = plan.even;
  map.outside = reinterpret_cast<uint32_t*>(got_outside.data());
  run_blocks(unsigned(blocks + 1), kThreads, seed, [&] { row_map_kernel<kThreads>(map); });
  expect_same_bytes(got.row_of_pair, want.row_of_pair, "row of pair, " + name_of(s));
  expect_same_bytes(got.token_of_row, want.token_of_row, "token of row, " + name_of(s));
  expect_same_bytes(got_probs, want_probs, "probabilities, " + name_of(s));
  expect_same_bytes(got_counts, want_counts, "tokens per expert, " + name_of(s));
  expect_same_bytes(got_cut, want_cut, "cut, " + name_of(s));
  expect_same_bytes(got_factor, want_factor, "factor, " + name_of(s));
  expect_same_bytes(got_outside, want_outside, "outside, " + name_of(s));
  TE_ASSERT_OK(te_permute_row_probs_backward(ids.tensor(), want.row_of_pair.tensor(), want_probs.tensor(),
                                             want_back.tensor(), nullptr));
  constexpr int kTokens = kMapThreads / kWarp;
  run_blocks(unsigned((s.tokens + kTokens - 1) / kTokens), kMapThreads, seed, [&] {
    row_probs_backward_kernel<Bits>(
        ids.data(), want.row_of_pair.data(), reinterpret_cast<const Bits*>(want_probs.data()),
        reinterpret_cast<Bits*>(got_back.data()), pitch, s.tokens, s.rows, last, int(s.topk));
  });
  expect_same_bytes(got_back, want_back, "gradient, " + name_of(s));
}

TEST(PermuteKernels, MapsOfAChoice) {
  unsigned seed = 40;
  for (const PermuteShape& s : kPermuteShapes) {
    check_choice<float>(s, 0, 1, ++seed);
    check_choice<bf16>(s, int32_t(s.experts) / 3, 3, ++seed);
    if (HasFatalFailure()) return;
  }
}

TEST(PermuteKernels, MapsOfIds) {
  unsigned seed = 20;
  for (const PermuteShape& s : kPermuteShapes) {
    ++seed;
    check_row_map(s, 0, int32_t(s.experts), 1, seed);
    check_row_map(s, int32_t(s.experts) / 3, int32_t(s.experts), 3, seed);
    if (HasFatalFailure()) return;
  }
  check_row_map({100, 3, 4, 1, 5000}, 0, TE_PERMUTE_MAX_EXPERTS, 2, 7);  // fewer copies of the histograms
}

// The word that all rows divide into, as permute.cu finds it, in a type of its size.
template <class Word, class T>
Rows<Word> words_of(const Buffer<T>& b) {
  const te_tensor t = b.tensor();
  constexpr int64_t kOf = int64_t(sizeof(Word)), kElement = int64_t(sizeof(T));
  return {reinterpret_cast<Word*>(b.data()), t.row_pitch * kElement / kOf, t.cols * kElement / kOf, t.rows};
}

template <class Word, class T, class P>
void check_forward(const PermuteShape& s, bool of_mask, bool with_probs, unsigned seed) {
  const PermuteCase<T, P> c(kCpu, s, of_mask, seed);
  Forwarded<T, P> want(c, with_probs, true), got(c, with_probs, true);
  TE_ASSERT_OK(te_permute_forward(&want.plan, nullptr));
  std::memset(c.covered.data(), 0, size_t(s.rows));
  const Pairs pairs = pairs_of(got.plan.map, s.rows);
  const unsigned blocks = unsigned((s.tokens * kPairLanes + kMoveThreads - 1) / kMoveThreads);
  run_blocks(blocks, kMoveThreads, seed, [&] { cover_kernel(pairs, s.tokens, c.covered.data()); });
  const te_permute_forward_plan& p = got.plan;
  const Forward<Word> move{
      pairs,
      words_of<const Word>(c.tokens),
      words_of<Word>(got.out),
      {static_cast<const char*>(p.probs.data), static_cast<char*>(p.out_probs.data), p.probs.row_pitch,
       int32_t(sizeof(P))},
      {c.scales.data(), got.scales.data(), p.scales.row_pitch, p.out_scales.row_pitch, 3, p.out_scales.cols},
      c.covered.data()};
  const unsigned moves = unsigned(s.tokens + (s.rows + kClearRows - 1) / kClearRows);
  run_blocks(moves, kMoveThreads, seed, [&] { forward_kernel(move); });
  expect_same_bytes(got.out, want.out, "rows, " + name_of(s));
  if (with_probs) expect_same_bytes(got.probs, want.probs, "probabilities, " + name_of(s));
  expect_same_bytes(got.scales, want.scales, "scales, " + name_of(s));
}

TEST(PermuteKernels, Forward) {
  check_forward<uint4, float, float>({9, 4, 2, 1200, 30}, true, true, 1);
  check_forward<uint4, bf16, bf16>({40, 9, 3, 64, 130, 8, true}, true, true, 2);
  check_forward<uint32_t, bf16, float>({40, 9, 3, 66, 120}, true, false, 3);
  check_forward<uint16_t, fp16, fp16>({21, 50, 40, 17, 500, 2}, true, true, 4);
  check_forward<uint8_t, uint8_t, float>({30, 6, 2, 13, 40}, false, false, 5);
  check_forward<uint4, uint8_t, float>({0, 6, 2, 16, 70}, true, true, 6);
}

template <class T, class P, bool kWide>
void check_sums(const PermuteShape& s, bool of_mask, unsigned seed) {
  const PermuteCase<T, P> c(kCpu, s, of_mask, seed);
  Buffer<T> want(kCpu, s.tokens, s.hidden, s.hidden + s.pitch), got(kCpu, s.tokens, s.hidden, s.hidden + s.pitch);
  te_permute_unpermute_plan plan{c.map_of(), c.rows.tensor(), c.probs.tensor(), c.row_probs.tensor(), want.tensor()};
  TE_ASSERT_OK(te_permute_unpermute(&plan, nullptr));
  const Pairs pairs = pairs_of(plan.map, s.rows);
  const int64_t pitch = s.hidden + s.pitch, probs_pitch = c.columns + 3;
  const Unpermute<T, P> sum{pairs,
                            {c.rows.data(), pitch, s.hidden, s.rows},
                            {got.data(), pitch, s.hidden, s.tokens},
                            c.probs.data(),
                            probs_pitch,
                            c.row_probs.data(),
                            int32_t(sizeof(P))};
  run_blocks(unsigned(s.tokens), kMoveThreads, seed, [&] { unpermute_kernel<T, P, kWide>(sum); });
  expect_same_bytes(got, want, "tokens, " + name_of(s));

  Buffer<T> dinp(kCpu, s.rows, s.hidden, pitch), want_dinp(kCpu, s.rows, s.hidden, pitch);
  Buffer<P> dprobs(kCpu, s.tokens, c.columns, c.columns + 1), want_dprobs(kCpu, s.tokens, c.columns, c.columns + 1);
  te_permute_unpermute_backward_plan back{plan.map,           c.tokens.tensor(),    c.rows.tensor(),   plan.probs,
                                          want_dinp.tensor(), want_dprobs.tensor(), c.covered.tensor()};
  TE_ASSERT_OK(te_permute_unpermute_backward(&back, nullptr));
  const Rows<T> to{dinp.data(), pitch, s.hidden, s.rows};
  run_blocks(unsigned((s.rows + kClearRows - 1) / kClearRows), kMoveThreads, seed,
             [&] { clear_kernel(words_of<uint8_t>(dinp), c.covered.data()); });
  const UnpermuteBackward<T, P> op{pairs,
                                   {c.tokens.data(), pitch, s.hidden, s.tokens},
                                   {c.rows.data(), pitch, s.hidden, s.rows},
                                   to,
                                   c.probs.data(),
                                   dprobs.data(),
                                   probs_pitch,
                                   c.columns + 1,
                                   c.columns};
  run_blocks(unsigned(s.tokens), kWarp * kWarps, seed, [&] { unpermute_backward_kernel<T, P, kWide>(op); });
  expect_same_bytes(dinp, want_dinp, "dinp, " + name_of(s));
  expect_same_bytes(dprobs, want_dprobs, "dprobs, " + name_of(s));
}

TEST(PermuteKernels, SumsAndTheirGradients) {
  check_sums<float, float, true>({9, 4, 3, 600, 30}, true, 1);
  check_sums<bf16, float, true>({30, 9, 3, 67, 100, 5, true}, true, 2);  // whole vectors, and a rest
  check_sums<bf16, bf16, false>({30, 9, 5, 300, 120, 1}, true, 3);
  check_sums<fp16, float, false>({11, 9, 4, 33, 44}, false, 4);
  check_sums<bf16, fp16, true>({6, 40, 40, 64, 200}, true, 5);
}

TEST(PermuteKernels, GradientsOfProbabilities) {
  for (const PermuteShape& s : {kPermuteShapes[3], kPermuteShapes[5], kPermuteShapes[6]}) {
    const PermuteCase<bf16, float> c(kCpu, s, true, 3);
    Buffer<float> want(kCpu, s.tokens, s.experts, s.experts + 2), got(kCpu, s.tokens, s.experts, s.experts + 2);
    const te_permute_map map = c.map_of();
    TE_ASSERT_OK(te_permute_probs_backward(&map, c.row_probs.tensor(), want.tensor(), nullptr));
    run_blocks(unsigned((s.tokens + kWarps - 1) / kWarps), kWarp * kWarps, 4, [&] {
      probs_backward_kernel<uint32_t>(pairs_of(map, s.rows), reinterpret_cast<const uint32_t*>(c.row_probs.data()),
                                      reinterpret_cast<uint32_t*>(got.data()), s.experts + 2, s.tokens, int(s.experts));
    });
    expect_same_bytes(got, want, name_of(s));
  }
}

template <class Word, class T>
void check_gather(int64_t cols, int64_t pitch, unsigned seed) {
  constexpr int64_t kIn = 12, kOut = 21;
  Buffer<T> inp(kCpu, kIn, cols, pitch), want(kCpu, kOut, cols, pitch), got(kCpu, kOut, cols, pitch);
  Buffer<int32_t> source(kCpu, 1, kOut);
  inp.fill(drawn<T>(kIn * cols, seed));
  std::vector<int32_t> from;
  for (int64_t i = 0; i < kOut; ++i) from.push_back(int32_t(i * 5 % 15) - 1);  // -1, and rows that are not there
  source.fill(from);
  TE_ASSERT_OK(te_permute_gather(inp.tensor(), source.tensor(), want.tensor(), nullptr));
  run_blocks((kOut + kWarps - 1) / kWarps, kWarp * kWarps, seed,
             [&] { gather_kernel(words_of<const Word>(inp), source.data(), words_of<Word>(got)); });
  expect_same_bytes(got, want, concat("columns ", cols));
}

TEST(PermuteKernels, Gather) {
  check_gather<uint4, float>(1200, 1204, 1);
  check_gather<uint32_t, bf16>(10, 12, 2);
  check_gather<uint16_t, fp16>(37, 39, 3);
}

struct ChunkCase {
  std::vector<int64_t> sizes, order;
  int64_t rows;
};

void run_chunks(const ChunkCase& c, Buffer<int32_t>& source, Buffer<int32_t>& destination,
                uint32_t* counters = nullptr) {
  const int64_t n = int64_t(c.sizes.size());
  Buffer<int64_t> sizes(kCpu, 1, n), order(kCpu, 1, n), starts(kCpu, 3, n + 1);
  sizes.fill(c.sizes);
  order.fill(c.order);
  int64_t* const sums = starts.data();
  const Chunks chunks{sizes.data(), order.data(), sums, sums + n + 1, sums + 2 * (n + 1), n, c.rows, counters};
  run_blocks(1, kMapThreads, 1, [&] { chunk_starts_kernel(chunks); });
  run_blocks(unsigned((c.rows + kMapThreads - 1) / kMapThreads), kMapThreads, 2,
             [&] { chunk_rows_kernel(chunks, source.data(), destination.data()); });
}

TEST(PermuteKernels, Chunks) {
  ChunkCase many{{}, {}, 1000};
  for (int64_t i = 0; i < 300; ++i) many.sizes.push_back(i * 7 % 4), many.order.push_back(i * 77 % 300);
  for (const ChunkCase& c :
       {ChunkCase{{3, 0, 5}, {2, 0, 1}, 10}, ChunkCase{{}, {}, 4}, ChunkCase{{0, 6, 0}, {1, 2, 0}, 6}, many}) {
    const int64_t n = int64_t(c.sizes.size());
    Buffer<int64_t> sizes(kCpu, 1, n), order(kCpu, 1, n), starts(kCpu, 3, n + 1);
    sizes.fill(c.sizes);
    order.fill(c.order);
    Buffer<int32_t> want[2] = {{kCpu, 1, c.rows}, {kCpu, 1, c.rows}}, got[2] = {{kCpu, 1, c.rows}, {kCpu, 1, c.rows}};
    TE_ASSERT_OK(te_permute_chunk_map(sizes.tensor(), order.tensor(), want[0].tensor(), want[1].tensor(),
                                      starts.tensor(), nullptr, nullptr));
    uint32_t counters[2] = {7, 9};
    run_chunks(c, got[0], got[1], counters);
    EXPECT_TRUE(counters[0] == 7 && counters[1] == 9) << "these are good";
    expect_same_bytes(got[0], want[0], "source");
    expect_same_bytes(got[1], want[1], "destination");
  }
}

// The device counts them: every row is written, and none leads out of the tensors.
TEST(PermuteKernels, BadChunks) {
  struct BadCase {
    ChunkCase chunks;
    uint32_t negative, lost;
  };
  constexpr uint32_t kMost = 0xffffffffu;
  for (const auto& [c, negative, lost] :
       {BadCase{{{3, 2}, {0, 0}, 8}, 0, 2 + 1}, BadCase{{{3, 2}, {7, -1}, 8}, 0, 5 + 2},
        BadCase{{{3, 0}, {0, 0}, 8}, 0, 1}, BadCase{{{-3, 20}, {1, 0}, 8}, 1, 12}, BadCase{{{4, 6}, {1, 0}, 8}, 0, 2},
        BadCase{{{INT64_MAX, INT64_MAX}, {1, 0}, 8}, 0, kMost}}) {
    Buffer<int32_t> maps[2] = {{kCpu, 1, c.rows}, {kCpu, 1, c.rows}};
    uint32_t counters[2] = {5, 0};
    run_chunks(c, maps[0], maps[1], counters);
    EXPECT_EQ(counters[0], 5 + negative);
    EXPECT_EQ(counters[1], lost);
    for (const Buffer<int32_t>& map : maps) {
      for (const int32_t row : map.read()) EXPECT_TRUE(row >= -1 && row < c.rows) << row;
      EXPECT_TRUE(map.padding_untouched());
    }
  }
}

}  // namespace
}  // namespace te
