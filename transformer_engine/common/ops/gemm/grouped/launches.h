// What grouped kernels are told of a problem, and in how many launches: at most kLaunchGroups groups each. The Gpu
// makes tensor maps, says whose rows begin on 16 bytes and starts kernels; this looks at no memory and refuses nothing
// but sizes.
#pragma once

#include <algorithm>
#include <memory>

#include "ops/gemm/grouped/grouped_gemm.h"
#include "ops/gemm/grouped/params.h"

namespace te::gemm::grouped {

template <class Plan, class Gpu>
CUtensorMap left_map(const Gpu& gpu, const te_tensor& t) {
  return gpu.map(t, wgmma::box_lines(Plan::kLeft, Plan::kLeftPart));
}
template <class Plan, class Gpu>
CUtensorMap right_map(const Gpu& gpu, const te_tensor& t) {
  return gpu.map(t, wgmma::box_lines(Plan::kRight, Plan::kRightPart));
}

// As many blocks as there can be tiles, and no more than run at once; whole clusters.
template <class Gpu>
int32_t blocks_of(const Gpu& gpu, int64_t most_pairs) {
  if (most_pairs > kMostPairs) {
    throw Error(TE_NOT_IMPLEMENTED, concat("te_grouped_gemm: ", most_pairs, " pairs of tiles in one launch."));
  }
  const int64_t clusters = std::max(gpu.sms() / wgmma::kCluster, 1);
  return int32_t(std::min(most_pairs, clusters)) * wgmma::kCluster;
}

// f(first group, groups) for each launch of `most` groups.
template <class F>
void for_launches(int32_t groups, int most, F&& f) {
  for (int32_t first = 0; first < groups; first += most) f(first, std::min(most, groups - first));
}

template <class Gpu>
void launch_rows(const te_grouped_gemm_problem& p, const Extents& e, const Gpu& gpu) {
  const bool fprop = p.product == TE_GROUPED_FPROP;
  const int64_t cols = fprop ? e.n : e.k, depth = fprop ? e.k : e.n;
  if (e.rows == 0 || cols == 0) return;
  // 32 KiB that each launch takes by value.
  const auto params = std::make_unique<RowParams>();
  params->result = p.result.data;
  params->pitch = p.result.row_pitch;
  params->cols = int32_t(cols);
  params->depth = int32_t(depth);
  params->wide = gpu.wide(p.result);
  if (depth > 0) params->left = left_map<RowPlan<wgmma::Major::kDepth>>(gpu, p.rows);
  for_launches(p.groups, kLaunchGroups, [&](int32_t first, int32_t groups) {
    for (int32_t g = 0; g < groups; ++g) {
      const te_tensor& weight = p.weights[first + g];
      if (depth > 0) {
        params->weights[g] = fprop ? right_map<RowPlan<wgmma::Major::kDepth>>(gpu, weight)
                                   : right_map<RowPlan<wgmma::Major::kAcross>>(gpu, weight);
      }
      params->biases[g] = p.biases != nullptr ? p.biases[first + g].data : nullptr;
    }
    params->common = {p.offsets + first, groups, int32_t(e.rows)};
    params->zero_tail = p.zero_tail != 0 && first + groups == p.groups;
    const int64_t row_tiles = e.rows / RowTile::kRows + groups;
    const int32_t blocks = blocks_of(gpu, row_tiles * row_product_col_pairs(cols));
    fprop ? gpu.fprop(*params, blocks) : gpu.dgrad(*params, blocks);
  });
}

// Results of one dtype; those of another are not wanted then.
template <class Gpu>
void launch_weights(const te_grouped_gemm_problem& p, const Extents& e, te_dtype dtype, const Gpu& gpu) {
  WeightParams params{};
  if (e.rows > 0) {
    params.left = left_map<WeightPlan>(gpu, p.rows);
    params.right = right_map<WeightPlan>(gpu, p.depth_rows);
  }
  params.n = int32_t(e.n);
  params.k = int32_t(e.k);
  for_launches(p.groups, kLaunchGroups, [&](int32_t first, int32_t groups) {
    int32_t wanted = 0;
    for (int32_t g = 0; g < groups; ++g) {
      const te_tensor& result = p.results[first + g];
      const bool add = p.accumulate != nullptr && p.accumulate[first + g] != 0;
      const bool here = result.data != nullptr && result.dtype == dtype;
      params.results[g] = {here ? result.data : nullptr, result.row_pitch, gpu.wide(result), add};
      wanted += here;
    }
    if (wanted == 0) return;
    params.common = {p.offsets + first, groups, int32_t(e.rows)};
    const int64_t pairs = weight_gradient_pairs({0, 1}, e.n, e.k, true, false);  // of any group that has some
    gpu.wgrad(params, dtype == TE_FLOAT32, blocks_of(gpu, wanted * pairs));
  });
}

template <class Gpu>
void launch_all(const te_grouped_gemm_problem& p, const Extents& e, const Gpu& gpu) {
  if (p.product != TE_GROUPED_WGRAD) return launch_rows(p, e, gpu);
  if (e.n == 0 || e.k == 0) return;
  for (const te_dtype dtype : {TE_FLOAT32, p.rows.dtype}) launch_weights(p, e, dtype, gpu);
}

}  // namespace te::gemm::grouped
