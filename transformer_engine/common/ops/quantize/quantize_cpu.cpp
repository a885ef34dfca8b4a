// quantize, the CPU path (the specification): computes scales and bytes in both directions by tiles of 128 x 128
// elements, widened to float. fp8.h has the formats and the rules for scales; arguments have been checked.
#include <algorithm>
#include <cstring>

#include "core/cpu_chunk.h"
#include "core/parallel_for.h"
#include "ops/quantize/fp8.h"
#include "ops/quantize/maxima.h"
#include "ops/quantize/store.h"
#include "transformer_engine/quantize.h"
#include "transformer_engine/scaling.h"

namespace te::quantize {

namespace cpu {

using namespace te::cpu;

namespace {

struct Tile {
  float values[kBlock][kBlock];  // zero beyond the matrix
  uint8_t bytes[kBlock][kBlock];
};

// Inputs that all tiles share. `scale` is for TENSOR.
struct Job {
  const te_quantize_plan& plan;
  const te_quantized& out;
  int64_t rows, cols;
  float scale, max;
  bool e5m2;
};

bool is_noop(const te_tensor& noop) { return noop.data != nullptr && value_at(noop) != 0.f; }

template <bool kE5m2>
void convert(const float* x, const float* scales, uint8_t* bytes) {
  for (int i = 0; i < kBlock; ++i) bytes[i] = uint8_t(to_fp8<kE5m2>(x[i] * scales[i]));
}

// One row of a tile, with a scale for each column.
void convert_row(const Job& job, Tile& tile, int row, const float* scales) {
  if (job.e5m2) {
    convert<true>(tile.values[row], scales, tile.bytes[row]);
  } else {
    convert<false>(tile.values[row], scales, tile.bytes[row]);
  }
}

// The tile's part of `data`, whose row r is the tile's row (or, transposed, column) r.
void put_bytes(const te_tensor& data, int64_t first_row, int64_t first_col, const Tile& tile, bool transposed) {
  if (data.data == nullptr) return;
  const int64_t rows = std::min<int64_t>(kBlock, data.rows - first_row);
  const int64_t cols = std::min<int64_t>(kBlock, data.row_pitch - first_col);
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* target = row_ptr<uint8_t>(data, first_row + r) + first_col;
    for (int64_t c = 0; c < cols; ++c) target[c] = transposed ? tile.bytes[c][r] : tile.bytes[r][c];
  }
}

// Scales of a run of `n` rows (or columns) from `first` on; those beyond `size` are padding.
void put_scales(const te_tensor& scale_inv, int64_t block, int64_t first, int64_t size, const float* scales) {
  if (block >= scale_inv.rows) return;  // the tile has only the tail of a pitch
  for (int64_t i = first; i < std::min(first + kBlock, scale_inv.cols); ++i) {
    row_ptr<float>(scale_inv, block)[i] = i < size ? 1.f / scales[i - first] : 0.f;
  }
}

void put_block_scale(const te_tensor& scale_inv, int64_t row, int64_t col, int64_t blocks, float scale) {
  if (row >= scale_inv.rows || col >= blocks) return;
  float* scales = row_ptr<float>(scale_inv, row);
  scales[col] = 1.f / scale;
  if (col == blocks - 1) std::fill(scales + blocks, scales + scale_inv.cols, 0.f);
}

float scale_for(const Job& job, float amax) {
  return scale_of(amax, job.plan.amax_epsilon, job.max, job.plan.pow_2_scales != 0);
}

void put_rowwise_1d(const Job& job, Tile& tile, int64_t tile_row, int64_t tile_col) {
  float scales[kBlock], repeated[kBlock];
  for (int r = 0; r < kBlock; ++r) {
    scales[r] = scale_for(job, amax_of(tile.values[r], kBlock));
    std::fill_n(repeated, kBlock, scales[r]);
    convert_row(job, tile, r, repeated);
  }
  put_scales(job.out.rowwise_scale_inv, tile_col, tile_row * kBlock, job.rows, scales);
  put_bytes(job.out.rowwise, tile_row * kBlock, tile_col * kBlock, tile, false);
}

void put_columnwise_1d(const Job& job, Tile& tile, int64_t tile_row, int64_t tile_col) {
  uint32_t largest[kBlock] = {};
  float scales[kBlock];
  for (int r = 0; r < kBlock; ++r) {
    for (int c = 0; c < kBlock; ++c) largest[c] = std::max(largest[c], magnitude_bits(tile.values[r][c]));
  }
  for (int c = 0; c < kBlock; ++c) scales[c] = scale_for(job, te::detail::float_of(largest[c]));
  for (int r = 0; r < kBlock; ++r) convert_row(job, tile, r, scales);
  put_scales(job.out.columnwise_scale_inv, tile_row, tile_col * kBlock, job.cols, scales);
  put_bytes(job.out.columnwise, tile_col * kBlock, tile_row * kBlock, tile, true);
}

// TENSOR and BLOCK_2D: one scale, the same bytes in both directions.
void put_one_scale(const Job& job, Tile& tile, int64_t tile_row, int64_t tile_col) {
  float scale = job.scale, scales[kBlock];
  if (job.out.scaling == TE_SCALING_BLOCK_2D) {
    const int64_t row_blocks = (job.rows + kBlock - 1) / kBlock, col_blocks = (job.cols + kBlock - 1) / kBlock;
    scale = scale_for(job, amax_of(tile.values[0], kBlock * kBlock));
    put_block_scale(job.out.rowwise_scale_inv, tile_row, tile_col, col_blocks, scale);
    put_block_scale(job.out.columnwise_scale_inv, tile_col, tile_row, row_blocks, scale);
  }
  std::fill_n(scales, kBlock, scale);
  for (int r = 0; r < kBlock; ++r) convert_row(job, tile, r, scales);
  put_bytes(job.out.rowwise, tile_row * kBlock, tile_col * kBlock, tile, false);
  put_bytes(job.out.columnwise, tile_col * kBlock, tile_row * kBlock, tile, true);
}

// Sums of 4 rows in order, neighbours of these, neighbours of those, and the 8 results in order: the order of a CUDA
// block, whose threads have 8 rows each and whose warps 16.
void put_column_sums(const Job& job, const Tile& tile, int64_t tile_row, int64_t tile_col) {
  float total[kBlock] = {};
  for (int first = 0; first < kBlock; first += 16) {
    float quads[4][kBlock] = {};
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < kBlock; ++c) quads[r / 4][c] += tile.values[first + r][c];
    }
    for (int c = 0; c < kBlock; ++c) total[c] += (quads[0][c] + quads[1][c]) + (quads[2][c] + quads[3][c]);
  }
  const int64_t n = std::min<int64_t>(kBlock, job.cols - tile_col * kBlock);
  if (tile_row < job.plan.column_sums.rows && n > 0) {
    std::copy_n(total, n, row_ptr<float>(job.plan.column_sums, tile_row) + tile_col * kBlock);
  }
}

