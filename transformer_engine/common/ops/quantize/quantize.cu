// quantize, CUDA path: the producer that reads a tensor (tile.cuh and emit.cuh quantize), dequantization, sums of
// partial column sums, and scales between steps. Memory-bound: 3.03 bytes an element for bf16 to 1x128 blocks, 4.06
// with the transpose.
#include "ops/quantize/source.cuh"
#include "ops/quantize/store.h"
#include "transformer_engine/scaling.h"

namespace te::quantize::cuda {

namespace {

// ---- dequantization ----

struct Decoder {
  te_scaling scaling;
  bool e5m2;
  const uint8_t* data;
  int64_t row_pitch;
  const float* scale_inv;
  int64_t scale_pitch;

  // For 16 elements from (row, col) on, or for one; rows and columns are those of the direction.
  __device__ __forceinline__ float scale_at(int64_t row, int64_t col) const {
    const auto [down, along] = te::scale_at(scaling, row, col);
    return scale_inv[down * scale_pitch + along];
  }
};

__device__ __forceinline__ float2 from_fp8_pair(uint32_t pair, bool e5m2) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), e5m2 ? __NV_E5M2 : __NV_E4M3);
  return __half22float2(__half2(halves));
}

constexpr int kBytes = 16;

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads)
    dequantize_rows_kernel(Decoder x, T* y, int64_t y_pitch, int64_t per_row, int64_t pieces) {
  const int64_t piece = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (piece >= pieces) return;
  const int64_t row = piece / per_row, col = piece % per_row * (kWide ? kBytes : 1);
  const uint8_t* source = x.data + row * x.row_pitch + col;
  T* target = y + row * y_pitch + col;
  const float scale = x.scale_at(row, col);
  if constexpr (!kWide) {
    *target = from_float<T>(from_fp8(*source, x.e5m2) * scale);
  } else {
    const uint4 bytes = *reinterpret_cast<const uint4*>(source);
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    float values[kBytes];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = from_fp8_pair(words[i / 2] >> (i % 2 * 16), x.e5m2);
      values[2 * i] = pair.x * scale;
      values[2 * i + 1] = pair.y * scale;
    }
    store_packed<T, kBytes>(target, narrow<T, kBytes>(values));
  }
}

constexpr int kPatch = 32;

// From the transposed direction, by 32 x 32 elements through shared memory; blockIdx.x counts patches.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_columns_kernel(Decoder x, T* y, int64_t y_pitch, int64_t rows, int64_t cols, int64_t patch_cols) {
  __shared__ float patch[kPatch][kPatch + 1];
  const int64_t first_row = blockIdx.x / patch_cols * kPatch, first_col = blockIdx.x % patch_cols * kPatch;
  const int lane = threadIdx.x % kPatch;
  for (int c = int(threadIdx.x) / kPatch; c < kPatch; c += kThreads / kPatch) {
    const int64_t row = first_row + lane, col = first_col + c;  // of y
    if (row < rows && col < cols) {
      patch[lane][c] = from_fp8(x.data[col * x.row_pitch + row], x.e5m2) * x.scale_at(col, row);
    }
  }
  __syncthreads();
  for (int r = int(threadIdx.x) / kPatch; r < kPatch; r += kThreads / kPatch) {
    const int64_t row = first_row + r, col = first_col + lane;
    if (row < rows && col < cols) y[row * y_pitch + col] = from_float<T>(patch[r][lane]);
  }
}

// ---- column sums and scales ----

template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_columns_kernel(const float* sums, int64_t pitch, int64_t rows, T* dbias, int64_t cols) {
  const int64_t col = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= cols) return;
  float total = 0.f;
#pragma unroll 16
  for (int64_t row = 0; row < rows; ++row) total += sums[row * pitch + col];
  dbias[col] = from_float<T>(total);
}

constexpr int kUpdates = 32;
struct Updates {
  te_scale_update of[kUpdates];
};

// A block for each column of a history: blockIdx.x its number, blockIdx.y the update.
__global__ void __launch_bounds__(kThreads) update_scales_kernel(Updates updates) {
  __shared__ Shared shared;
  const te_scale_update& update = updates.of[blockIdx.y];
  const te_tensor& history = update.history;
  if (blockIdx.x >= history.cols) return;
  float* column = static_cast<float*>(history.data) + blockIdx.x;
  const float newest = *column;
  float largest = update.most_recent ? fmaxf(0.f, newest) : 0.f;
  for (int64_t first = 0; first < history.rows; first += kThreads) {
    const int64_t row = first + threadIdx.x;
    float next = 0.f;
    if (row < history.rows) {
      if (!update.most_recent) largest = fmaxf(largest, column[row * history.row_pitch]);
      next = row + 1 < history.rows ? column[(row + 1) * history.row_pitch] : newest;
    }
    __syncthreads();  // these rows, and the first of the next ones, have been read
    if (newest != 0.f && row < history.rows) column[row * history.row_pitch] = row == 0 ? 0.f : next;
  }
  largest = block_max(largest, shared);
  if (threadIdx.x == 0) {
    float& scale = static_cast<float*>(update.scale.data)[blockIdx.x];
    scale = updated_scale(scale, largest, update.fp8_max, update.margin, update.pow_2_scales != 0);
  }
}

