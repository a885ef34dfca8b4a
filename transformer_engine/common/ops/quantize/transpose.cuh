// quantize, transposes of bytes, the kernel: a block transposes a tile of 128 x 128 bytes of one matrix through shared
// memory, and moves the scale of that tile. Memory-bound: 2 bytes an element. quantize_transpose.cu launches it.
#pragma once

#include "ops/quantize/items.cuh"
#include "ops/quantize/tile.cuh"

namespace te::quantize {

struct Transpose {
  const uint8_t* x;
  uint8_t* columnwise;
  int64_t rows, cols, pitch, column_pitch, tile_cols;
  const float* scales;  // of 128 x 128 blocks; or none
  float* column_scales;
  int64_t scale_pitch, column_scale_pitch;
  bool aligned;
};

template <int kMost>
__global__ void __launch_bounds__(kThreads) transpose_kernel(const __grid_constant__ Items<Transpose, kMost> items) {
  __shared__ Shared shared;
  uint32_t tile = blockIdx.x;
  const Transpose& item = items.find(tile);
  const Place at(tile / item.tile_cols, tile % item.tile_cols);
  if (item.scales != nullptr && threadIdx.x == 0 && at.tile_row * kTile < item.rows) {
    item.column_scales[at.tile_col * item.column_scale_pitch + at.tile_row] =
        item.scales[at.tile_row * item.scale_pitch + at.tile_col];
  }
  uint2 bytes[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = at.row() + i;
    bytes[i] = make_uint2(0, 0);
    if (row >= item.rows || at.col() >= item.cols) continue;
    const uint8_t* source = item.x + row * item.pitch + at.col();
    if (item.aligned && at.col() + kColumns <= item.cols) {
      bytes[i] = *reinterpret_cast<const uint2*>(source);
    } else {
      uint8_t each[kColumns];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) each[j] = at.col() + j < item.cols ? source[j] : 0;
      memcpy(&bytes[i], each, sizeof(each));
    }
  }
  put_block_transposed(at, bytes, shared);
  Dest dest{};
  dest.rows = item.rows;
  dest.cols = item.cols;
  dest.columnwise = item.columnwise;
  dest.column_pitch = item.column_pitch;
  put_columnwise(dest, at, shared);
}

// ---- host side ----

inline Transpose transpose_of(const te_tensor& rowwise, const te_tensor& columnwise, const te_tensor& scales,
                              const te_tensor& column_scales) {
  return {static_cast<const uint8_t*>(rowwise.data),
          static_cast<uint8_t*>(columnwise.data),
          rowwise.rows,
          rowwise.cols,
          rowwise.row_pitch,
          columnwise.row_pitch,
          tiles_of(rowwise.cols),
          static_cast<const float*>(scales.data),
          static_cast<float*>(column_scales.data),
          scales.row_pitch,
          column_scales.row_pitch,
          reinterpret_cast<uintptr_t>(rowwise.data) % 8 == 0 && rowwise.row_pitch % 8 == 0};
}

// With the tails of the columnwise pitch.
inline int64_t tiles_of(const te_tensor& columnwise) {
  return tiles_of(columnwise.row_pitch) * tiles_of(columnwise.rows);
}

// Calls run(items, blocks) for each launch of a list.
template <class Run>
void for_transposes(const char* op, const te_quantize_transpose_list_problem& list, Run&& run) {
  Batches<Transpose, kMostItems, Run> batches(op, run);
  for (int32_t i = 0; i < list.count; ++i) {
    if (tiles_of(list.columnwise[i]) == 0) continue;
    batches.add(transpose_of(list.rowwise[i], list.columnwise[i], list.scales[i], list.column_scales[i]),
                tiles_of(list.columnwise[i]));
  }
  batches.flush();
}

}  // namespace te::quantize
