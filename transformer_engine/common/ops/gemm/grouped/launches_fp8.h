// Launches of a grouped product of FP8 operands, like launches.h.
#pragma once

#include "ops/gemm/grouped/launches.h"
#include "ops/gemm/grouped/params_fp8.h"

namespace te::gemm::grouped {

constexpr int kFp8BoxRows = 128;  // of each operand: one CTA's part of a tile
static_assert(RowTileShape::kM / sm90::kCluster == kFp8BoxRows && RowTileShape::kN == kFp8BoxRows);

// Whether results are staged (sm90/staging.cuh): where that is faster, and TMA can store them. It writes multiples of
// 16 bytes, also beyond the last column.
template <class Gpu>
bool is_staged(const Gpu& gpu, const te_tensor& t, bool add) {
  return add == (t.dtype == TE_FLOAT32) && gpu.wide(t) && t.cols * int64_t(te_dtype_bytes(t.dtype)) % 16 == 0;
}

// The scales of a launch whose first group is `first`.
inline const float* scales_from(const te_grouped_gemm_problem& p, const te_tensor& scales, int32_t first) {
  const auto* data = static_cast<const float*>(scales.data);
  return p.scaling == TE_SCALING_TENSOR ? data + first : data;
}

template <class Gpu>
void launch_rows_fp8(const te_grouped_gemm_problem& p, const ProblemShape& shape, const Gpu& gpu) {
  const int64_t n = p.result.cols, k = p.rows.cols;
  if (shape.rows == 0 || n == 0) return;
  const bool staged = is_staged(gpu, p.result, false);
  StagedFp8RowParams* const params = &launch_params<StagedFp8RowParams>();
  if (staged) params->output = gpu.result_map(p.result);
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
    const int32_t ctas = ctas_of(gpu, row_tiles * row_product_pairs_n(n));
    staged ? gpu.staged_rows_fp8(*params, ctas) : gpu.rows_fp8(*params, ctas);
  });
}

// Results that are staged, or those that are not, by the type of the parameters; the others are skipped.
template <class Params, class Gpu>
void launch_wgrads_fp8_of(const te_grouped_gemm_problem& p, const ProblemShape& shape, const Gpu& gpu) {
  constexpr bool kStaged = std::is_same_v<Params, StagedFp8WgradParams>;
  Params params{};
  if (shape.panels > 0) {
    params.left = gpu.map(p.rows, kFp8BoxRows);
    params.right = gpu.map(p.depth_rows, kFp8BoxRows);
  }
  params.panels = int32_t(shape.panels);
  params.n = int32_t(shape.n);
  params.k = int32_t(shape.k);
  for_launches(p.groups, kStaged ? kFp8StagedWgradGroups : kFp8LaunchGroups, [&](int32_t first, int32_t groups) {
    int32_t wanted = 0;
    for (int32_t g = 0; g < groups; ++g) {
      const te_tensor& result = p.results[first + g];
      const bool add = p.accumulate != nullptr && p.accumulate[first + g] != 0;
      const bool is_wanted = result.data != nullptr && is_staged(gpu, result, add) == kStaged;
      params.results[g] = {is_wanted ? result.data : nullptr, result.row_pitch, result.dtype, gpu.wide(result), add};
      if constexpr (kStaged) {
        if (is_wanted) params.outputs[g] = gpu.result_map(result);
      }
      wanted += is_wanted;
    }
    if (wanted == 0) return;
    params.left_scales = {scales_from(p, p.rows_scale_inv, first), p.rows_scale_inv.row_pitch};
    params.right_scales = {scales_from(p, p.depth_rows_scale_inv, first), p.depth_rows_scale_inv.row_pitch};
    params.common = {p.offsets + first, groups, int32_t(shape.rows)};
    params.earlier = first;
    const int64_t pairs = fp8_wgrad_pairs({0, 1}, shape.n, shape.k, true, false);  // of each group with rows
    const int32_t ctas = ctas_of(gpu, wanted * pairs);
    if constexpr (kStaged) {
      gpu.staged_wgrad_fp8(params, ctas);
    } else {
      gpu.wgrad_fp8(params, ctas);
    }
  });
}

template <class Gpu>
void launch_wgrads_fp8(const te_grouped_gemm_problem& p, const ProblemShape& shape, const Gpu& gpu) {
  if (shape.n == 0 || shape.k == 0) return;
  launch_wgrads_fp8_of<Fp8WgradParams>(p, shape, gpu);
  launch_wgrads_fp8_of<StagedFp8WgradParams>(p, shape, gpu);
}

}  // namespace te::gemm::grouped