unsigned blocks_for(const char* op, int64_t n) { return grid_of(op, (n + kThreads - 1) / kThreads); }

}  // namespace

void quantize(const te_quantize_plan& plan, const te_tensor& x, const te_quantized& out, te_stream stream) {
  dispatch_float(x.dtype, "te_quantize", "x", [&](auto t) {
    const Dests<1> dests{{Dest(plan, out, x.rows, x.cols)}};
    launch_quantize("te_quantize", Source<decltype(t)>(x), dests, x.rows, x.cols, is_wide(x), stream);
  });
}

void amax(const te_tensor& x, const te_tensor& parts, const te_tensor& noop, te_stream stream) {
  dispatch_float(x.dtype, "te_quantize_amax", "x", [&](auto t) {
    launch_amax("te_quantize_amax", Source<decltype(t)>(x), x.rows, x.cols, is_wide(x), parts, noop, stream);
  });
}

void sum_columns(const te_tensor& column_sums, const te_tensor& dbias, te_stream stream) {
  const char* op = "te_quantize_sum_columns";
  if (dbias.cols == 0) return;
  dispatch_float(dbias.dtype, op, "dbias", [&](auto t) {
    sum_columns_kernel<<<blocks_for(op, dbias.cols), kThreads, 0, cudaStream_t(stream)>>>(
        static_cast<const float*>(column_sums.data), column_sums.row_pitch, column_sums.rows,
        static_cast<decltype(t)*>(dbias.data), dbias.cols);
  });
  check_launch(op);
}

void dequantize(const te_quantized& x, const te_tensor& y, te_stream stream) {
  const char* op = "te_dequantize";
  if (y.rows == 0 || y.cols == 0) return;
  const bool rowwise = x.rowwise.data != nullptr;
  const te_tensor& data = rowwise ? x.rowwise : x.columnwise;
  const te_tensor& scale_inv = rowwise ? x.rowwise_scale_inv : x.columnwise_scale_inv;
  const Decoder decoder{x.scaling,
                        data.dtype == TE_FLOAT8_E5M2,
                        static_cast<const uint8_t*>(data.data),
                        data.row_pitch,
                        static_cast<const float*>(scale_inv.data),
                        scale_inv.row_pitch};
  dispatch_float(y.dtype, op, "y", [&](auto t) {
    using T = decltype(t);
    T* target = static_cast<T*>(y.data);
    if (!rowwise) {
      te_note_path("CUDA, through shared memory", "only the columnwise direction is present");
      const int64_t patch_cols = (y.cols + kPatch - 1) / kPatch, patch_rows = (y.rows + kPatch - 1) / kPatch;
      dequantize_columns_kernel<<<grid_of(op, patch_rows * patch_cols), kThreads, 0, cudaStream_t(stream)>>>(
          decoder, target, y.row_pitch, y.rows, y.cols, patch_cols);
      return;
    }
    const bool aligned = aligned16(data) && aligned16(y), divides = y.cols % kBytes == 0;
    note_width(aligned, divides);
    const bool wide = aligned && divides;
    const int64_t per_row = y.cols / (wide ? kBytes : 1), pieces = y.rows * per_row;
    const auto kernel = wide ? dequantize_rows_kernel<T, true> : dequantize_rows_kernel<T, false>;
    kernel<<<blocks_for(op, pieces), kThreads, 0, cudaStream_t(stream)>>>(decoder, target, y.row_pitch, per_row,
                                                                          pieces);
  });
  check_launch(op);
}

void update_scales(const te_scale_update* updates, int32_t count, te_stream stream) {
  for (int32_t first = 0; first < count; first += kUpdates) {
    Updates some{};
    const int32_t n = count - first < kUpdates ? count - first : kUpdates;
    int64_t columns = 0;
    for (int32_t i = 0; i < n; ++i) {
      some.of[i] = updates[first + i];
      columns = some.of[i].history.cols > columns ? some.of[i].history.cols : columns;
    }
    if (columns == 0) continue;
    update_scales_kernel<<<dim3(unsigned(columns), unsigned(n)), kThreads, 0, cudaStream_t(stream)>>>(some);
    check_launch("te_quantize_update_scales");
  }
}

}  // namespace te::quantize::cuda
