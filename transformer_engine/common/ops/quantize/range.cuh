// quantize, ranges of matrices, the kernels: a block of threads processes a tile of 128 x 128 elements of one full
// matrix, of which the range may contain any part. Memory-bound: 4 bytes an element of float32 for the amaxes, 5 for
// the cast. The division of a list into launches is here too; quantize_range.cu launches them.
#pragma once

#include "ops/quantize/items.cuh"
#include "ops/quantize/tile.cuh"

namespace te::quantize {

struct Range {
  int64_t rows, cols, start, length, tile_cols;
  te_dtype rounded_to;  // TE_FLOAT32: not rounded
  bool wide;            // eight elements from a column that is a multiple of 8 are one access

  // Whether the range contains elements of tile row `row`.
  __device__ __forceinline__ bool meets(int64_t row) const {
    return row * kTile * cols < start + length && (row + 1) * kTile * cols > start;
  }
};

constexpr int kLanes = kTile / kColumns;        // threads of a row
constexpr int kRowsAtOnce = kThreads / kLanes;  // of a tile
constexpr int kPasses = kTile / kRowsAtOnce;

// Passes whose values are loaded at once. A look-up takes registers, which else would be one block of an SM less.
template <int kMost>
constexpr int kBatchOf = kMost == 1 ? kPasses : kPasses / 2;

// Eight elements of the full matrix, by a thread, in one of the passes over its tile.
struct Spot {
  int64_t row, col;

  __device__ __forceinline__ Spot(const Range& range, uint32_t tile, int pass)
      : row(tile / range.tile_cols * kTile + pass * kRowsAtOnce + threadIdx.x / kLanes),
        col(tile % range.tile_cols * kTile + threadIdx.x % kLanes * kColumns) {}

  // The position of the first element in the range, which may not contain it.
  __device__ __forceinline__ int64_t index(const Range& range) const { return row * range.cols + col - range.start; }
  __device__ __forceinline__ bool in_one(const Range& range) const {
    const int64_t first = index(range);
    return range.wide && row < range.rows && col < range.cols && first >= 0 && first + kColumns <= range.length;
  }
  __device__ __forceinline__ bool has(const Range& range, int j) const {
    const int64_t at = index(range) + j;
    return row < range.rows && col + j < range.cols && at >= 0 && at < range.length;
  }
};

// The values of kCount passes from `first` on.
template <int kCount, class T>
__device__ __forceinline__ void load(const Range& range, uint32_t tile, int first, const T* x,
                                     Vector<T> (&values)[kCount]) {
#pragma unroll
  for (int pass = 0; pass < kCount; ++pass) {
    const Spot spot(range, tile, first + pass);
    if (spot.in_one(range)) {
      values[pass] = load_packed<T, kColumns>(x + spot.index(range));
      continue;
    }
    T elements[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) elements[j] = spot.has(range, j) ? x[spot.index(range) + j] : T{};
    memcpy(&values[pass], elements, sizeof(elements));
  }
}

// As floats, rounded.
template <class T>
__device__ __forceinline__ void rounded_floats(const Range& range, const Vector<T>& values, float (&out)[kColumns]) {
  widen<T, kColumns>(values, out);
  if (range.rounded_to == TE_BFLOAT16) {
    widen<bf16, kColumns>(narrow<bf16, kColumns>(out), out);
  } else if (range.rounded_to == TE_FLOAT16) {
    widen<fp16, kColumns>(narrow<fp16, kColumns>(out), out);
  }
}

struct RangeAmaxes {
  Range range;
  const void* x;
  float* amaxes;
  bool tensor;
};

// raises: amaxes are the larger of themselves and what is found, instead of that alone.
template <class T, int kMost>
__global__ void __launch_bounds__(kThreads, kMost == 1 ? 2 : 4)
    range_amax_kernel(const __grid_constant__ Items<RangeAmaxes, kMost> items, bool raises) {
  constexpr int kBatch = kBatchOf<kMost>;
  __shared__ Shared shared;
  uint32_t tile = blockIdx.x;
  const RangeAmaxes& item = items.find(tile);
  const Range& range = item.range;
  if (!range.meets(tile / range.tile_cols)) {
    if (!item.tensor && !raises && threadIdx.x == 0) item.amaxes[tile] = 0.f;
    return;
  }
  float largest = 0.f;
#pragma unroll
  for (int first = 0; first < kPasses; first += kBatch) {
    Vector<T> values[kBatch];
    load(range, tile, first, static_cast<const T*>(item.x), values);
#pragma unroll
    for (int pass = 0; pass < kBatch; ++pass) {
      float each[kColumns];
      rounded_floats(range, values[pass], each);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) largest = fmaxf(largest, fabsf(each[j]));
    }
  }
  largest = block_max(largest, shared);
  if (threadIdx.x > 0) return;
  if (!item.tensor) {
    item.amaxes[tile] = raises ? fmaxf(largest, item.amaxes[tile]) : largest;
  } else if (largest > *const_cast<const volatile float*>(item.amaxes)) {  // floats >= 0 compare like integers
    atomicMax(reinterpret_cast<unsigned*>(item.amaxes), __float_as_uint(largest));
  }
}

