// Launches of a grouped product: the kernels, and their parameters for at most kLaunchGroups groups each. The Gpu
// encodes tensor maps, checks which rows begin on 16 bytes and starts kernels. No tensor's memory is read here.
#pragma once

#include <algorithm>
#include <memory>

#include "ops/gemm/grouped/params.h"
#include "ops/gemm/grouped/problem.h"

namespace te::gemm::grouped {

template <class TileConfig, class Gpu>
CUtensorMap left_map(const Gpu& gpu, const te_tensor& t) {
  return gpu.map(t, sm90::box_rows(TileConfig::kLeft, TileConfig::kLeftPart));
}
template <class TileConfig>
constexpr int kRightBoxRows = sm90::box_rows(TileConfig::kRight, TileConfig::kRightPart);

// CTAs of a launch: no more than there can be tiles, no more than run at once, a multiple of the cluster size.
template <class Gpu>
int32_t ctas_of(const Gpu& gpu, int64_t most_pairs) {
  if (most_pairs > kMostPairs) {
    throw Error(TE_NOT_IMPLEMENTED, concat("te_grouped_gemm: ", most_pairs, " pairs of tiles in one launch."));
  }
  const int64_t clusters = std::max(gpu.sms() / sm90::kCluster, 1);
  return int32_t(std::min(most_pairs, clusters)) * sm90::kCluster;
}

// Calls f(first group, groups) for each launch of `most` groups.
template <class F>
void for_launches(int32_t groups, int most, F&& f) {
  for (int32_t first = 0; first < groups; first += most) f(first, std::min(most, groups - first));
}

// Memory for the parameters of a launch, which copies them: up to 32 KiB, whose allocation and clearing would cost each
// call more than the launch. A caller writes what the kernel reads.
template <class Params>
Params& launch_params() {
  thread_local const auto params = std::make_unique<Params>();
  return *params;
}

// Calls f(T{}) with the type of the operands, which are bfloat16 or float16.
template <class F>
void with_operands(te_dtype dtype, F&& f) {
  dtype == TE_BFLOAT16 ? f(bf16{}) : f(fp16{});
}

// The bytes from each tensor to the next, where this distance is the same for all; else 0.
inline int64_t step_of(const te_tensor* tensors, int32_t groups) {
  const auto at = [&](int32_t g) { return reinterpret_cast<uintptr_t>(tensors[g].data); };
  const auto step = groups < 2 ? 0 : int64_t(at(1) - at(0));
  for (int32_t g = 2; g < groups; ++g) {
    if (int64_t(at(g) - at(g - 1)) != step) return 0;
  }
  return step;
}

// Whether the weights are one matrix together. A box may have rows of the next weight then: the result has no columns
// for them in FPROP, and in DGRAD, which sums over rows, the weights end where boxes do.
inline bool are_stacked(const te_grouped_gemm_problem& p) {
  const te_tensor& first = p.weights[0];
  for (int32_t g = 1; g < p.groups; ++g) {
    if (p.weights[g].row_pitch != first.row_pitch) return false;
  }
  const int64_t bytes = first.rows * first.row_pitch * int64_t(te_dtype_bytes(first.dtype));
  return bytes > 0 && step_of(p.weights, p.groups) == bytes && first.rows * p.groups <= kMostRows &&
         (p.product == TE_GROUPED_FPROP || first.rows % sm90::kTileK == 0) &&
         (p.biases == nullptr || step_of(p.biases, p.groups) != 0);
}

// box_rows: of the weights' maps; 0 where nothing is read.
template <class Gpu>
void set_weights(EachWeight& w, const te_grouped_gemm_problem& p, int32_t first, int32_t groups, int box_rows,
                 const Gpu& gpu) {
  for (int32_t g = 0; g < groups; ++g) {
    if (box_rows > 0) w.maps[g] = gpu.map(p.weights[first + g], box_rows);
    w.biases[g] = p.biases != nullptr ? p.biases[first + g].data : nullptr;
  }
}
template <class Gpu>
void set_weights(StackedWeights& w, const te_grouped_gemm_problem& p, int32_t first, int32_t groups, int box_rows,
                 const Gpu& gpu) {
  te_tensor all = p.weights[first];
  w.rows = int32_t(all.rows);
  all.rows *= groups;
  if (box_rows > 0) w.maps = gpu.map(all, box_rows);
  w.biases = p.biases != nullptr ? p.biases[first].data : nullptr;
  w.to_next_bias = p.biases != nullptr ? step_of(p.biases, p.groups) : 0;
}

// Calls f(NULL of the type of the weights' parameters).
template <class F>
void with_weights(const te_grouped_gemm_problem& p, F&& f) {
  are_stacked(p) ? f(static_cast<const StackedWeights*>(nullptr)) : f(static_cast<const EachWeight*>(nullptr));
}

template <class Gpu>
void launch_rows(const te_grouped_gemm_problem& p, const ProblemShape& shape, const Gpu& gpu) {
  const bool fprop = p.product == TE_GROUPED_FPROP;
  const int64_t n = fprop ? shape.n : shape.k, k = fprop ? shape.k : shape.n;
  if (shape.rows == 0 || n == 0) return;
  constexpr int kFprop = kRightBoxRows<RowTileConfig<Major::kK>>, kDgrad = kRightBoxRows<RowTileConfig<Major::kMN>>;
  const int box_rows = k == 0 ? 0 : fprop ? kFprop : kDgrad;
  with_weights(p, [&]<class Weights>(const Weights*) {
    auto* const params = &launch_params<RowParams<Weights>>();
    params->result = p.result.data;
    params->pitch = p.result.row_pitch;
    params->n = int32_t(n);
    params->k = int32_t(k);
    params->wide = gpu.wide(p.result);
    if (k > 0) params->left = left_map<RowTileConfig<Major::kK>>(gpu, p.rows);
    for_launches(p.groups, kLaunchGroups, [&](int32_t first, int32_t groups) {
      set_weights(params->weights, p, first, groups, box_rows, gpu);
      params->common = {p.offsets + first, groups, int32_t(shape.rows)};
      params->zero_tail = p.zero_tail != 0 && first + groups == p.groups;
      const int64_t row_tiles = shape.rows / RowTileShape::kM + groups;
      const int32_t ctas = ctas_of(gpu, row_tiles * row_product_pairs_n(n));
      with_operands(p.rows.dtype, [&]<class T>(T) {
        fprop ? gpu.template start<RowKernelTraits<T, Major::kK, Weights>>(*params, ctas)
              : gpu.template start<RowKernelTraits<T, Major::kMN, Weights>>(*params, ctas);
      });
    });
  });
}

// Results of one dtype; those of other dtypes are skipped.
template <class Gpu>
void launch_wgrads_of(const te_grouped_gemm_problem& p, const ProblemShape& shape, te_dtype dtype, const Gpu& gpu) {
  WgradParams params{};
  if (shape.rows > 0) {
    params.left = left_map<WgradTileConfig>(gpu, p.rows);
    params.right = gpu.map(p.depth_rows, kRightBoxRows<WgradTileConfig>);
  }
  params.n = int32_t(shape.n);
  params.k = int32_t(shape.k);
  for_launches(p.groups, kLaunchGroups, [&](int32_t first, int32_t groups) {
    int32_t wanted = 0;
    for (int32_t g = 0; g < groups; ++g) {
      const te_tensor& result = p.results[first + g];
      const bool add = p.accumulate != nullptr && p.accumulate[first + g] != 0;
      const bool is_wanted = result.data != nullptr && result.dtype == dtype;
      params.results[g] = {is_wanted ? result.data : nullptr, result.row_pitch, gpu.wide(result), add};
      wanted += is_wanted;
    }
    if (wanted == 0) return;
    params.common = {p.offsets + first, groups, int32_t(shape.rows)};
    const int64_t pairs = wgrad_pairs({0, 1}, shape.n, shape.k, true, false);  // of each group with rows
    const int32_t ctas = ctas_of(gpu, wanted * pairs);
    with_operands(p.rows.dtype, [&]<class T>(T) {
      dtype == TE_FLOAT32 ? gpu.template start<WgradKernelTraits<T, float>>(params, ctas)
                          : gpu.template start<WgradKernelTraits<T, T>>(params, ctas);
    });
  });
}

template <class Gpu>
void launch_wgrads(const te_grouped_gemm_problem& p, const ProblemShape& shape, const Gpu& gpu) {
  if (shape.n == 0 || shape.k == 0) return;
  for (const te_dtype dtype : {TE_FLOAT32, p.rows.dtype}) launch_wgrads_of(p, shape, dtype, gpu);
}

}  // namespace te::gemm::grouped
