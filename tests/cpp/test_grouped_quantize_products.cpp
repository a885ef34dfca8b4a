// Grouped products of FP8 operands read the results of grouped quantize: y = x w^T and dw = dy^T x of each group, from
// integers and powers of two, which FP8, the scales and all sums hold without error. The sums are made here, in
// integers.
#include <gtest/gtest.h>

#include <memory>

#include "quantize_case.h"
#include "transformer_engine/grouped_gemm.h"
#include "transformer_engine/grouped_quantize.h"

namespace te {
namespace {

using namespace testing;

class GroupedQuantizeProducts : public ::testing::TestWithParam<int32_t> {};

INSTANTIATE_TEST_SUITE_P(On, GroupedQuantizeProducts, ::testing::ValuesIn(testing::devices()), testing::device_name);

constexpr int32_t kGroups = 4;
constexpr int64_t kRows = 300, kOutputs = 160, kInputs = 144, kPanels = (kRows - kGroups) / 128 + kGroups;
constexpr int32_t kOffsets[kGroups + 1] = {0, 131, 131, 140, 270};

std::vector<float> integers(int64_t n, unsigned seed) {
  std::mt19937 engine(seed);
  std::vector<float> out;
  for (int64_t i = 0; i < n; ++i) out.push_back(float(int(engine() % 7) - 3));
  return out;
}

// A matrix of grouped rows in FP8, in both directions.
struct Operand {
  Buffer<float> x;
  Buffer<uint8_t> rowwise, panels;
  Buffer<float> row_scales, panel_scales, parts;
  std::vector<float> values;
  te_tensor row_tensor, panel_tensor;

  Operand(int32_t device, te_scaling scaling, const int32_t* offsets, int64_t cols, unsigned seed)
      : x(device, kRows, cols),
        rowwise(device, kRows, cols),
        panels(device, kPanels * cols, 128),
        row_scales(device, scaling == TE_SCALING_TENSOR ? 1 : up(cols, 128) / 128,
                   scaling == TE_SCALING_TENSOR ? kGroups : kRows),
        panel_scales(device, scaling == TE_SCALING_TENSOR ? 1 : kPanels, scaling == TE_SCALING_TENSOR ? kGroups : cols),
        parts(device, 1, TE_GROUPED_QUANTIZE_PARTS + kGroups),
        values(integers(kRows * cols, seed)),
        row_tensor(rowwise.tensor(TE_FLOAT8_E4M3)),
        panel_tensor(panels.tensor(TE_FLOAT8_E4M3)) {
    x.fill(values);
    te_grouped_quantize_problem p{};
    p.x = x.tensor();
    p.groups = kGroups;
    p.offsets = offsets;
    p.scaling = scaling;
    p.rowwise = row_tensor;
    p.rowwise_scale_inv = row_scales.tensor();
    p.panels = panel_tensor;
    p.panels_scale_inv = panel_scales.tensor();
    p.pow_2_scales = 1;
    if (scaling == TE_SCALING_TENSOR) p.amax_parts = parts.tensor();
    TE_EXPECT_OK(te_grouped_quantize(&p, nullptr));
  }
};

// One for all groups: [N, K] in FP8.
struct Weight {
  Buffer<float> x, parts, scale_inv;
  Buffer<uint8_t> data;
  std::vector<float> values;

  Weight(int32_t device, te_scaling scaling)
      : x(device, kOutputs, kInputs),
        parts(device, 1, TE_QUANTIZE_PARTS),
        scale_inv(device, scaling == TE_SCALING_TENSOR ? 1 : 2, scaling == TE_SCALING_TENSOR ? 1 : 4),
        data(device, kOutputs, kInputs),
        values(integers(kOutputs * kInputs, 9)) {
    x.fill(values);
    te_quantize_plan plan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, 1, 0};
    if (scaling == TE_SCALING_TENSOR) {
      TE_EXPECT_OK(te_quantize_amax(x.tensor(), parts.tensor(), kAbsent, nullptr));
      plan.amax_parts = parts.tensor();
    }
    const te_quantized out{scaling == TE_SCALING_TENSOR ? TE_SCALING_TENSOR : TE_SCALING_BLOCK_2D,
                           data.tensor(TE_FLOAT8_E4M3), kAbsent, scale_inv.tensor(), kAbsent};
    TE_EXPECT_OK(te_quantize(&plan, x.tensor(), &out, nullptr));
  }
};

class Products {
 public:
  Products(int32_t device, te_scaling scaling)
      : device_(device),
        scaling_(scaling),
        offsets_(device, 1, kGroups + 1),
        made_(fill()),
        x_(device, scaling, offsets_.data(), kInputs, 1),
        dy_(device, scaling, offsets_.data(), kOutputs, 2) {}

