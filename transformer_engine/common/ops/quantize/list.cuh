// quantize list, the kernels: each block quantizes one tile of one matrix, like te_quantize (tile.cuh); the matrices'
// addresses are kernel parameters. For current scaling, an earlier launch computes the amaxes, as parts with one writer
// each. The division of a list into launches is here too; quantize_list.cu launches them.
#pragma once

#include "ops/quantize/source.cuh"
#include "transformer_engine/quantize_list.h"

namespace te::quantize::list {

using quantize::cuda::is_wide;
using quantize::cuda::Source;

constexpr int kMost = TE_QUANTIZE_LIST_MATRICES;
constexpr int kArgumentBytes = 32764;  // limit of kernel arguments since CUDA 12.1

// The addresses in which a matrix differs from the first. The amax pass reads `x` alone.
template <class T>
struct Addresses {
  const T* x[kMost];
  uint8_t *rowwise[kMost], *columnwise[kMost];
  float *row_scales[kMost], *column_scales[kMost];
  const float* scale[kMost];
  float* amax[kMost];
};

template <class T>
struct Launch {
  Source<T> x;  // of the first matrix, like dest's addresses
  Dest dest;
  Domain domain;
  int32_t count;
  uint32_t tiles;  // of a matrix
  Addresses<T> at;

  __device__ __forceinline__ Source<T> source(uint32_t i) const {
    Source<T> result = x;
    result.x = at.x[i];
    return result;
  }
  __device__ __forceinline__ Dest dest_of(uint32_t i) const {
    Dest result = dest;
    result.rowwise = at.rowwise[i];
    result.columnwise = at.columnwise[i];
    result.rowwise_scale_inv.data = at.row_scales[i];
    result.columnwise_scale_inv.data = at.column_scales[i];
    result.scale = at.scale[i];
    result.amax = at.amax[i];
    if (dest.amax_parts != nullptr) result.amax_parts = dest.amax_parts + int64_t(i) * TE_QUANTIZE_LIST_PARTS;
    return result;
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, Source<T>::kBlocksPerSm)
    list_kernel(const __grid_constant__ Launch<T> launch) {
  __shared__ Shared shared;
  if (is_set(launch.dest.noop)) return;
  // After an amax pass the last tiles are processed first: their inputs may still be in the L2.
  const uint32_t number = launch.dest.amax_parts != nullptr ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t matrix = number / launch.tiles, tile = number - matrix * launch.tiles;
  const auto tile_cols = uint32_t(launch.domain.tile_cols);
  const Dests<1> dests{{launch.dest_of(matrix)}};
  quantize_tile(launch.source(matrix), dests, launch.domain, Place(tile / tile_cols, tile % tile_cols), shared);
}

// Block b computes part b % parts_of_one of matrix b / parts_of_one.
template <class T>
__global__ void __launch_bounds__(kThreads, Source<T>::kBlocksPerSm)
    list_amax_kernel(const __grid_constant__ Launch<T> launch, float* parts, uint32_t parts_of_one) {
  __shared__ Shared shared;
  if (is_set(launch.dest.noop)) return;
  const uint32_t matrix = blockIdx.x / parts_of_one, part = blockIdx.x - matrix * parts_of_one;
  const float amax = amax_of_tiles(launch.source(matrix), launch.domain, part, parts_of_one, shared);
  if (threadIdx.x == 0) parts[int64_t(matrix) * TE_QUANTIZE_LIST_PARTS + part] = amax;
}

// ---- host side ----

inline Dest first_dest(const te_quantize_list_problem& list, int32_t first) {
  te_quantize_plan plan{};
  plan.noop = list.noop;
  plan.pow_2_scales = list.pow_2_scales;
  plan.amax_epsilon = list.amax_epsilon;
  Dest dest(plan, list.outs[first], list.xs[first].rows, list.xs[first].cols);
  if (list.amax_parts.data != nullptr) {
    dest.amax_parts = static_cast<const float*>(list.amax_parts.data) + int64_t(first) * TE_QUANTIZE_LIST_PARTS;
  }
  return dest;
}

template <class T>
void put(const te_quantize_list_problem& list, int32_t number, int at, Addresses<T>& to) {
  const te_quantized& out = list.outs[number];
  to.x[at] = static_cast<const T*>(list.xs[number].data);
  to.rowwise[at] = static_cast<uint8_t*>(out.rowwise.data);
  to.columnwise[at] = static_cast<uint8_t*>(out.columnwise.data);
  to.row_scales[at] = static_cast<float*>(out.rowwise_scale_inv.data);
  to.column_scales[at] = static_cast<float*>(out.columnwise_scale_inv.data);
  to.scale[at] = list.scales != nullptr ? list.scales[number] : nullptr;
  to.amax[at] = list.amaxes != nullptr ? list.amaxes[number] : nullptr;
}

// Fills `launch` as often as needed, and calls amaxes(launch, parts, parts of a matrix, blocks), for current scaling
// alone, and quantize(launch, blocks) each time.
template <class T, class Amaxes, class Quantize>
void for_launches(const char* op, const te_quantize_list_problem& list, Launch<T>& launch, Amaxes&& amaxes,
                  Quantize&& quantize) {
  static_assert(sizeof(Launch<T>) + 16 <= kArgumentBytes);
  if (list.count == 0) return;
  const te_tensor& x = list.xs[0];
  bool wide = true;
  for (int32_t i = 0; i < list.count; ++i) wide = is_wide(list.xs[i]) && wide;
  launch.domain = domain_of(x.rows, x.cols, wide, Dests<1>{{first_dest(list, 0)}});
  launch.x = Source<T>(x);
  launch.tiles = grid_of(op, launch.domain.tile_rows * launch.domain.tile_cols);
  const int64_t own_tiles = tiles_of(x.rows) * tiles_of(x.cols);  // without padding, for amaxes
  const int64_t parts = own_tiles < 1 ? 1 : own_tiles < TE_QUANTIZE_LIST_PARTS ? own_tiles : TE_QUANTIZE_LIST_PARTS;
  const int32_t room = int32_t(INT32_MAX / int64_t(launch.tiles > parts ? launch.tiles : parts));
  const int32_t most = room < kMost ? room : kMost;  // at least one: a grid has room for a matrix's tiles
  for (int32_t first = 0; first < list.count; first += most) {
    launch.count = list.count - first < most ? list.count - first : most;
    launch.dest = first_dest(list, first);
    for (int32_t i = 0; i < launch.count; ++i) put(list, first + i, i, launch.at);
    if (launch.dest.amax_parts != nullptr) {
      launch.dest.n_parts = int(parts);
      amaxes(launch, const_cast<float*>(launch.dest.amax_parts), uint32_t(parts), uint32_t(launch.count * parts));
    }
    quantize(launch, uint32_t(launch.count) * launch.tiles);
  }
}

}  // namespace te::quantize::list
