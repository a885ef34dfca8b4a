// The grouped kernels themselves on emulated Hopper blocks (emulated_gpu.h): plan, tables, walk, ring of stages,
// descriptors, fragments, tails and epilogues, against the CPU path. Operands are small integers, whose sums are exact
// in float32, so that every result must be equal bit for bit whatever the order. Mutants: kBoxBytes for kSwizzleAtom
// in descriptor(), first_piece + 1 in clear_tail_k, an arrival before wgmma_wait.
#include "emulated_sm90.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "emulated_grouped.h"
#include "grouped_case.h"
#include "ops/gemm/grouped/launches.h"

namespace te {
namespace {

using gemm::sm90::Major;
using testing::EmulatedGrouped;
using testing::GroupedCase;
using testing::GroupedShape;
using testing::same;

// The same problem on the CPU and on the emulated GPU.
template <class T, class D>
void compare(te_grouped_product product, const GroupedShape& s, int sms,
             const std::function<void(GroupedCase<T, D>&)>& change) {
  const std::string name = concat(name_of(s, product), ", ", sms, " multiprocessors");
  GroupedCase<T, D> want(TE_DEVICE_CPU, product, s), got(TE_DEVICE_CPU, product, s);
  for (GroupedCase<T, D>* c : {&want, &got}) {
    testing::fill_with_integers(*c);
    change(*c);
  }
  TE_ASSERT_OK(te_grouped_gemm(&want.problem, nullptr));
  const gemm::grouped::ProblemShape e{s.rows(), s.n, s.k};
  const EmulatedGrouped gpu{sms, 7};
  ASSERT_NO_THROW(product == TE_GROUPED_WGRAD ? launch_wgrads(got.problem, e, gpu) : launch_rows(got.problem, e, gpu))
      << name;
  if (product != TE_GROUPED_WGRAD) {
    EXPECT_TRUE(same(want.row_result().read(), got.row_result().read())) << name;
    EXPECT_TRUE(got.row_result().padding_untouched()) << name;
    return;
  }
  for (size_t g = 0; g < got.results.size(); ++g) {
    EXPECT_TRUE(same(want.results[g]->read(), got.results[g]->read())) << name << " group " << g;
    EXPECT_TRUE(got.results[g]->padding_untouched()) << name << " group " << g;
  }
}

// Written out, since an emulation made of the same reading of the tables would share a mistake: start, leading and
// stride offsets in units of 16 bytes, 1 << 62 for 128-byte swizzle.
TEST(GroupedKernels, Descriptors) {
  using gemm::sm90::descriptor;
  EXPECT_EQ(descriptor(Major::kK, 0x12400), 0x4000004000011240u);
  EXPECT_EQ(descriptor(Major::kMN, 0x12400), 0x4000004002001240u);
  EXPECT_EQ(gemm::sm90::descriptor_step(Major::kK), 2u);
  EXPECT_EQ(gemm::sm90::descriptor_step(Major::kMN), 128u);
}

const GroupedShape kShapes[] = {{{1}, 0, 1, 1},
                                {{0}, 3, 8, 8},
                                {{5, 0, 3}, 0, 17, 33, 3},
                                {{0, 64, 64, 0}, 5, 24, 40},
                                {{63, 1, 65, 0, 130}, 7, 72, 64, 8},
                                {{129, 128}, 140, 257, 70, 1}};

TEST(GroupedKernels, Fprop) {
  for (const GroupedShape& s : kShapes) {
    for (const bool bias : {false, true}) {
      compare<bf16, bf16>(TE_GROUPED_FPROP, s, bias ? 2 : 132, [&](auto& c) {
        if (bias) c.with_bias();
        c.problem.zero_tail = bias;
      });
    }
  }
  compare<fp16, fp16>(TE_GROUPED_FPROP, {{30, 40}, 0, 300, 330}, 2, [](auto&) {});
}

// Weights that are one matrix together are read by one map. The weights of a group without rows are NaN, which a box of
// the weights before them has too.
TEST(GroupedKernels, StackedWeights) {
  int stacked = 0;
  const auto stack = [&](auto& c) {
    for (size_t g = 0; g < c.weights.size(); ++g) {
      if (c.shape.splits[g] == 0) c.weights[g]->poison();
    }
    c.stack();
    stacked += gemm::grouped::are_stacked(c.problem);
  };
  for (const te_grouped_product product : {TE_GROUPED_FPROP, TE_GROUPED_DGRAD}) {
    for (const GroupedShape& s : kShapes) {
      compare<bf16, bf16>(product, s, 2, [&](auto& c) {
        if (product == TE_GROUPED_FPROP) c.with_bias();
        stack(c);
      });
    }
    compare<bf16, bf16>(product, {{63, 1, 65, 0, 130}, 7, 192, 72, 8}, 2, stack);
    compare<fp16, fp16>(product, {{30, 0, 40}, 2, 320, 300}, 1, stack);
    compare<fp16, fp16>(product, {{5, 7}, 2, 64, 0}, 2, stack);
    GroupedShape many{{}, 9, 64, 24};
    for (int32_t g = 0; g < 300; ++g) many.splits.push_back(g % 9 == 0 ? 3 : 0);
    compare<bf16, bf16>(product, many, 4, stack);
  }
  EXPECT_EQ(stacked, 2 * (7 + 3));  // of several groups, in DGRAD of whole boxes
}

TEST(GroupedKernels, WhichWeightsAreStacked) {
  const auto stacked = [](te_grouped_product product, int64_t n, const auto& change) {
    GroupedCase<bf16, bf16> c(TE_DEVICE_CPU, product, {{3, 4, 5}, 0, n, 40});
    if (product == TE_GROUPED_FPROP) c.with_bias();
    c.stack();
    change(c);
    return gemm::grouped::are_stacked(c.problem);
  };
  const auto nothing = [](auto&) {};
  EXPECT_TRUE(stacked(TE_GROUPED_FPROP, 24, nothing));
  EXPECT_TRUE(stacked(TE_GROUPED_DGRAD, 64, nothing));
  EXPECT_FALSE(stacked(TE_GROUPED_DGRAD, 72, nothing)) << "a box of the depth would have rows of the next weight";
  const auto moved = [](te_tensor& t, int64_t elements) { t.data = static_cast<bf16*>(t.data) + elements; };
  for (const size_t g : {0, 1, 2}) {
    EXPECT_FALSE(stacked(TE_GROUPED_FPROP, 24, [&](auto& c) { moved(c.weight_tensors[g], 8); })) << g;
    EXPECT_FALSE(stacked(TE_GROUPED_FPROP, 24, [&](auto& c) { moved(c.bias_tensors[g], 8); })) << g;
  }
  EXPECT_FALSE(stacked(TE_GROUPED_FPROP, 24, [&](auto& c) {
    for (const size_t g : {1, 2}) moved(c.weight_tensors[g], 40 * int64_t(g));  // a row more between them
  }));
  for (const size_t g : {0, 1, 2}) {
    EXPECT_FALSE(stacked(TE_GROUPED_FPROP, 24, [&](auto& c) { c.weight_tensors[g].row_pitch += 8; })) << g;
  }
  EXPECT_FALSE(stacked(TE_GROUPED_FPROP, 24, [](auto& c) { std::swap(c.weight_tensors[0], c.weight_tensors[2]); }));
}

TEST(GroupedKernels, NothingToReduce) {
  for (const bool bias : {false, true}) {
    compare<bf16, bf16>(TE_GROUPED_FPROP, {{3, 0, 2}, 2, 9, 0}, 4, [&](auto& c) {
      if (bias) c.with_bias();
    });
  }
  compare<bf16, bf16>(TE_GROUPED_DGRAD, {{3, 0, 200}, 2, 0, 150}, 4, [](auto& c) { c.problem.zero_tail = 1; });
  compare<bf16, float>(TE_GROUPED_WGRAD, {{0, 0}, 0, 150, 300}, 4, [](auto&) {});
}

TEST(GroupedKernels, Dgrad) {
  for (const GroupedShape& s : kShapes) {
    compare<bf16, bf16>(TE_GROUPED_DGRAD, s, 2, [](auto& c) { c.problem.zero_tail = 1; });
  }
  compare<fp16, fp16>(TE_GROUPED_DGRAD, {{30, 40}, 2, 330, 300}, 1, [](auto&) {});
}

template <class T, class D>
void weight_gradients() {
  for (const GroupedShape& s : kShapes) {
    for (const bool add : {false, true}) {
      std::vector<uint8_t> accumulate(size_t(s.groups()), add);
      if (s.groups() > 2) accumulate[1] = 1 - accumulate[1];
      compare<T, D>(TE_GROUPED_WGRAD, s, 2, [&](auto& c) {
        c.problem.accumulate = accumulate.data();
        if (s.groups() > 3) c.result_tensors[1].data = nullptr;
      });
    }
  }
}

TEST(GroupedKernels, WgradToFloat) { weight_gradients<bf16, float>(); }
TEST(GroupedKernels, WgradToSixteenBits) { weight_gradients<fp16, fp16>(); }

// Other groups' rows and those after the last one are NaN, where a group's K ends in the middle of a k_block.
TEST(GroupedKernels, StrangersInTheLastBlockOfTheDepth) {
  const GroupedShape s{{33, 70, 1, 64, 20}, 30, 140, 90};
  for (const size_t clean : {0, 1, 2, 3, 4}) {
    GroupedCase<bf16, float> want(TE_DEVICE_CPU, TE_GROUPED_WGRAD, s), got(TE_DEVICE_CPU, TE_GROUPED_WGRAD, s);
    testing::fill_with_integers(want);
    testing::fill_with_integers(got);
    const auto spoil = [&](std::vector<bf16>& values, int64_t cols) {
      for (int64_t row = 0; row < s.rows(); ++row) {
        if (row >= got.offsets[clean] && row < got.offsets[clean + 1]) continue;
        std::fill_n(values.begin() + row * cols, cols, from_float<bf16>(std::nanf("")));
      }
    };
    spoil(got.x_values, s.k);
    spoil(got.dy_values, s.n);
    got.x.fill(got.x_values);
    got.dy.fill(got.dy_values);
    TE_ASSERT_OK(te_grouped_gemm(&want.problem, nullptr));
    gemm::grouped::launch_wgrads(got.problem, {s.rows(), s.n, s.k}, EmulatedGrouped{3, unsigned(clean)});
    EXPECT_TRUE(same(want.results[clean]->read(), got.results[clean]->read())) << clean;
  }
}

// K for which red.global adds, in full tiles and in others, with a second group of smaller K.
TEST(GroupedKernels, DeepWgradThatAdds) {
  const std::vector<uint8_t> accumulate = {1, 1};
  compare<bf16, float>(TE_GROUPED_WGRAD, {{1000, 70}, 0, 70, 300}, 2,
                       [&](auto& c) { c.problem.accumulate = accumulate.data(); });
}

// More tiles than stages and than blocks, several bands of row tiles, more groups than a launch takes.
TEST(GroupedKernels, LongWalks) {
  compare<bf16, bf16>(TE_GROUPED_FPROP, {{1300, 0, 200}, 3, 300, 72}, 3, [](auto&) {});
  compare<bf16, float>(TE_GROUPED_WGRAD, {{70, 600}, 0, 300, 600}, 2, [](auto&) {});
  GroupedShape many{{}, 9, 40, 24};
  for (int32_t g = 0; g < 300; ++g) many.splits.push_back(g % 9 == 0 ? 3 : 0);
  compare<bf16, bf16>(TE_GROUPED_FPROP, many, 4, [](auto& c) { c.problem.zero_tail = 1; });
  compare<bf16, float>(TE_GROUPED_WGRAD, many, 8, [](auto&) {});
}

}  // namespace
}  // namespace te
