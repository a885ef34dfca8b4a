// The kernels that every quantization on CUDA is: a block makes one tile of 128 x 128 values, by a producer that it
// calls, and puts it out in FP8. They read no tensor themselves and do not know what the values are.
//
// A thread holds 8 rows of 8 neighbouring columns in registers, in the values' own dtype: the 16 threads of half a warp
// are a row, so a row's amax takes shuffles alone. Bytes of the other direction cross through shared memory as 8 x 8
// blocks, and leave as 16-byte stores of 128 bytes a column (emit.cuh).
//
// A producer is a struct passed by value:
//   using Type                      the dtype its values are rounded to
//   kOutputs                        tiles it makes from the same place of its inputs
//   kAmaxOutputs                    how many of these, from the first on, count in an amax
//   kBatch                          rows (1, 2, 4 or 8) whose inputs are on their way at once
//   kBlocksPerSm                    what the registers must leave room for
//   Inputs load<kWide>(row, col, n) inputs of n elements at (row, col), n = 8 with kWide and from 1 to 8 without
//   compute(inputs, row, col, out)  out[k], 8 values each; what lies beyond n is ignored
#pragma once

#include "core/device.h"
#include "ops/quantize/emit.cuh"

namespace te::quantize {

template <int kOutputs>
struct Dests {
  Dest of[kOutputs];
};

// The domain of a producer: [rows, cols] elements of each output, in 16-byte accesses where `wide`.
struct Domain {
  int64_t rows, cols;
  int64_t tile_rows, tile_cols;
  bool wide;
};

// What of n elements at p exists; the rest is 0.
template <class T, bool kWide>
__device__ __forceinline__ Vector<T> load_vector(const T* p, int n) {
  if constexpr (kWide) {
    return load_packed<T, kColumns>(p);
  } else {
    T elements[kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) elements[j] = j < n ? p[j] : T{};
    Vector<T> x;
    memcpy(&x, elements, sizeof(x));
    return x;
  }
}

template <bool kWide, class Producer, class T = typename Producer::Type>
__device__ __forceinline__ void produce(const Producer& producer, const Domain& domain, int64_t row, int64_t col,
                                        Vector<T> (&values)[Producer::kOutputs][kRows]) {
  const int n = int(min(int64_t(kColumns), domain.cols - col));
#pragma unroll
  for (int first = 0; first < kRows; first += Producer::kBatch) {
    typename Producer::Inputs inputs[Producer::kBatch];
#pragma unroll
    for (int i = 0; i < Producer::kBatch; ++i) {
      const int64_t r = row + first + i;
      inputs[i] = {};
      if (r < domain.rows && n > 0) inputs[i] = producer.template load<kWide>(r, col, n);
    }
#pragma unroll
    for (int i = 0; i < Producer::kBatch; ++i) {
      const int64_t r = row + first + i;
      Vector<T> out[Producer::kOutputs] = {};
      if (r < domain.rows && n > 0) producer.compute(inputs[i], r, col, out);
#pragma unroll
      for (int k = 0; k < Producer::kOutputs; ++k) {
        if constexpr (!kWide) clear_from(out[k], n);
        values[k][first + i] = out[k];
      }
    }
  }
}

template <class Producer, class T = typename Producer::Type>
__device__ __forceinline__ void produce_tile(const Producer& producer, const Domain& domain, const Place& at,
                                             Vector<T> (&values)[Producer::kOutputs][kRows]) {
  if (domain.wide) {
    produce<true>(producer, domain, at.row(), at.col(), values);
  } else {
    produce<false>(producer, domain, at.row(), at.col(), values);
  }
}

__device__ __forceinline__ bool is_set(const float* noop) { return noop != nullptr && *noop != 0.f; }

template <class Producer>
__global__ void __launch_bounds__(kThreads, Producer::kBlocksPerSm)
    quantize_kernel(Producer producer, Dests<Producer::kOutputs> dests, Domain domain) {
  constexpr int kOutputs = Producer::kOutputs;
  __shared__ Shared shared;
  bool wanted[kOutputs], any = false;
#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
    wanted[k] = !is_set(dests.of[k].noop);
    any = any || wanted[k];
  }
  if (!any) return;
  const Place at(int64_t(blockIdx.x) / domain.tile_cols, int64_t(blockIdx.x) % domain.tile_cols);
  Vector<typename Producer::Type> values[kOutputs][kRows];
  produce_tile(producer, domain, at, values);
#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
    if (!wanted[k]) continue;
    if (k > 0) __syncthreads();  // the last output's readers of `shared`
    emit(dests.of[k], values[k], at, shared);
  }
}

