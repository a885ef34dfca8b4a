// grouped quantize through the C API, on every device here: data, panels, scales and amaxes equal, byte for byte, to
// te_quantize of each group alone, for splits drawn and chosen, with NaN everywhere, Inf in one group and in the tail,
// poisoned memory around every output and bytes that must stay unchanged; errors; the walk of panels and of amax parts.
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "grouped_quantize_case.h"
#include "ops/quantize/grouped_walk.h"
#include "transformer_engine/permute.h"

namespace te {
namespace {

using namespace testing;
using Shape = GroupedQuantizeShape;
using Options = GroupedQuantizeOptions;

class GroupedQuantize : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, GroupedQuantize, ::testing::ValuesIn(testing::devices()), testing::device_name);

constexpr Options kOptions[] = {
    {Mode::kBlocks, false, false, 0},        {Mode::kBlocks, true, true, 0},
    {Mode::kBlocks, false, true, 0.5f},      {Mode::kCurrent, false, false, 0},
    {Mode::kCurrent, true, true, 0.5f},      {Mode::kDelayed, false, false, 0},
    {Mode::kDelayed, true, false, 0},        {Mode::kBlocks, false, true, 0, 1, 0},
    {Mode::kBlocks, false, true, 0, 0, 1},   {Mode::kCurrent, false, true, 0, 1, 0},
    {Mode::kCurrent, false, true, 0, 0, 1},  {Mode::kDelayed, true, false, 0, 1, 0},
    {Mode::kDelayed, false, false, 0, 0, 1},
};

std::string name_of(const Shape& s, const Options& o) {
  std::vector<int64_t> all(s.splits.begin(), s.splits.end());
  if (all.size() > 12) all.resize(12);
  return ::testing::PrintToString(all) + ::testing::PrintToString(std::vector<int64_t>{
                                             int64_t(s.splits.size()), s.tail, s.cols, s.extra_pitch, s.extra_out,
                                             int64_t(o.mode), o.e5m2, o.pow_2, o.rowwise, o.panels});
}

template <class T>
void check(int32_t device, const Shape& s, const Options& o, unsigned seed) {
  GroupedQuantizeCase<T> c(device, s, o, seed);
  if (::testing::Test::HasFatalFailure()) return;
  const std::string what = name_of(s, o) + " " + te_dtype_name(kDtype<T>);
  TE_ASSERT_OK(te_grouped_quantize(&c.problem, nullptr)) << what;
  c.expect(what);
}

void check_all(int32_t device, const Shape& s, unsigned seed) {
  for (const Options& o : kOptions) {
    for_dtypes([&](auto t) { check<decltype(t)>(device, s, o, seed); });
    if (::testing::Test::HasFatalFailure()) return;
  }
}

TEST_P(GroupedQuantize, BytesOfEachGroupAlone) {
  const Shape shapes[] = {
      {{0}, 0, 16},
      {{0, 0}, 0, 0},
      {{0, 0, 0}, 5, 48},
      {{1}, 0, 1},
      {{127}, 1, 128},
      {{128}, 0, 48, 8},
      {{129, 0}, 3, 16, 3},
      {{3, 0, 2}, 1, 0, 8, 16},
      {{0, 0, 5, 0}, 0, 136, 0, 16},
      {{1, 127, 128, 129, 0}, 7, 136, 0, 160, 2},
      {{130, 0, 1, 1, 257}, 0, 33, 1},
      {{2, 300}, 130, 260, 0, 0, 1},
      {{5, 131, 64}, 2, 1536},
  };
  unsigned seed = 1;
  for (const Shape& s : shapes) {
    check_all(GetParam(), s, ++seed);
    if (HasFatalFailure()) return;
  }
}

// Of any groups, tails and columns.
TEST_P(GroupedQuantize, DrawnSplits) {
  std::mt19937 engine(11);
  const auto one_of = [&](std::initializer_list<int64_t> list) { return list.begin()[engine() % list.size()]; };
  for (unsigned i = 0; i < 40; ++i) {
    Shape s{{}, one_of({0, 0, 1, 3, 200}), one_of({16, 48, 128, 136, 264, 31})};
    for (int64_t g = one_of({1, 2, 3, 5, 9, 17}); g > 0; --g) {
      s.splits.push_back(int32_t(one_of({0, 0, 1, 2, 127, 128, 129, 255, 256, 257, int64_t(engine() % 60)})));
    }
    s.extra_pitch = one_of({0, 0, 8, 1});
    s.extra_out = one_of({0, 0, 16, 144});
    s.spare_panels = one_of({0, 1});
    const Options& o = kOptions[engine() % std::size(kOptions)];
    const unsigned dtype = engine() % 3;
    if (dtype == 0) check<float>(GetParam(), s, o, i);
    if (dtype == 1) check<fp16>(GetParam(), s, o, i);
    if (dtype == 2) check<bf16>(GetParam(), s, o, i);
    if (HasFatalFailure()) return;
  }
}

TEST_P(GroupedQuantize, AsManyGroupsAsACallTakes) {
  Shape s{std::vector<int32_t>(TE_GROUPED_QUANTIZE_GROUPS, 0), 3, 40};
  for (size_t g = 0; g < s.splits.size(); ++g) s.splits[g] = int32_t(g * 7 % 5 == 0 ? 0 : g % 4);
  s.splits[500] = 700;
  for (const Options& o : {kOptions[0], kOptions[3], kOptions[5]}) check<bf16>(GetParam(), s, o, 3);
}

// Many tiles: amax runs of several tiles, groups of several runs, blocks that walk more than one tile.
TEST_P(GroupedQuantize, MoreTilesThanBlocks) {
  for (const Options& o : {kOptions[0], kOptions[3], kOptions[5]}) {
    check<bf16>(GetParam(), {{900, 0, 1, 1500, 128, 77}, 60, 6144}, o, 5);
  }
}

// Rows by a map equal the gathered rows, in every byte: rows that are read twice or not at all, and places of the map
// that name no row of x, which become 0.
template <class T>
void check_mapped(int32_t device, const Shape& s, const Options& o, unsigned seed) {
  GroupedQuantizeCase<T> gathered(device, s, o, seed), mapped(device, s, o, seed);
  const int32_t tokens = 1 + int32_t(gathered.rows / 2);
  Buffer<T> plain(device, tokens, s.cols, s.cols), x(device, tokens, s.cols, s.cols + s.extra_pitch);
  const std::vector<T> values = draw<T>(tokens * s.cols, seed);
  plain.fill(values);
  x.fill(values);
  std::mt19937 engine(seed);
  std::vector<int32_t> rows(size_t(gathered.rows));
  for (int32_t& row : rows) row = int32_t(engine() % unsigned(tokens + 2)) - 1;
  Buffer<int32_t> map(device, 1, gathered.rows);
  map.fill(rows);
  Buffer<T> in_order(device, gathered.rows, s.cols, s.cols);
  TE_ASSERT_OK(te_permute_gather(plain.tensor(), map.tensor(), in_order.tensor(), nullptr));
  gathered.problem.x = in_order.tensor();
  mapped.problem.x = x.tensor();
  mapped.problem.row_map = map.tensor();
  TE_ASSERT_OK(te_grouped_quantize(&gathered.problem, nullptr));
  TE_ASSERT_OK(te_grouped_quantize(&mapped.problem, nullptr));
  const auto same = [](const auto& a, const auto& b) {
    const auto x = a.read(), y = b.read();
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
  };
  const std::string what = name_of(s, o) + " " + te_dtype_name(kDtype<T>);
  EXPECT_TRUE(same(gathered.row_data.buffer, mapped.row_data.buffer)) << what;
  EXPECT_TRUE(same(gathered.panel_data.buffer, mapped.panel_data.buffer)) << what;
  EXPECT_TRUE(same(gathered.row_scales.buffer, mapped.row_scales.buffer)) << what;
  EXPECT_TRUE(same(gathered.panel_scales.buffer, mapped.panel_scales.buffer)) << what;
  EXPECT_TRUE(same(gathered.amaxes, mapped.amaxes)) << what;
  EXPECT_TRUE(mapped.parts.padding_untouched()) << what;
}

TEST_P(GroupedQuantize, RowsByAMap) {
  const Shape shapes[] = {{{0}, 0, 16},
                          {{0, 0}, 2, 48},
                          {{1}, 0, 1, 3},
                          {{129, 0, 3}, 3, 136, 3},
                          {{1, 127, 128, 129, 0}, 7, 264, 8, 160, 2},
                          {{130, 0, 1, 1, 257}, 0, 33},
                          {{700, 0, 1, 90}, 60, 1536}};
  unsigned seed = 1;
  for (const Shape& s : shapes) {
    for (const Options& o : kOptions) {
      ++seed;
      for_dtypes([&](auto t) { check_mapped<decltype(t)>(GetParam(), s, o, seed); });
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(GroupedQuantize, EpsilonZerosAndNothingWanted) {
  GroupedQuantizeCase<float> c(GetParam(), {{2, 0, 3}, 0, 32}, {Mode::kCurrent, false, false, 2.f}, 1);
  c.x.fill(std::vector<float>(size_t(c.rows * 32), 0.f));
  c.problem.amaxes = nullptr;
  TE_ASSERT_OK(te_grouped_quantize(&c.problem, nullptr));
  const std::vector<float> got = c.row_scales.buffer.read();
  for (int64_t g = 0; g < 3; ++g) EXPECT_EQ(got[size_t(c.row_scales.pitch + g)], 1.f / (448.f / 2.f)) << g;
  EXPECT_EQ(c.amaxes.read()[0], c.start_amaxes[0]);
  // Without the amax of one group, and with one memory for both directions' scales.
  c.problem.amaxes = c.amax_pointers.data();
  c.amax_pointers[0] = nullptr;
  c.problem.panels_scale_inv = c.problem.rowwise_scale_inv;
  c.problem.amax_epsilon = 0;
  TE_ASSERT_OK(te_grouped_quantize(&c.problem, nullptr));
  const std::vector<float> amaxes = c.amaxes.read(), again = c.row_scales.buffer.read();
  EXPECT_EQ(amaxes[0], c.start_amaxes[0]);
  for (size_t g = 1; g < 3; ++g) EXPECT_EQ(amaxes[3 * g], 0.f);
  for (int64_t g = 0; g < 3; ++g) EXPECT_EQ(again[size_t(c.row_scales.pitch + g)], 1.f) << g;
}

TEST_P(GroupedQuantize, BadArgumentsAreNamedAndNothingIsWritten) {
  using P = te_grouped_quantize_problem;
  const Shape s{{3, 0, 4}, 1, 32};
  const auto on_other = [](te_tensor& t) { t.device = t.device == TE_DEVICE_CPU ? 0 : TE_DEVICE_CPU; };
  const float* none[3] = {nullptr, nullptr, nullptr};
  struct Bad {
    const char* argument;
    Mode mode;
    std::function<void(P&)> change;
  };
  const Mode blocks = Mode::kBlocks, current = Mode::kCurrent, delayed = Mode::kDelayed;
  const Bad cases[] = {
      {"'x'", blocks, [](P& p) { p.x.dtype = TE_INT32; }},
      {"'x'", blocks, [](P& p) { p.x.data = nullptr; }},
      {"'x'", blocks, [](P& p) { p.x.rows = int64_t(1) << 31; }},
      {"'row_map'", blocks, [](P& p) { p.row_map = p.panels_scale_inv; }},
      {"'row_map'", blocks, [](P& p) { p.row_map = {p.rowwise.data, 2, 8, 8, TE_INT32, p.x.device}; }},
      {"'row_map'", blocks,
       [&](P& p) {
         on_other(p.row_map = {p.rowwise.data, 1, 8, 8, TE_INT32, p.x.device});
       }},
      {"'rowwise'", blocks, [](P& p) { p.row_map = {p.rowwise.data, 1, 9, 9, TE_INT32, p.x.device}; }},
      {"'groups'", blocks, [](P& p) { p.groups = 0; }},
      {"'groups'", blocks, [](P& p) { p.groups = TE_GROUPED_QUANTIZE_GROUPS + 1; }},
      {"'offsets'", blocks, [](P& p) { p.offsets = nullptr; }},
      {"'scaling'", blocks, [](P& p) { p.scaling = TE_SCALING_BLOCK_2D; }},
      {"'amax_epsilon'", blocks, [](P& p) { p.amax_epsilon = -1; }},
      {"'amax_epsilon'", current, [](P& p) { p.amax_epsilon = INFINITY; }},
      {"'rowwise'", blocks, [](P& p) { p.rowwise = p.panels = p.rowwise_scale_inv = p.panels_scale_inv = kAbsent; }},
      {"'rowwise'", blocks, [](P& p) { --p.rowwise.rows; }},
      {"'rowwise'", blocks, [](P& p) { p.rowwise.dtype = TE_UINT8; }},
      {"'rowwise'", blocks, [](P& p) { p.rowwise.row_pitch = 40; }},
      {"'rowwise'", blocks, [](P& p) { p.rowwise.data = static_cast<uint8_t*>(p.rowwise.data) + 8; }},
      {"'rowwise'", blocks, [&](P& p) { on_other(p.rowwise); }},
      {"'rowwise_scale_inv'", blocks, [](P& p) { p.rowwise_scale_inv = kAbsent; }},
      {"'rowwise_scale_inv'", blocks, [](P& p) { --p.rowwise_scale_inv.cols; }},
      {"'rowwise_scale_inv'", blocks, [](P& p) { p.rowwise = kAbsent; }},
      {"'rowwise_scale_inv'", current, [](P& p) { p.rowwise_scale_inv.cols = 1; }},
      {"'panels'", blocks, [](P& p) { p.panels.rows -= 1; }},
      {"'panels'", blocks, [](P& p) { p.panels.rows = 2 * 32; }},
      {"'panels'", blocks, [](P& p) { p.panels.cols = 64; }},
      {"'panels'", blocks, [](P& p) { p.panels.row_pitch = 256; }},
      {"'panels'", blocks, [](P& p) { p.panels.dtype = TE_FLOAT8_E5M2; }},
      {"'panels'", blocks, [](P& p) { p.panels.data = static_cast<uint8_t*>(p.panels.data) + 4; }},
      {"'panels'", blocks, [&](P& p) { on_other(p.panels); }},
      {"'panels_scale_inv'", blocks, [](P& p) { p.panels_scale_inv.dtype = TE_FLOAT16; }},
      {"'panels_scale_inv'", blocks, [](P& p) { --p.panels_scale_inv.rows; }},
      {"'panels_scale_inv'", delayed, [](P& p) { p.panels = kAbsent; }},
      {"'scales'", blocks, [&](P& p) { p.scales = none; }},
      {"'amaxes'", blocks, [](P& p) { p.amaxes = reinterpret_cast<float* const*>(&p); }},
      {"'amax_parts'", blocks, [](P& p) { p.amax_parts = p.panels_scale_inv; }},
      {"'scales'", current, [&](P& p) { p.scales = none; }},
      {"'scales'", current, [](P& p) { p.amax_parts = kAbsent; }},
      {"'amax_parts'", current, [](P& p) { p.amax_parts.cols = TE_GROUPED_QUANTIZE_PARTS; }},
      {"'amax_parts'", current, [&](P& p) { on_other(p.amax_parts); }},
      {"'scales[0]'", delayed, [&](P& p) { p.scales = none; }},
  };
  const auto refused = [&](const char* argument, Mode mode, const std::function<void(P&)>& change) {
    GroupedQuantizeCase<float> c(GetParam(), s, {mode, false, false, 0}, 1);
    P bad = c.problem;
    change(bad);
    EXPECT_EQ(te_grouped_quantize(&bad, nullptr), TE_INVALID_ARGUMENT) << argument;
    const std::string said = te_last_error();
    EXPECT_NE(said.find(argument), std::string::npos) << argument << ": " << said;
    EXPECT_NE(said.find("te_grouped_quantize"), std::string::npos) << said;
    for (const Buffer<uint8_t>* b : {&c.row_data.buffer, &c.panel_data.buffer}) {
      for (const uint8_t byte : b->read()) ASSERT_EQ(byte, testing::kPoison) << argument << ": a refused call wrote";
    }
    for (const Buffer<float>* b : {&c.row_scales.buffer, &c.panel_scales.buffer}) {
      for (const float v : b->read()) ASSERT_TRUE(std::isnan(v)) << argument << ": a refused call wrote";
    }
    EXPECT_EQ(c.amaxes.read(), c.start_amaxes) << argument;
  };
  for (const Bad& bad : cases) refused(bad.argument, bad.mode, bad.change);
  if (GetParam() != TE_DEVICE_CPU) return;
  const int32_t late[] = {1, 3, 3, 7}, falling[] = {0, 5, 4, 7}, beyond[] = {0, 3, 3, 9};
  refused("'offsets[0]'", blocks, [&](P& p) { p.offsets = late; });
  refused("'offsets[2]'", current, [&](P& p) { p.offsets = falling; });
  refused("'offsets[3]'", delayed, [&](P& p) { p.offsets = beyond; });
}

#if defined(TE_WITH_CUDA)

// On CUDA offsets are not checked: for any offsets, memory around the outputs is unchanged.
TEST_P(GroupedQuantize, WildOffsetsStayInside) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "offsets are refused on the CPU";
  const std::vector<int32_t> wild[] = {
      {-5, 400, 3, INT32_MAX, INT32_MIN}, {INT32_MAX, INT32_MAX, 0, 300, 1}, {300, 0, 300, 0, 300}};
  for (const auto& offsets : wild) {
    for (const Options& o : {kOptions[0], kOptions[3], kOptions[5]}) {
      GroupedQuantizeCase<bf16> c(0, {{100, 100, 50, 50}, 0, 48}, o, 1);
      c.offsets.fill(offsets);
      TE_ASSERT_OK(te_grouped_quantize(&c.problem, nullptr));
      const auto around = [](const auto& guarded) {
        const auto got = guarded.buffer.read();
        for (int64_t i = 0; i < int64_t(got.size()); ++i) {
          const int64_t row = i / guarded.pitch - 1;
          if (row >= 0 && row < guarded.rows && i % guarded.pitch < guarded.cols) continue;
          ASSERT_EQ(std::memcmp(&got[size_t(i)], &guarded.want[0], sizeof(got[0])), 0) << i;  // the first is poison
        }
        EXPECT_TRUE(guarded.buffer.padding_untouched());
      };
      around(c.row_data);
      around(c.panel_data);
      around(c.row_scales);
      around(c.panel_scales);
      EXPECT_TRUE(c.parts.padding_untouched());
    }
  }
}

// One capture serves all splits.
TEST_P(GroupedQuantize, Captured) {
  if (GetParam() == TE_DEVICE_CPU) GTEST_SKIP() << "nothing is captured on the CPU";
  const std::vector<int32_t> splits[] = {{100, 200, 44}, {0, 344, 0}, {1, 2, 3}, {0, 0, 0}, {128, 129, 80}};
  for (const Options& o : {kOptions[0], kOptions[3], kOptions[5]}) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t runnable;
    testing::cuda_ok(cudaStreamCreate(&stream));
    GroupedQuantizeCase<bf16> captured(0, {{0, 0, 0}, 344, 136}, o, 1);
    testing::cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    TE_ASSERT_OK(te_grouped_quantize(&captured.problem, stream));
    testing::cuda_ok(cudaStreamEndCapture(stream, &graph));
    testing::cuda_ok(cudaGraphInstantiate(&runnable, graph, 0));
    for (const auto& now : splits) {
      const int64_t live = now[0] + now[1] + now[2];
      GroupedQuantizeCase<bf16> wanted(0, {now, 344 - live, 136}, o, 1);
      captured.poison();
      captured.offsets.fill(wanted.offsets.read());
      captured.x.fill(wanted.x.read());
      testing::cuda_ok(cudaGraphLaunch(runnable, stream));
      testing::cuda_ok(cudaStreamSynchronize(stream));
      captured.row_data.want = wanted.row_data.want;
      captured.panel_data.want = wanted.panel_data.want;
      captured.row_scales.want = wanted.row_scales.want;
      captured.panel_scales.want = wanted.panel_scales.want;
      captured.want_amaxes = wanted.want_amaxes;
      captured.expect("captured " + ::testing::PrintToString(now));
    }
    cudaGraphExecDestroy(runnable);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
  }
}

#endif

// The walk of the CUDA path: each panel is found, there is room for all, and no two blocks of the amax pass share a
// part.
TEST(GroupedQuantizeWalk, PanelsAndParts) {
  using namespace quantize::grouped;
  std::mt19937 engine(3);
  for (int i = 0; i < 300; ++i) {
    const auto groups = int32_t(1 + engine() % 40);
    std::vector<int32_t> before(1, 0);
    int64_t rows = 0;
    for (int32_t g = 0; g < groups; ++g) {
      const auto n = int32_t(engine() % 3 == 0 ? 0 : engine() % 3 == 0 ? 1 : engine() % 600);
      rows += n;
      before.push_back(before.back() + panels_of(n));
    }
    ASSERT_LE(before.back(), most_panels(rows, groups));
    for (int32_t g = 0; g < groups; ++g) {
      for (int32_t p = before[size_t(g)]; p < before[size_t(g) + 1]; ++p) {
        const PanelAt at = panel_at(before.data(), groups, p);
        ASSERT_EQ(at.group, g);
        ASSERT_EQ(at.in_group, p - before[size_t(g)]);
      }
    }
    const auto tile_cols = int32_t(1 + engine() % 5), blocks = int32_t(1 + engine() % 50);
    const int32_t tiles = before.back() * tile_cols;
    const AmaxRuns runs(tiles, blocks);
    ASSERT_GE(int64_t(runs.step) * blocks, tiles);
    std::set<int32_t> seen;
    for (int32_t g = 0; g < groups; ++g) {
      const int32_t first = before[size_t(g)] * tile_cols, end = before[size_t(g) + 1] * tile_cols;
      if (first == end) continue;
      for (int32_t part = runs.first_part(g, first); part <= runs.last_part(g, end); ++part) {
        ASSERT_TRUE(seen.insert(part).second) << part;
        ASSERT_LT(part, blocks + groups);
        const int32_t block = part - g;  // which has a tile of the group
        ASSERT_TRUE(block * runs.step < end && (block + 1) * runs.step > first) << block;
      }
    }
  }
  EXPECT_EQ(most_panels(0, 8), 0);
  EXPECT_EQ(most_panels(3, 8), 3);
  EXPECT_EQ(most_panels(128 + 2, 3), 3);
  EXPECT_EQ(most_panels(128 + 3, 3), 4);
  EXPECT_EQ(panels_of(INT32_MAX), 1 << 24);
}

}  // namespace
}  // namespace te
