// The quantize room's kernels themselves, of one matrix and of lists, on emulated blocks (emulated_quantize.h), against
// the CPU path: tiles, edges, both directions, scales, amaxes, parts, launches of a long list. Mutants: at.amax[0] in
// Launch::dest_of, tile + 1 in list_kernel, parts_of_one + 1 as the step of list_amax_kernel, a barrier less in
// put_columnwise.
#include "emulated_quantize.h"

#include <gtest/gtest.h>

#include "ops/quantize/grouped_panels.cuh"
#include "ops/quantize/list.cuh"
#include "quantize_list_case.h"

namespace te {
namespace {

using namespace testing;
using quantize::Dest;
using quantize::Dests;
using quantize::Domain;
using quantize::kThreads;
using quantize::tiles_of;
using quantize::list::Launch;
using quantize::list::Source;

// Returns how many launches it took.
template <class T>
int emulate(const te_quantize_list_problem& problem, unsigned seed) {
  int launches = 0;
  Launch<T> launch{Source<T>(problem.xs[0]), {}, {}, 0, 0, {}};
  const auto amaxes = [&](const Launch<T>& one, float* parts, uint32_t of_one, uint32_t blocks) {
    run_blocks(blocks, kThreads, seed, [&] { quantize::list::list_amax_kernel<T>(one, parts, of_one); });
    ++launches;
  };
  quantize::list::for_launches("emulated", problem, launch, amaxes, [&](const Launch<T>& one, uint32_t blocks) {
    run_blocks(blocks, kThreads, seed + 1, [&] { quantize::list::list_kernel<T>(one); });
    ++launches;
  });
  return launches;
}

template <class T>
void check(const ListShape& s, const ListOptions& o, unsigned seed) {
  const std::string what = name_of(s, o) + " " + te_dtype_name(kDtype<T>);
  ListCase<T> c(TE_DEVICE_CPU, s, o, seed);
  if (::testing::Test::HasFatalFailure()) return;
  int launches = 0;
  ASSERT_NO_THROW(launches = emulate<T>(c.problem, seed)) << what;
  const int lists = (s.count + TE_QUANTIZE_LIST_MATRICES - 1) / TE_QUANTIZE_LIST_MATRICES;
  EXPECT_EQ(launches, lists * (o.scale == Scale::kCurrent ? 2 : 1)) << what;
  c.expect(what);
}

constexpr ListShape kShapes[] = {
    {5, 33, 48}, {4, 130, 136, 8}, {4, 5, 200, 3}, {3, 129, 31, 0, 144}, {2, 0, 16}, {2, 16, 0}, {4, 1, 1},
};

TEST(QuantizeKernels, ListsAsTheCpuPath) {
  unsigned seed = 1;
  for (const ListShape& s : kShapes) {
    for (const ListOptions& o : kListOptions) {
      ++seed;  // one dtype each, in turn
      seed % 3 == 0 ? check<float>(s, o, seed) : seed % 3 == 1 ? check<fp16>(s, o, seed) : check<bf16>(s, o, seed);
      if (HasFatalFailure()) return;
    }
  }
}

// More tiles than parts: a block of the amax pass has several.
TEST(QuantizeKernels, MoreTilesThanParts) {
  constexpr int64_t kTiles = TE_QUANTIZE_LIST_PARTS + 2, kCols = kTiles * 128;
  ListCase<bf16> c(TE_DEVICE_CPU, {1, 1, kCols}, {Scale::kCurrent}, 3);
  std::vector<bf16> values(size_t(kCols), from_float<bf16>(-0.5f));
  values[size_t((kTiles - 2) * 128 + 77)] = from_float<bf16>(-48.f);  // the second tile of a block
  c.x[0]->fill(values);
  EXPECT_EQ(emulate<bf16>(c.problem, 1), 2);
  EXPECT_EQ(c.amaxes.read()[0], 48.f);
  EXPECT_EQ(c.row_scales[0]->buffer.read()[size_t(c.row_scales[0]->pitch)], 1.f / (448.f / 48.f));
}

TEST(QuantizeKernels, MoreMatricesThanALaunchTakes) {
  check<fp16>({TE_QUANTIZE_LIST_MATRICES + 2, 2, 16}, {Scale::kDelayed}, 3);
}

TEST(QuantizeKernels, TheFlagLeavesEverything) {
  for (const ListOptions& o : kListOptions) {
    ListCase<bf16> c(TE_DEVICE_CPU, {3, 20, 40}, o, 3);
    c.problem.noop = c.noop.tensor();
    c.noop.fill({2.f});
    emulate<bf16>(c.problem, 1);
    c.expect_untouched("flag");
  }
}

// One matrix by te_quantize's own kernels, which lists share their tiles with.
template <class T>
void check_single(const ListShape& s, const ListOptions& o, unsigned seed) {
  ListCase<T> c(TE_DEVICE_CPU, s, o, seed);
  if (::testing::Test::HasFatalFailure()) return;
  const Source<T> source(c.xs[0]);
  const bool wide = quantize::cuda::is_wide(c.xs[0]);
  te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, o.pow_2, o.epsilon};
  Buffer<float> maxima(TE_DEVICE_CPU, 1, 3), scale(TE_DEVICE_CPU, 1, 1), amax(TE_DEVICE_CPU, 1, 1);
  scale.fill({c.start_scales[0]});
  amax.fill({c.start_amaxes[0]});
  if (o.scale == Scale::kDelayed) plan.scale = scale.tensor();
  if (o.scale == Scale::kCurrent) {
    const Domain domain{s.rows, s.cols, tiles_of(s.rows), tiles_of(s.cols), wide};
    run_blocks(2, kThreads, seed, [&] { quantize::amax_kernel<Source<T>>(source, domain, maxima.data(), 3, nullptr); });
    plan.amax_parts = maxima.tensor();
  }
  if (c.scaling() == TE_SCALING_TENSOR) plan.amax = amax.tensor();
  const Dests<1> dests{{Dest(plan, c.outs[0], s.rows, s.cols)}};
  const Domain domain = quantize::domain_of(s.rows, s.cols, wide, dests);
  const unsigned tiles = quantize::grid_of("emulated", domain.tile_rows * domain.tile_cols);
  run_blocks(tiles, kThreads, seed, [&] { quantize::quantize_kernel<Source<T>>(source, dests, domain); });
  if (c.scaling() == TE_SCALING_TENSOR) c.amaxes.fill({amax.read()[0], 5.f, 7.f});
  c.expect("one matrix " + name_of(s, o));
}

TEST(QuantizeKernels, OneMatrixAsTheCpuPath) {
  unsigned seed = 1;
  for (const ListShape& s : kShapes) {
    for (const ListOptions& o : kListOptions) {
      for_dtypes([&](auto t) {
        check_single<decltype(t)>({1, s.rows, s.cols, s.extra_pitch, s.extra_out}, o, ++seed);
      });
      if (HasFatalFailure()) return;
    }
  }
}

// The panels of 1 to 70 groups, each of 0 to 299 rows, as te_grouped_panels counts them on the CPU.
TEST(QuantizeKernels, PanelsAsTheCpuPath) {
  for (const int groups : {1, 2, 31, 32, 33, 70}) {
    std::mt19937 random{unsigned(groups)};
    std::vector<int32_t> offsets(1, 0);
    for (int g = 0; g < groups; ++g)
      offsets.push_back(offsets.back() + int32_t(random() % 2 == 0 ? 0 : random() % 300));
    int32_t want = -1, found = -2;
    TE_ASSERT_OK(te_grouped_panels(offsets.data(), groups, TE_DEVICE_CPU, &want, nullptr));
    run_blocks(1, quantize::grouped::kCountingThreads, 7,
               [&] { quantize::grouped::panels_kernel(offsets.data(), groups, &found); });
    EXPECT_EQ(found, want) << groups;
  }
}

}  // namespace
}  // namespace te