template <class T>
void load_tile(const te_tensor& x, int64_t first_row, int64_t first_col, Tile& tile) {
  const int64_t rows = std::min<int64_t>(kBlock, x.rows - first_row);
  const int64_t cols = std::min<int64_t>(kBlock, x.cols - first_col);
  std::memset(tile.values, 0, sizeof tile.values);
  float buffer[kBlock];
  for (int64_t r = 0; r < rows && cols > 0; ++r) {
    const float* values = load_chunk(row_ptr<const T>(x, first_row + r) + first_col, buffer, cols);
    std::copy_n(values, cols, tile.values[r]);
  }
}

void put_tensor_scale(const te_tensor& scale_inv, float scale) {
  if (scale_inv.data == nullptr) return;
  static_cast<float*>(scale_inv.data)[0] = 1.f / scale;
  if (scale_inv.cols == 2) static_cast<float*>(scale_inv.data)[1] = scale;
}

}  // namespace

void quantize(const te_quantize_plan& plan, const te_tensor& x, const te_quantized& out) {
  if (is_noop(plan.noop)) return;
  const bool e5m2 = (out.rowwise.data != nullptr ? out.rowwise : out.columnwise).dtype == TE_FLOAT8_E5M2;
  Job job{plan, out, x.rows, x.cols, 1.f, fp8_max(e5m2), e5m2};
  const bool given = plan.scale.data != nullptr;
  float amax = given || plan.amax_parts.data == nullptr
                   ? 0.f
                   : amax_of(static_cast<const float*>(plan.amax_parts.data), plan.amax_parts.cols);
  if (out.scaling == TE_SCALING_TENSOR) {
    job.scale = given ? value_at(plan.scale) : scale_for(job, amax);
    put_tensor_scale(out.rowwise_scale_inv, job.scale);
    put_tensor_scale(out.columnwise_scale_inv, job.scale);
  }
  const int64_t tile_cols = (std::max(x.cols, out.rowwise.row_pitch) + kBlock - 1) / kBlock;
  const int64_t tile_rows = (std::max(x.rows, out.columnwise.row_pitch) + kBlock - 1) / kBlock;
  std::vector<float> amaxes(size_t(tile_rows * tile_cols), 0.f);
  parallel_for(tile_rows * tile_cols, [&](int64_t number) {
    const int64_t row = number / tile_cols, col = number % tile_cols;
    Tile tile;
    dispatch_float(x.dtype, "te_quantize", "x",
                   [&](auto t) { load_tile<decltype(t)>(x, row * kBlock, col * kBlock, tile); });
    if (plan.column_sums.data != nullptr) put_column_sums(job, tile, row, col);
    if (out.scaling != TE_SCALING_BLOCK_1D) {
      put_one_scale(job, tile, row, col);
    } else {
      if (out.rowwise.data != nullptr) put_rowwise_1d(job, tile, row, col);
      if (out.columnwise.data != nullptr) put_columnwise_1d(job, tile, row, col);
    }
    if (given && plan.amax.data != nullptr) amaxes[size_t(number)] = amax_of(tile.values[0], kBlock * kBlock);
  });
  if (plan.amax.data == nullptr) return;
  if (given) {
    amax = larger(value_at(plan.amax), amax_of(amaxes.data(), int64_t(amaxes.size())));
  }
  *static_cast<float*>(plan.amax.data) = amax;
}