template <class Producer>
__global__ void __launch_bounds__(kThreads, Producer::kBlocksPerSm)
    amax_kernel(Producer producer, Domain domain, float* parts, int n_parts, const float* noop) {
  using T = typename Producer::Type;
  __shared__ Shared shared;
  if (is_set(noop)) return;
  Vector<T> largest = {};
  for (int64_t tile = blockIdx.x; tile < domain.tile_rows * domain.tile_cols; tile += gridDim.x) {
    Vector<T> values[Producer::kOutputs][kRows];
    produce_tile(producer, domain, Place(tile / domain.tile_cols, tile % domain.tile_cols), values);
#pragma unroll
    for (int k = 0; k < Producer::kAmaxOutputs; ++k) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) take_magnitudes(largest, values[k][i]);
    }
  }
  const float amax = block_max(largest_of(largest), shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = amax;
  if (blockIdx.x > 0) return;
  for (int part = int(gridDim.x + threadIdx.x); part < n_parts; part += kThreads) parts[part] = 0.f;
}

// ---- host side ----

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

inline unsigned grid_of(const char* op, int64_t tiles) {
  if (tiles > INT32_MAX) throw Error(TE_NOT_IMPLEMENTED, concat(op, ": more than 2^31 tiles of 128 x 128 elements."));
  return static_cast<unsigned>(tiles < 1 ? 1 : tiles);  // one at least: the scale of an empty tensor is written too
}

// Covers the elements and the tails of both pitches.
template <int kOutputs>
Domain domain_of(int64_t rows, int64_t cols, bool wide, const Dests<kOutputs>& dests) {
  int64_t last_row = rows, last_col = cols;
  for (const Dest& dest : dests.of) {
    if (dest.columnwise != nullptr && dest.column_pitch > last_row) last_row = dest.column_pitch;
    if (kOutputs == 1 && dest.rowwise != nullptr && dest.row_pitch > last_col) last_col = dest.row_pitch;
  }
  const int64_t tile_cols = tiles_of(last_col);
  return {rows, cols, tiles_of(last_row), tile_cols < 1 ? 1 : tile_cols, wide};
}

template <class Producer>
void launch_quantize(const char* op, const Producer& producer, const Dests<Producer::kOutputs>& dests, int64_t rows,
                     int64_t cols, bool wide, te_stream stream) {
  const Domain domain = domain_of(rows, cols, wide, dests);
  quantize_kernel<<<grid_of(op, domain.tile_rows * domain.tile_cols), kThreads, 0, cudaStream_t(stream)>>>(
      producer, dests, domain);
  check_launch(op);
}

template <class Producer>
void launch_amax(const char* op, const Producer& producer, int64_t rows, int64_t cols, bool wide,
                 const te_tensor& parts, const te_tensor& noop, te_stream stream) {
  const Domain domain{rows, cols, tiles_of(rows), tiles_of(cols), wide};
  const int64_t tiles = domain.tile_rows * domain.tile_cols;
  amax_kernel<<<grid_of(op, tiles < parts.cols ? tiles : parts.cols), kThreads, 0, cudaStream_t(stream)>>>(
      producer, domain, static_cast<float*>(parts.data), int(parts.cols), static_cast<const float*>(noop.data));
  check_launch(op);
}

}  // namespace te::quantize
