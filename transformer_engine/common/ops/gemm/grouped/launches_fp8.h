// Launches of a grouped product of FP8 operands, like launches.h.
#pragma once

#include "ops/gemm/grouped/launches.h"
#include "ops/gemm/grouped/params_fp8.h"

namespace te::gemm::grouped {

constexpr int kFp8BoxRows = 128;  // of each operand: one CTA's part of a tile
static_assert(RowTileShape::kM / sm90::kCluster == kFp8BoxRows && RowTileShape::kN == kFp8BoxRows);

// The scales of a launch whose first group is `first`.
inline const float* scales_from(const te_grouped_gemm_problem& p, const te_tensor& scales, int32_t first) {
  const auto* data = static_cast<const float*>(scales.data);
  return p.scaling == TE_SCALING_TENSOR ? data + first : data;
}

template <class Gpu>
void launch_rows_fp8(const te_grouped_gemm_problem& p, const ProblemShape& shape, const Gpu& gpu) {
  const int64_t n = p.result.cols, k = p.rows.cols;
  if (shape.rows == 0 || n == 0) return;
  Fp8RowParams* const params = &launch_params<Fp8RowParams>();
  params->row_scales_pitch = p.rows_scale_inv.row_pitch;
  params->weight_scales_pitch = p.weights_scale_inv[0].cols;
  params->result = p.result.data;
  params->pitch = p.result.row_pitch;
  params->dtype = p.result.dtype;
  params->n = int32_t(n);
  params->k = int32_t(k);
  params->wide = gpu.wide(p.result);
  if (k > 0) params->left = gpu.map(p.rows, kFp8BoxRows);
  for_launches(p.groups, kFp8LaunchGroups, [&](int32_t first, int32_t groups) {
    for (int32_t g = 0; g < groups; ++g) {
      if (k > 0) params->weights[g] = gpu.map(p.weights[first + g], kFp8BoxRows);
      params->biases[g] = p.biases != nullptr ? p.biases[first + g].data : nullptr;
      params->weight_scales[g] = static_cast<const float*>(p.weights_scale_inv[first + g].data);
    }
    params->row_scales = scales_from(p, p.rows_scale_inv, first);
    params->common = {p.offsets + first, groups, int32_t(shape.rows)};
    params->zero_tail = p.zero_tail != 0 && first + groups == p.groups;
    const int64_t row_tiles = shape.rows / RowTileShape::kM + groups;
    gpu.rows_fp8(*params, ctas_of(gpu, row_tiles * row_product_pairs_n(n)));
  });
}

template <class Gpu>
void launch_wgrads_fp8(const te_grouped_gemm_problem& p, const ProblemShape& shape, const Gpu& gpu) {
  if (shape.n == 0 || shape.k == 0) return;
  Fp8WgradParams params{};
  if (shape.panels > 0) {
    params.left = gpu.map(p.rows, kFp8BoxRows);
    params.right = gpu.map(p.depth_rows, kFp8BoxRows);
  }
  params.panels = int32_t(shape.panels);
  params.n = int32_t(shape.n);
  params.k = int32_t(shape.k);
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
    params.common = {p.offsets + first, groups, int32_t(shape.rows)};
    params.earlier = first;
    const int64_t pairs = fp8_wgrad_pairs({0, 1}, shape.n, shape.k, true, false);  // of each group with rows
    gpu.wgrad_fp8(params, ctas_of(gpu, wanted * pairs));
  });
}

}  // namespace te::gemm::grouped