  te_status forward() {
    const Weight weight(device_, scaling_);
    const std::vector<te_tensor> weights(kGroups, weight.data.tensor(TE_FLOAT8_E4M3));
    const std::vector<te_tensor> scales(kGroups, weight.scale_inv.tensor());
    Buffer<float> y(device_, kRows, kOutputs);
    te_grouped_gemm_problem p = problem(TE_GROUPED_FPROP, x_.row_tensor, x_.row_scales.tensor());
    p.weights = weights.data();
    p.weights_scale_inv = scales.data();
    p.result = y.tensor();
    const te_status status = te_grouped_gemm(&p, nullptr);
    if (status != TE_SUCCESS) return status;
    const std::vector<float> got = y.read();
    for (int64_t r = 0; r < kOffsets[kGroups]; ++r) {
      for (int64_t n = 0; n < kOutputs; ++n) {
        int want = 0;
        for (int64_t k = 0; k < kInputs; ++k) {
          want += int(x_.values[size_t(r * kInputs + k)]) * int(weight.values[size_t(n * kInputs + k)]);
        }
        if (got[size_t(r * kOutputs + n)] == float(want)) continue;
        ADD_FAILURE() << "y at " << r << ", " << n << ": " << got[size_t(r * kOutputs + n)] << ", wanted " << want;
        return status;
      }
    }
    return status;
  }

  te_status weight_gradient() {
    std::vector<std::unique_ptr<Buffer<float>>> buffers;
    std::vector<te_tensor> results;
    for (int32_t g = 0; g < kGroups; ++g) {
      buffers.push_back(std::make_unique<Buffer<float>>(device_, kOutputs, kInputs));
      results.push_back(buffers.back()->tensor());
    }
    te_grouped_gemm_problem p = problem(TE_GROUPED_WGRAD, dy_.panel_tensor, dy_.panel_scales.tensor());
    p.depth_rows = x_.panel_tensor;
    p.depth_rows_scale_inv = x_.panel_scales.tensor();
    p.results = results.data();
    const te_status status = te_grouped_gemm(&p, nullptr);
    if (status != TE_SUCCESS) return status;
    for (int32_t g = 0; g < kGroups; ++g) {
      const std::vector<float> got = buffers[size_t(g)]->read();
      for (int64_t i = 0; i < kOutputs * kInputs; ++i) {
        int want = 0;
        for (int64_t r = kOffsets[g]; r < kOffsets[g + 1]; ++r) {
          want +=
              int(dy_.values[size_t(r * kOutputs + i / kInputs)]) * int(x_.values[size_t(r * kInputs + i % kInputs)]);
        }
        if (got[size_t(i)] == float(want)) continue;
        ADD_FAILURE() << "dw of group " << g << " at " << i << ": " << got[size_t(i)] << ", wanted " << want;
        return status;
      }
    }
    return status;
  }

 private:
  bool fill() {
    offsets_.fill({kOffsets, kOffsets + kGroups + 1});
    return true;
  }
  te_grouped_gemm_problem problem(te_grouped_product product, const te_tensor& rows, const te_tensor& scales) const {
    te_grouped_gemm_problem p{};
    p.product = product;
    p.groups = kGroups;
    p.offsets = offsets_.data();
    p.rows = rows;
    p.scaling = scaling_;
    p.rows_scale_inv = scales;
    return p;
  }

  int32_t device_;
  te_scaling scaling_;
  Buffer<int32_t> offsets_;
  bool made_;  // the offsets, before operands are made by them
  Operand x_, dy_;
};

TEST_P(GroupedQuantizeProducts, AreThoseOfTheValues) {
  for (const te_scaling scaling : {TE_SCALING_BLOCK_1D, TE_SCALING_TENSOR}) {
    Products products(GetParam(), scaling);
    const te_status status = products.forward();
    if (status == TE_NOT_IMPLEMENTED) GTEST_SKIP() << te_last_error();  // no Hopper
    EXPECT_EQ(status, TE_SUCCESS) << te_last_error();
    EXPECT_EQ(products.weight_gradient(), TE_SUCCESS) << te_last_error();
  }
}

}  // namespace
}  // namespace te
