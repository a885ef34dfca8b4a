// The grouped kernels of FP8 operands on emulated Hopper blocks (emulated_gpu.h), bit for bit: exact operands against
// the CPU path, any operands against the header's formula in float32, whose order the kernels keep. (Hopper's FP8
// tensor cores keep fewer bits of a partial sum, so on a GPU the latter is within test_grouped_fp8's bound.) What
// belongs to no group, scales too, is NaN. Mutants: partial sums that go on from block to block (`true` for `i > 0`),
// scales of the row beside (`+ 1` on fragment_row), of the block before (load(block) in next()), a release before
// wgmma_wait, no order.wait(), boxes of the panel beside.
#include "emulated_sm90.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "emulated_grouped.h"
#include "grouped_fp8_case.h"
#include "ops/gemm/grouped/launches_fp8.h"
#include "ops/gemm/grouped/traits_fp8.cuh"

namespace te {
namespace {

using gemm::grouped::Fp8RowKernelTraits;
using gemm::grouped::Fp8RowParams;
using gemm::grouped::Fp8WgradKernelTraits;
using gemm::grouped::Fp8WgradParams;
using gemm::grouped::StagedFp8RowKernelTraits;
using gemm::grouped::StagedFp8RowParams;
using gemm::grouped::StagedFp8WgradKernelTraits;
using gemm::grouped::StagedFp8WgradParams;
using gemm::sm90::BlockScales;
using gemm::sm90::GroupScale;
using gemm::sm90::PanelScales;
using testing::Draw;
using testing::Fp8Case;
using testing::GroupedShape;
using testing::same;

template <class Left>
struct EmulatedGpu : testing::EmulatedGrouped {
  te_scaling scaling;