struct Target {
  uint8_t* data;  // element (row, col) at data + row * pitch + col - offset
  int64_t pitch, offset;
  float* scale_inv;
  int64_t scale_pitch;
  bool blocks, has_scale_after, pow_2;
  const float *scale, *amaxes;
  float* amax;
  float epsilon, max;

  __device__ __forceinline__ float computed_scale(float value) const { return scale_of(value, epsilon, max, pow_2); }
};

// The scale of a tile; also writes the outputs of the tile, or of the tensor.
__device__ __forceinline__ float tile_scale(const Range& range, const Target& target, uint32_t tile) {
  if (target.blocks) {
    const float scale = target.computed_scale(target.amaxes[tile]);
    const int64_t row = tile / range.tile_cols, col = tile % range.tile_cols;
    float* inverse = target.scale_inv + row * target.scale_pitch;
    if (threadIdx.x == 0) inverse[col] = 1.f / scale;
    const int64_t padding = range.tile_cols + threadIdx.x;
    if (col == range.tile_cols - 1 && padding < target.scale_pitch) inverse[padding] = 0.f;
    return scale;
  }
  const float scale = target.scale != nullptr ? *target.scale : target.computed_scale(*target.amaxes);
  if (tile == 0 && threadIdx.x == 0) {
    target.scale_inv[0] = 1.f / scale;
    if (target.has_scale_after) target.scale_inv[1] = scale;
    if (target.amax != nullptr && target.amaxes != nullptr) {
      const float before = *target.amax, found = *target.amaxes;
      *target.amax = target.scale == nullptr || found > before ? found : before;
    }
  }
  return scale;
}

struct RangeCast {
  Range range;
  Target target;
  const void* x;
};

template <class T, bool kE5m2, int kMost>
__global__ void __launch_bounds__(kThreads, kMost == 1 ? 2 : 3)
    range_cast_kernel(const __grid_constant__ Items<RangeCast, kMost> items) {
  constexpr int kBatch = kBatchOf<kMost>;
  uint32_t tile = blockIdx.x;
  const RangeCast& item = items.find(tile);
  const Range& range = item.range;
  const Target& target = item.target;
  const float scale = tile_scale(range, target, tile);
  if (!range.meets(tile / range.tile_cols)) return;
#pragma unroll
  for (int first = 0; first < kPasses; first += kBatch) {
    Vector<T> values[kBatch];
    load(range, tile, first, static_cast<const T*>(item.x), values);
#pragma unroll
    for (int pass = 0; pass < kBatch; ++pass) {
      const Spot spot(range, tile, first + pass);
      float v[kColumns];
      rounded_floats(range, values[pass], v);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] *= scale;
      const uint2 bytes =
          make_uint2(to_fp8_word<kE5m2>(v[0], v[1], v[2], v[3]), to_fp8_word<kE5m2>(v[4], v[5], v[6], v[7]));
      uint8_t* to = target.data + (spot.row * target.pitch + spot.col - target.offset);
      if (spot.in_one(range)) {
        *reinterpret_cast<uint2*>(to) = bytes;
        continue;
      }
      uint8_t each[kColumns];
      memcpy(each, &bytes, sizeof(each));
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        if (spot.has(range, j)) to[j] = each[j];
      }
    }
  }
}