void amax(const te_tensor& x, const te_tensor& parts, const te_tensor& noop) {
  if (is_noop(noop)) return;
  auto* out = static_cast<float*>(parts.data);
  const int64_t step = std::max<int64_t>(1, (x.rows + TE_QUANTIZE_PARTS - 1) / TE_QUANTIZE_PARTS);
  parallel_for(TE_QUANTIZE_PARTS, [&](int64_t part) {
    float largest = 0.f, buffer[kChunk];
    dispatch_float(x.dtype, "te_quantize_amax", "x", [&](auto t) {
      for (int64_t row = part * step; row < std::min(x.rows, (part + 1) * step); ++row) {
        for_chunks(x.cols, [&](int64_t c, int64_t n) {
          largest = larger(largest, amax_of(load_chunk(row_ptr<const decltype(t)>(x, row) + c, buffer, n), n));
        });
      }
    });
    out[part] = largest;
  });
}

void sum_columns(const te_tensor& column_sums, const te_tensor& dbias) {
  std::vector<float> sums(size_t(dbias.cols), 0.f);
  for (int64_t r = 0; r < column_sums.rows; ++r) {
    const float* row = row_ptr<const float>(column_sums, r);
    for (int64_t c = 0; c < dbias.cols; ++c) sums[size_t(c)] += row[c];
  }
  dispatch_float(dbias.dtype, "te_quantize_sum_columns", "dbias",
                 [&](auto t) { store_chunk(row_ptr<decltype(t)>(dbias, 0), sums.data(), dbias.cols); });
}

namespace {

// scale_inv of element (row, col) of one direction, in the rows and columns of that direction.
float scale_inv_at(te_scaling scaling, const te_tensor& scale_inv, int64_t row, int64_t col) {
  const auto [down, along] = scale_at(scaling, row, col);
  return row_ptr<const float>(scale_inv, down)[along];
}

}  // namespace

void dequantize(const te_quantized& x, const te_tensor& y) {
  const bool rowwise = x.rowwise.data != nullptr;
  const te_tensor& data = rowwise ? x.rowwise : x.columnwise;
  const te_tensor& scales = rowwise ? x.rowwise_scale_inv : x.columnwise_scale_inv;
  const bool e5m2 = data.dtype == TE_FLOAT8_E5M2;
  parallel_rows(y.rows, y.cols, [&](int64_t first_row, int64_t last_row) {
    float values[kChunk];
    for (int64_t row = first_row; row < last_row; ++row) {
      for_chunks(y.cols, [&](int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
          const int64_t r = rowwise ? row : first + i, c = rowwise ? first + i : row;
          values[i] = from_fp8(row_ptr<const uint8_t>(data, r)[c], e5m2) * scale_inv_at(x.scaling, scales, r, c);
        }
        dispatch_float(y.dtype, "te_dequantize", "y",
                       [&](auto t) { store_chunk(row_ptr<decltype(t)>(y, row) + first, values, n); });
      });
    }
  });
}

void update_scales(const te_scale_update* updates, int32_t count) {
  for (const te_scale_update* update = updates; update < updates + count; ++update) {
    const te_tensor& history = update->history;
    auto* scales = static_cast<float*>(update->scale.data);
    for (int64_t c = 0; c < history.cols; ++c) {
      const auto at = [&](int64_t r) -> float& { return row_ptr<float>(history, r)[c]; };
      float largest = 0.f;
      for (int64_t r = 0; r < (update->most_recent ? 1 : history.rows); ++r) largest = larger(largest, at(r));
      scales[c] = updated_scale(scales[c], largest, update->fp8_max, update->margin, update->pow_2_scales != 0);
      const float newest = at(0);
      if (newest == 0.f) continue;
      for (int64_t r = 0; r + 1 < history.rows; ++r) at(r) = at(r + 1);
      at(history.rows - 1) = newest;
      at(0) = 0.f;
    }
  }
}

}  // namespace cpu

}  // namespace te::quantize
