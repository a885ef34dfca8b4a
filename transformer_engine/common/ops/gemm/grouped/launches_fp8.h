// What grouped kernels of FP8 operands are told of a problem, as launches.h says it of others.
#pragma once

#include "ops/gemm/grouped/launches.h"
#include "ops/gemm/grouped/params_fp8.h"

namespace te::gemm::grouped {

constexpr int kFp8BoxLines = 128;  // of each operand, one block's part of a tile
static_assert(RowTile::kRows / wgmma::kCluster == kFp8BoxLines && RowTile::kCols == kFp8BoxLines);

// The scales of a launch whose first group is `first`.
inline const float* scales_from(const te_grouped_gemm_problem& p, const te_tensor& scales, int32_t first) {
  const auto* data = static_cast<const float*>(scales.data);
  return p.scaling == TE_SCALING_TENSOR ? data + first : data;
}

template <class Gpu>
void launch_fp8_row_product(const te_grouped_gemm_problem& p, const Extents& e, const Gpu& gpu) {
  const int64_t cols = p.result.cols, depth = p.rows.cols;
  if (e.rows == 0 || cols == 0) return;
  const auto params = std::make_unique<Fp8RowParams>();
  params->row_scales_pitch = p.rows_scale_inv.row_pitch;
  params->weight_scales_pitch = p.weights_scale_inv[0].cols;
  params->result = p.result.data;
  params->pitch = p.result.row_pitch;
  params->dtype = p.result.dtype;
  params->cols = int32_t(cols);
  params->depth = int32_t(depth);
  params->wide = gpu.wide(p.result);
  if (depth > 0) params->left = gpu.map(p.rows, kFp8BoxLines);
  for_launches(p.groups, kFp8LaunchGroups, [&](int32_t first, int32_t groups) {
    for (int32_t g = 0; g < groups; ++g) {
      if (depth > 0) params->weights[g] = gpu.map(p.weights[first + g], kFp8BoxLines);
      params->biases[g] = p.biases != nullptr ? p.biases[first + g].data : nullptr;
      params->weight_scales[g] = static_cast<const float*>(p.weights_scale_inv[first + g].data);
    }
    params->row_scales = scales_from(p, p.rows_scale_inv, first);
    params->common = {p.offsets + first, groups, int32_t(e.rows)};
    params->zero_tail = p.zero_tail != 0 && first + groups == p.groups;
    const int64_t row_tiles = e.rows / RowTile::kRows + groups;
    gpu.fp8_rows(*params, blocks_of(gpu, row_tiles * row_product_col_pairs(cols)));
  });
}

template <class Gpu>
void launch_fp8_weight_gradients(const te_grouped_gemm_problem& p, const Extents& e, const Gpu& gpu) {
  if (e.n == 0 || e.k == 0) return;
  Fp8WeightParams params{};
  if (e.panels > 0) {
    params.left = gpu.map(p.rows, kFp8BoxLines);
    params.right = gpu.map(p.depth_rows, kFp8BoxLines);
  }
  params.panels = int32_t(e.panels);
  params.n = int32_t(e.n);
  params.k = int32_t(e.k);
  for_launches(p.groups, kFp8LaunchGroups, [&](int32_t first, int32_t groups) {
    int32_t wanted = 0;
    for (int32_t g = 0; g < groups; ++g) {
      const te_tensor& result = p.results[first + g];
      const bool add = p.accumulate != nullptr && p.accumulate[first + g] != 0;
      params.results[g] = {result.data, result.row_pitch, result.dtype, gpu.wide(result), add};
      wanted += result.data != nullptr;
    }
    if (wanted == 0) return;
    params.left_scales = {scales_from(p, p.rows_scale_inv, first), p.rows_scale_inv.row_pitch};
    params.right_scales = {scales_from(p, p.depth_rows_scale_inv, first), p.depth_rows_scale_inv.row_pitch};
    params.common = {p.offsets + first, groups, int32_t(e.rows)};
    params.earlier = first;
    const int64_t pairs = fp8_weight_pairs({0, 1}, e.n, e.k, true, false);  // of any group that has some
    gpu.fp8_weights(params, blocks_of(gpu, wanted * pairs));
  });
}

template <class Gpu>
void launch_fp8(const te_grouped_gemm_problem& p, const Extents& e, const Gpu& gpu) {
  p.product == TE_GROUPED_WGRAD ? launch_fp8_weight_gradients(p, e, gpu) : launch_fp8_row_product(p, e, gpu);
}

}  // namespace te::gemm::grouped