// ---- host side ----

inline Range range_of(const te_quantize_range& range) {
  const bool aligned = reinterpret_cast<uintptr_t>(range.x.data) % 16 == 0 && range.start % kColumns == 0;
  const int64_t tile_cols = tiles_of(range.cols);
  return {range.rows,
          range.cols,
          range.start,
          range.x.cols,
          tile_cols < 1 ? 1 : tile_cols,
          range.rounded_to == range.x.dtype ? TE_FLOAT32 : range.rounded_to,
          aligned && range.cols % kColumns == 0};
}

inline int64_t tiles_of(const te_quantize_range& range) { return tiles_of(range.rows) * tiles_of(range.cols); }

inline RangeAmaxes amaxes_of(const te_quantize_range& range, te_scaling scaling, const te_tensor& amaxes) {
  const Range of = range_of(range);
  note_width(of.wide || range.cols % kColumns != 0, range.cols % kColumns == 0);
  return {of, range.x.data, static_cast<float*>(amaxes.data), scaling == TE_SCALING_TENSOR};
}

inline RangeCast cast_of(const te_quantize_range& range, const te_quantize_range_plan& plan, const te_tensor& data,
                         const te_tensor& scale_inv) {
  Range of = range_of(range);
  const bool alone = data.rows == 1 && data.cols == range.x.cols;
  const int64_t pitch = alone ? range.cols : data.row_pitch;
  of.wide = of.wide && reinterpret_cast<uintptr_t>(data.data) % 8 == 0 && pitch % 8 == 0;
  note_width(of.wide || range.cols % kColumns != 0, range.cols % kColumns == 0);
  const Target target{static_cast<uint8_t*>(data.data),
                      pitch,
                      alone ? range.start : 0,
                      static_cast<float*>(scale_inv.data),
                      scale_inv.cols,
                      plan.scaling == TE_SCALING_BLOCK_2D,
                      scale_inv.cols == 2,
                      plan.pow_2_scales != 0,
                      static_cast<const float*>(plan.scale.data),
                      static_cast<const float*>(plan.amaxes.data),
                      static_cast<float*>(plan.amax.data),
                      plan.amax_epsilon,
                      fp8_max(data.dtype == TE_FLOAT8_E5M2)};
  return {of, target, range.x.data};
}

// Whether a cast writes anything: the scale of a tensor without elements is written too.
inline bool writes(const te_quantize_range& range, const te_quantize_range_plan& plan) {
  return tiles_of(range) > 0 || plan.scaling == TE_SCALING_TENSOR;
}

// Calls run(items, blocks) for each launch of the amaxes of a list's ranges whose x is of that dtype.
template <class Run>
void for_amaxes(const char* op, const te_quantize_range_list_problem& list, te_dtype dtype, Run&& run) {
  Batches<RangeAmaxes, kMostItems, Run> batches(op, run);
  for (int32_t i = 0; i < list.count; ++i) {
    const te_quantize_range& range = list.ranges[i];
    const te_quantize_range_plan& plan = list.plans[i];
    if (range.x.dtype != dtype || range.x.cols == 0 || plan.amaxes.data == nullptr) continue;
    batches.add(amaxes_of(range, plan.scaling, plan.amaxes), tiles_of(range));
  }
  batches.flush();
}

// Calls run(items, blocks) for each launch of the casts of a list from one dtype to another.
template <class Run>
void for_casts(const char* op, const te_quantize_range_list_problem& list, te_dtype from, te_dtype to, Run&& run) {
  Batches<RangeCast, kMostItems, Run> batches(op, run);
  for (int32_t i = 0; i < list.count; ++i) {
    const te_quantize_range& range = list.ranges[i];
    if (range.x.dtype != from || list.data[i].dtype != to || !writes(range, list.plans[i])) continue;
    batches.add(cast_of(range, list.plans[i], list.data[i], list.scale_invs[i]), tiles_of(range));
  }
  batches.flush();
}

}  // namespace te::quantize