  void rows_fp8(const Fp8RowParams& p, int32_t ctas) const {
    if (scaling == TE_SCALING_BLOCK_1D) return start<Fp8RowKernelTraits<Left, BlockScales>>(p, ctas);
    start<Fp8RowKernelTraits<Left, GroupScale>>(p, ctas);
  }
  void wgrad_fp8(const Fp8WgradParams& p, int32_t ctas) const {
    if (scaling == TE_SCALING_BLOCK_1D) return start<Fp8WgradKernelTraits<Left, PanelScales<Fp8WgradParams>>>(p, ctas);
    start<Fp8WgradKernelTraits<Left, GroupScale>>(p, ctas);
  }
  void staged_rows_fp8(const StagedFp8RowParams& p, int32_t ctas) const {
    if (scaling == TE_SCALING_BLOCK_1D) return start<StagedFp8RowKernelTraits<Left, BlockScales>>(p, ctas);
    start<StagedFp8RowKernelTraits<Left, GroupScale>>(p, ctas);
  }
  void staged_wgrad_fp8(const StagedFp8WgradParams& p, int32_t ctas) const {
    using Panels = PanelScales<Fp8WgradParams>;
    if (scaling == TE_SCALING_BLOCK_1D) return start<StagedFp8WgradKernelTraits<Left, Panels>>(p, ctas);
    start<StagedFp8WgradKernelTraits<Left, GroupScale>>(p, ctas);
  }
};

template <class Left, class D>
void launch(Fp8Case<Left, D>& c, int sms, unsigned seed) {
  const GroupedShape& s = c.shape;
  gemm::grouped::ProblemShape e{s.rows(), s.n, s.k};
  if (c.wgrad()) e.rows = c.panels() * 128, e.panels = c.panels();
  const EmulatedGpu<Left> gpu{{sms, seed}, c.scaling};
  c.wgrad() ? launch_wgrads_fp8(c.problem, e, gpu) : launch_rows_fp8(c.problem, e, gpu);
}

// Rows of groups must equal the formula; rows after the last group are zeros, or unchanged.
template <class Left, class D>
void check_formula(Fp8Case<Left, D>& c, const std::string& name) {
  int64_t wrong = 0;
  const auto differ = [&](D got, D want) { wrong += std::memcmp(&got, &want, sizeof(D)) != 0; };
  if (!c.wgrad()) {
    testing::for_rows(c, [&](D got, int32_t g, int64_t i, int64_t col) {
      if (g < 0) return;
      const float bias = c.bias_values.empty() ? 0.f : float(c.bias_values[size_t(g)][size_t(col)]);
      differ(got, from_float<D>(c.sum(g, i, col).formula + bias));
    });
  }
  for (int32_t g = 0; g < c.shape.groups() && c.wgrad(); ++g) {
    if (c.result_tensors[size_t(g)].data == nullptr) continue;
    const bool add = c.problem.accumulate != nullptr && c.problem.accumulate[g] != 0;
    const std::vector<D> got = c.results[size_t(g)]->read();
    for (size_t i = 0; i < got.size(); ++i) {
      const float sum = c.sum(g, int64_t(i) / c.shape.k, int64_t(i) % c.shape.k).formula;
      differ(got[i], from_float<D>(add ? float(c.old_values[size_t(g)][i]) + sum : sum));
    }
  }
  EXPECT_EQ(wrong, 0) << name;
}

// The same problem by the CPU path and by the kernels; then any operands by the formula.
template <class Left, class D>
void compare(te_grouped_product product, te_scaling scaling, const GroupedShape& s, int sms,
             const std::function<void(Fp8Case<Left, D>&)>& change) {
  const std::string name = concat(name_of(s, product), testing::scaling_name(scaling), ", ", sms, " multiprocessors");
  Fp8Case<Left, D> want(TE_DEVICE_CPU, product, scaling, s, Draw::kExact);
  Fp8Case<Left, D> got(TE_DEVICE_CPU, product, scaling, s, Draw::kExact);
  Fp8Case<Left, D> any(TE_DEVICE_CPU, product, scaling, s, Draw::kAny);
  for (Fp8Case<Left, D>* c : {&want, &got, &any}) {
    if (c->wgrad()) c->fill_results();
    change(*c);
  }
  TE_ASSERT_OK(te_grouped_gemm(&want.problem, nullptr));
  ASSERT_NO_THROW(launch(got, sms, 7)) << name;
  ASSERT_NO_THROW(launch(any, sms, 11)) << name;
  check_formula(any, name);
  if (!got.wgrad()) {
    EXPECT_TRUE(same(want.result->read(), got.result->read())) << name;
    EXPECT_TRUE(got.result->padding_untouched()) << name;
    return;
  }
  for (size_t g = 0; g < got.results.size(); ++g) {
    EXPECT_TRUE(same(want.results[g]->read(), got.results[g]->read())) << name << " group " << g;
    EXPECT_TRUE(got.results[g]->padding_untouched()) << name << " group " << g;
  }
}

const GroupedShape kShapes[] = {{{1}, 0, 1, 1},
                                {{0}, 3, 16, 16},
                                {{5, 0, 3}, 0, 17, 33, 3},
                                {{0, 128, 64, 0}, 5, 24, 272},
                                {{63, 1, 65, 0, 260}, 7, 136, 130, 1},
                                {{129, 128}, 140, 257, 140}};

// N = 257, K = 140: of one pair of tiles, one block has no columns.
TEST(GroupedFp8Kernels, Fprop) {
  for (const GroupedShape& s : kShapes) {
    compare<e4m3, bf16>(TE_GROUPED_FPROP, TE_SCALING_BLOCK_1D, s, 2, [](auto& c) {
      c.with_bias();
      c.problem.zero_tail = 1;
    });
    compare<e4m3, fp16>(TE_GROUPED_FPROP, TE_SCALING_TENSOR, s, 132, [](auto&) {});
  }
  compare<e4m3, float>(TE_GROUPED_FPROP, TE_SCALING_BLOCK_1D, {{30, 40}, 3, 300, 330}, 2, [](auto& c) {
    c.with_bias();
    c.problem.zero_tail = 1;
  });
  compare<e4m3, fp16>(TE_GROUPED_FPROP, TE_SCALING_TENSOR, {{30, 40}, 3, 40, 33}, 2, [](auto& c) { c.with_bias(); });
}

TEST(GroupedFp8Kernels, Dgrad) {
  for (const GroupedShape& s : kShapes) {
    compare<e5m2, bf16>(TE_GROUPED_DGRAD, TE_SCALING_BLOCK_1D, s, 2, [](auto&) {});
    compare<e4m3, bf16>(TE_GROUPED_DGRAD, TE_SCALING_TENSOR, s, 2, [](auto& c) { c.problem.zero_tail = 1; });
  }
}

template <class Left, class D>
void weight_gradients(te_scaling scaling) {
  for (const GroupedShape& s : kShapes) {
    for (const bool add : {false, true}) {
      std::vector<uint8_t> accumulate(size_t(s.groups()), add);
      if (s.groups() > 2) accumulate[1] = 1 - accumulate[1];
      compare<Left, D>(TE_GROUPED_WGRAD, scaling, s, 2, [&](auto& c) {
        c.problem.accumulate = accumulate.data();
        if (s.groups() > 3) c.result_tensors[1].data = nullptr;
      });
    }
  }
}

TEST(GroupedFp8Kernels, WgradInBlocks) { weight_gradients<e5m2, float>(TE_SCALING_BLOCK_1D); }
TEST(GroupedFp8Kernels, WgradOfOneScale) { weight_gradients<e4m3, bf16>(TE_SCALING_TENSOR); }

// Results that leave by TMA: more tiles than stages, groups that end within a box, rows and columns that one consumer
// or one block does not have, pitches above the columns. N = 264 and K = 136: one block of the last pair has no
// columns.
TEST(GroupedFp8Kernels, Staged) {
  const std::vector<int32_t> splits = {129, 0, 1, 128, 300, 64};
  const GroupedShape rows{splits, 5, 264, 136, 8}, weights{splits, 0, 300, 136, 8};
  compare<e4m3, bf16>(TE_GROUPED_FPROP, TE_SCALING_BLOCK_1D, rows, 2, [](auto& c) {
    c.with_bias();
    c.problem.zero_tail = 1;
  });
  compare<e4m3, fp16>(TE_GROUPED_FPROP, TE_SCALING_TENSOR, rows, 4, [](auto& c) { c.with_bias(); });
  compare<e5m2, bf16>(TE_GROUPED_DGRAD, TE_SCALING_BLOCK_1D, {splits, 5, 72, 392}, 2, [](auto&) {});
  for (const te_scaling scaling : {TE_SCALING_BLOCK_1D, TE_SCALING_TENSOR}) {
    const std::vector<uint8_t> all(splits.size(), 1), some = {1, 0, 0, 1, 1, 0};
    for (const std::vector<uint8_t>& add : {all, some}) {
      compare<e5m2, float>(TE_GROUPED_WGRAD, scaling, weights, 2, [&](auto& c) { c.problem.accumulate = add.data(); });
      compare<e4m3, fp16>(TE_GROUPED_WGRAD, scaling, weights, 2, [&](auto& c) {
        c.problem.accumulate = add.data();
        c.result_tensors[3].data = nullptr;
      });
    }
  }
}

// TMA stores multiples of 16 bytes to multiples of 16 bytes.
TEST(GroupedFp8Kernels, WhichResultsAreStaged) {
  const EmulatedGpu<e4m3> gpu{{2, 1}, TE_SCALING_TENSOR};
  alignas(16) unsigned char memory[32];
  const auto is_staged = [&](te_dtype dtype, int64_t cols, int64_t pitch, bool add, int offset) {
    return gemm::grouped::is_staged(gpu, te_tensor{memory + offset, 3, cols, pitch, dtype, TE_DEVICE_CPU}, add);
  };
  for (const te_dtype dtype : {TE_BFLOAT16, TE_FLOAT16, TE_FLOAT32}) {
    const bool add = dtype == TE_FLOAT32;
    EXPECT_TRUE(is_staged(dtype, 24, 32, add, 0));
    EXPECT_FALSE(is_staged(dtype, 24, 32, !add, 0)) << "slower";
    EXPECT_FALSE(is_staged(dtype, 25, 32, add, 0)) << "columns";
    EXPECT_FALSE(is_staged(dtype, 24, 33, add, 0)) << "pitch";
    EXPECT_FALSE(is_staged(dtype, 24, 32, add, 4)) << "address";
  }
}

TEST(GroupedFp8Kernels, NothingToReduce) {
  for (const te_scaling scaling : {TE_SCALING_BLOCK_1D, TE_SCALING_TENSOR}) {
    compare<e4m3, bf16>(TE_GROUPED_FPROP, scaling, {{3, 0, 2}, 2, 9, 0}, 4, [](auto& c) { c.with_bias(); });
    compare<e4m3, float>(TE_GROUPED_WGRAD, scaling, {{0, 0}, 0, 150, 300}, 4, [](auto&) {});
  }
}

// More than 32 blocks of the depth, whose weights' scales are 32 lanes' loads.
TEST(GroupedFp8Kernels, DeepProducts) {
  compare<e4m3, float>(TE_GROUPED_FPROP, TE_SCALING_BLOCK_1D, {{5}, 0, 9, 128 * 66 + 5}, 2, [](auto&) {});
}

// More tiles than stages and than blocks, several bands of row tiles, more groups than a launch takes.
TEST(GroupedFp8Kernels, LongWalks) {
  compare<e4m3, bf16>(TE_GROUPED_FPROP, TE_SCALING_BLOCK_1D, {{2200, 0, 300}, 3, 300, 200}, 3, [](auto&) {});
  compare<e4m3, float>(TE_GROUPED_WGRAD, TE_SCALING_BLOCK_1D, {{70, 1100}, 0, 300, 600}, 2, [](auto&) {});
  GroupedShape many{{}, 9, 40, 24};
  for (int32_t g = 0; g < 300; ++g) many.splits.push_back(g % 9 == 0 ? 3 : g == 100 ? 140 : 0);
  for (const te_scaling scaling : {TE_SCALING_BLOCK_1D, TE_SCALING_TENSOR}) {
    compare<e4m3, bf16>(TE_GROUPED_FPROP, scaling, many, 4, [](auto& c) { c.problem.zero_tail = 1; });
    compare<e4m3, float>(TE_GROUPED_WGRAD, scaling, many, 8, [](auto&) {});
  }
}

// Invalid offsets read nothing outside of the tensors, and write nothing there.
TEST(GroupedFp8Kernels, WildOffsets) {
  const std::vector<int32_t> wrong[] = {{5, 4, 1}, {0, 1 << 30, 1 << 30}, {0, -1, 8}, {1 << 30, 0, 1 << 30}};
  for (const std::vector<int32_t>& offsets : wrong) {
    for (const te_grouped_product product : {TE_GROUPED_FPROP, TE_GROUPED_WGRAD}) {
      Fp8Case<e4m3, float> c(TE_DEVICE_CPU, product, TE_SCALING_BLOCK_1D, {{4, 4}, 1, 16, 24}, Draw::kExact);
      c.device_offsets->fill(offsets);
      c.problem.offsets = c.device_offsets->data();
      ASSERT_NO_THROW(launch(c, 2, 5));
      EXPECT_TRUE(c.wgrad() ? c.results[0]->padding_untouched() : c.result->padding_untouched());
    }
  }
}

// NaN in one group does not reach another.
TEST(GroupedFp8Kernels, NanStaysInItsGroup) {
  const GroupedShape s{{33, 140, 1, 64}, 30, 140, 90};
  for (const te_grouped_product product : {TE_GROUPED_FPROP, TE_GROUPED_DGRAD, TE_GROUPED_WGRAD}) {
    Fp8Case<e4m3, float> c(TE_DEVICE_CPU, product, TE_SCALING_BLOCK_1D, s, Draw::kAny);
    const int64_t cols = product == TE_GROUPED_FPROP ? s.k : s.n, pitch = c.problem.rows.row_pitch;
    auto* bytes = static_cast<uint8_t*>(c.problem.rows.data);
    const int64_t first = c.wgrad() ? c.panels_before[1] * cols : c.offsets[1];
    const int64_t last = c.wgrad() ? c.panels_before[2] * cols : c.offsets[2];
    std::fill(bytes + first * pitch, bytes + last * pitch, uint8_t(0x7f));
    launch(c, 2, 3);
    int64_t wrong = 0;
    if (c.wgrad()) {
      for (const size_t g : {0, 2, 3}) {
        for (const float v : c.results[g]->read()) wrong += std::isnan(v);
      }
    } else {
      testing::for_rows(c, [&](float v, int32_t g, int64_t, int64_t) { wrong += g >= 0 && std::isnan(v) != (g == 1); });
    }
    EXPECT_EQ(wrong, 0) << name_of(s, product);
  }
}

}  // namespace
}  // namespace te
