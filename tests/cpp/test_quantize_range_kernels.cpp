// The kernels of ranges and of transposes themselves, on emulated blocks (emulated_quantize.h), against the CPU path:
// lists of all sizes, and the launches that they take.
#include "emulated_quantize.h"

#include <gtest/gtest.h>

#include <numeric>

#include "ops/quantize/range.cuh"
#include "ops/quantize/transpose.cuh"
#include "quantize_range_case.h"

namespace te {
namespace {

using namespace testing;
using quantize::Items;
using quantize::kMostItems;
using quantize::kThreads;
using quantize::RangeAmaxes;
using quantize::RangeCast;
using quantize::Transpose;

constexpr te_dtype kFloats[] = {TE_FLOAT32, TE_BFLOAT16, TE_FLOAT16};

void emulate(const te_quantize_range_list_problem& list, unsigned seed) {
  for (const te_dtype from : kFloats) {
    quantize::for_amaxes("emulated", list, from, [&](const Items<RangeAmaxes, kMostItems>& items, uint32_t blocks) {
      dispatch_float(from, "emulated", "x", [&](auto t) {
        run_blocks(blocks, kThreads, seed, [&] { quantize::range_amax_kernel<decltype(t), kMostItems>(items, true); });
      });
    });
  }
  for (const te_dtype from : kFloats) {
    for (const te_dtype to : {TE_FLOAT8_E4M3, TE_FLOAT8_E5M2}) {
      quantize::for_casts("emulated", list, from, to, [&](const Items<RangeCast, kMostItems>& items, uint32_t blocks) {
        dispatch_float(from, "emulated", "x", [&](auto t) {
          using T = decltype(t);
          run_blocks(blocks, kThreads, seed, [&] {
            to == TE_FLOAT8_E5M2 ? quantize::range_cast_kernel<T, true, kMostItems>(items)
                                 : quantize::range_cast_kernel<T, false, kMostItems>(items);
          });
        });
      });
    }
  }
}

TEST(QuantizeRangeKernels, ListsAsTheCpuPath) {
  for (const int32_t count : {1, 2, 5, 9}) {
    for (unsigned seed = 1; seed <= 3; ++seed) {
      RangeListCase c(TE_DEVICE_CPU, count, seed + unsigned(count) * 100);
      c.quantize_each();
      emulate(c.problem, seed);
      c.expect("count " + std::to_string(count) + ", seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  }
}

// Of one source and one kind of data: a launch for the amaxes and one for the casts, of 64 matrices each.
TEST(QuantizeRangeKernels, Launches) {
  RangeListCase c(TE_DEVICE_CPU, 1, 4);
  ASSERT_TRUE(c.ranges[0].x.cols > 0 && c.plans[0].amaxes.data != nullptr) << "draw another seed";
  for (const int32_t count : {1, kMostItems, kMostItems + 1, 2 * kMostItems + 1}) {
    const std::vector<te_quantize_range> ranges(size_t(count), c.ranges[0]);
    const std::vector<te_quantize_range_plan> plans(size_t(count), c.plans[0]);
    const std::vector<te_tensor> data(size_t(count), c.data[0]), inverses(size_t(count), c.scale_invs[0]);
    const te_quantize_range_list_problem list{count, ranges.data(), plans.data(), data.data(), inverses.data()};
    std::vector<int32_t> items;
    const auto note = [&](const auto& some, uint32_t) { items.push_back(some.count); };
    for (const te_dtype from : kFloats) {
      quantize::for_amaxes("emulated", list, from, note);
      for (const te_dtype to : {TE_FLOAT8_E4M3, TE_FLOAT8_E5M2}) quantize::for_casts("emulated", list, from, to, note);
    }
    EXPECT_EQ(items.size(), size_t(2 * ((count + kMostItems - 1) / kMostItems))) << count;
    EXPECT_EQ(std::accumulate(items.begin(), items.end(), 0), 2 * count);
  }
}

TEST(QuantizeRangeKernels, TransposesAsTheCpuPath) {
  for (const int32_t count : {1, 2, 5, 9, kMostItems + 2}) {
    for (unsigned seed = 1; seed <= (count < 10 ? 3u : 1u); ++seed) {
      TransposeListCase c(TE_DEVICE_CPU, count, seed + unsigned(count) * 100);
      int launches = 0;
      quantize::for_transposes("emulated", c.problem, [&](const Items<Transpose, kMostItems>& items, uint32_t blocks) {
        run_blocks(blocks, kThreads, seed, [&] { quantize::transpose_kernel<kMostItems>(items); });
        ++launches;
      });
      EXPECT_LE(launches, (count + kMostItems - 1) / kMostItems);
      c.expect("count " + std::to_string(count) + ", seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace te
