// The tile kernels of all quantizations on CUDA: a block computes one tile of 128 x 128 values, by a producer that it
// calls, and stores it in FP8. They are independent of the inputs and of the meaning of the values.
//
// A thread holds 8 rows of 8 neighbouring columns in registers, in the values' own dtype: the 16 threads of half a warp
// are a row, so that a row's amax needs shuffles alone. Bytes of the other direction go through shared memory as 8 x 8
// blocks, and are stored 16 bytes at a time, 128 bytes a column (emit.cuh).
//
// A producer is a struct passed by value:
//   using Type                  the dtype to which its values are rounded
//   kInputs, kOutputs           matrices of that dtype that it reads, and tiles that it computes at the same position
//   kAmaxOutputs                the number of outputs, from the first on, that count in an amax
//   kBatch                      rows (1, 2, 4 or 8) whose inputs are loaded at once, into registers
//   kStaged                     inputs and outputs are in shared memory instead: for producers whose outputs do not fit
//                               into registers together
//   kBlocksPerSm                blocks for which registers must suffice
//   input(k, row, col)          the address of an element of input k; that of the next row is pitch(k) elements further
//   Row of(row)                 values that belong to a row, loaded with the inputs; NoRow for none
//   compute(in, of_row, col, out)  out[k] from in[k], 8 neighbouring elements each; those beyond the last column are
//                               ignored
#pragma once

#include "core/device.h"
#include "ops/quantize/emit.cuh"

namespace te::quantize {

template <int kOutputs>
struct Dests {
  Dest of[kOutputs];
};

struct NoRow {};

// The domain of a producer: [rows, cols] elements of each output, in 16-byte accesses where `wide`.
struct Domain {
  int64_t rows, cols;
  int64_t tile_rows, tile_cols;
  bool wide;
};

// Whether all elements of a tile exist and are read in 16 bytes, which is the common case: no access needs a check.
__device__ __forceinline__ bool is_whole(const Domain& domain, const Place& at) {
  return domain.wide && (at.tile_row + 1) * kTile <= domain.rows && (at.tile_col + 1) * kTile <= domain.cols;
}

// 8 elements of an input, or the n of them that exist; the rest is 0.
template <class Producer, class T = typename Producer::Type>
__device__ __forceinline__ Vector<T> load_some(const Producer& producer, int k, int64_t row, int64_t col, int n,
                                               bool wide) {
  if (wide && n == kColumns) return load_packed<T, kColumns>(producer.input(k, row, col));
  T elements[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) elements[j] = j < n ? *producer.input(k, row, col + j) : T{};
  Vector<T> x;
  memcpy(&x, elements, sizeof(x));
  return x;
}

// Calls take(i, out) for each row of a thread in a full tile; i is a compile-time value when kUnrolled. All inputs of
// kBatch rows are loaded together.
template <bool kUnrolled, class Producer, class Take, class T = typename Producer::Type>
__device__ __forceinline__ void for_whole_rows(const Producer& producer, const Place& at, Take&& take) {
  constexpr int kInputs = Producer::kInputs, kBatch = Producer::kBatch;
  const int64_t row = at.row(), col = at.col();
  const T* source[kInputs];
#pragma unroll
  for (int k = 0; k < kInputs; ++k) source[k] = producer.input(k, row, col);
#pragma unroll(kUnrolled ? kRows : 1)
  for (int first = 0; first < kRows; first += kBatch) {
    Vector<T> in[kBatch][kInputs];
    typename Producer::Row of_row[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        in[i][k] = load_packed<T, kColumns>(source[k]);
        source[k] += producer.pitch(k);
      }
      of_row[i] = producer.of(row + first + i);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      Vector<T> out[Producer::kOutputs];
      producer.compute(in[i], of_row[i], col, out);
      take(first + i, out);
    }
  }
}

// The same at edges, and for elements that are read one by one: zeros beyond the domain.
template <bool kUnrolled, class Producer, class Take, class T = typename Producer::Type>
__device__ __forceinline__ void for_some_rows(const Producer& producer, const Domain& domain, const Place& at,
                                              Take&& take) {
  const int64_t row = at.row(), col = at.col();
  const int n = int(min(int64_t(kColumns), domain.cols - col));
#pragma unroll(kUnrolled ? kRows : 1)
  for (int i = 0; i < kRows; ++i) {
    Vector<T> in[Producer::kInputs], out[Producer::kOutputs] = {};
    if (row + i < domain.rows && n > 0) {
#pragma unroll
      for (int k = 0; k < Producer::kInputs; ++k) in[k] = load_some(producer, k, row + i, col, n, domain.wide);
      producer.compute(in, producer.of(row + i), col, out);
#pragma unroll
      for (int k = 0; k < Producer::kOutputs; ++k) clear_from<T>(out[k], n);
    }
    take(i, out);
  }
}

__device__ __forceinline__ bool is_set(const float* noop) { return noop != nullptr && *noop != 0.f; }

// The values of all outputs in registers.
template <class Producer, int kOutputs = Producer::kOutputs>
__device__ __forceinline__ void quantize_tile(const Producer& producer, const Dests<kOutputs>& dests,
                                              const Domain& domain, const Place& at, Shared& shared) {
  using T = typename Producer::Type;
  Vector<T> values[kOutputs][kRows];
  const auto keep = [&](int i, const Vector<T>(&out)[kOutputs]) {
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) values[k][i] = out[k];
  };
  if (is_whole(domain, at)) {
    for_whole_rows<true>(producer, at, keep);
  } else {
    for_some_rows<true>(producer, domain, at, keep);
  }
#pragma unroll
  for (int k = 0; k < kOutputs; ++k) {
    if (k > 0) __syncthreads();  // for the readers of the last output in `shared`
    if (!is_set(dests.of[k].noop)) emit<T>(dests.of[k], values[k], at, shared);
  }
}

// Shared memory of a single thread: input k of its row i, which output k overwrites.
template <class T>
struct Slots {
  Vector<T>* first;

  __device__ __forceinline__ Vector<T>* plane(int k) const { return first + k * kRows * kThreads; }
  __device__ __forceinline__ Vector<T>& at(int k, int i) const { return plane(k)[i * kThreads + int(threadIdx.x)]; }
};

template <class Producer>
constexpr int kSlotBytes = (Producer::kInputs > Producer::kOutputs ? Producer::kInputs : Producer::kOutputs) *
                           kRows* kThreads* int(sizeof(Vector<typename Producer::Type>));

// Copies from global to shared memory without registers.
template <class T>
__device__ __forceinline__ void copy_async(Vector<T>& shared, const T* global) {
#pragma unroll
  for (int part = 0; part < int(sizeof(shared) / 16); ++part) {
    copy_async_16(reinterpret_cast<uint4*>(&shared) + part, reinterpret_cast<const uint4*>(global) + part);
  }
}

// Loads all inputs at once.
template <class Producer, class T = typename Producer::Type>
__device__ __forceinline__ void fill_whole(const Producer& producer, const Place& at, const Slots<T>& slots) {
  constexpr int kInputs = Producer::kInputs, kOutputs = Producer::kOutputs;
  const int64_t row = at.row(), col = at.col();
#pragma unroll
  for (int k = 0; k < kInputs; ++k) {
    const T* source = producer.input(k, row, col);
#pragma unroll
    for (int i = 0; i < kRows; ++i) copy_async(slots.at(k, i), source + i * producer.pitch(k));
  }
  wait_for_copies();  // of this thread alone, which is their only reader
#pragma unroll 2
  for (int i = 0; i < kRows; ++i) {
    Vector<T> in[kInputs], out[kOutputs];
#pragma unroll
    for (int k = 0; k < kInputs; ++k) in[k] = slots.at(k, i);
    producer.compute(in, producer.of(row + i), col, out);
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) slots.at(k, i) = out[k];
  }
}

template <class Producer, class T = typename Producer::Type>
__device__ __forceinline__ void fill_some(const Producer& producer, const Domain& domain, const Place& at,
                                          const Slots<T>& slots) {
  constexpr int kInputs = Producer::kInputs, kOutputs = Producer::kOutputs;
  const int64_t row = at.row(), col = at.col();
  const int n = int(min(int64_t(kColumns), domain.cols - col));
#pragma unroll 1
  for (int i = 0; i < kRows; ++i) {
    Vector<T> in[kInputs], out[kOutputs] = {};
    if (row + i < domain.rows && n > 0) {
#pragma unroll
      for (int k = 0; k < kInputs; ++k) in[k] = load_some(producer, k, row + i, col, n, domain.wide);
      producer.compute(in, producer.of(row + i), col, out);
#pragma unroll
      for (int k = 0; k < kOutputs; ++k) clear_from<T>(out[k], n);
    }
#pragma unroll
    for (int k = 0; k < kOutputs; ++k) slots.at(k, i) = out[k];
  }
}

// One copy of the code for all producers of a dtype, of which there are many.
template <class T>
__device__ __noinline__ void emit_slots(const Dest& dest, Slots<T> slots, int k, Place at, Shared& shared) {
  Vector<T> values[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) values[i] = slots.at(k, i);
  emit<T>(dest, values, at, shared);
}

// Inputs that no output overwrites leave room for the block's shared data, after all have been read.
template <class Producer>
constexpr bool kSharedInSlots = Producer::kStaged && (Producer::kInputs > Producer::kOutputs);

// The registers hold one output at a time.
template <class Producer, int kOutputs = Producer::kOutputs>
__device__ __forceinline__ void quantize_tile_staged(const Producer& producer, const Dests<kOutputs>& dests,
                                                     const Domain& domain, const Place& at,
                                                     const Slots<typename Producer::Type>& slots, Shared& shared) {
  using T = typename Producer::Type;
  if (is_whole(domain, at)) {
    fill_whole(producer, at, slots);
  } else {
    fill_some(producer, domain, at, slots);
  }
  if (kSharedInSlots<Producer>) __syncthreads();
#pragma unroll 1
  for (int k = 0; k < kOutputs; ++k) {
    if (k > 0) __syncthreads();  // for the readers of the last output in `shared`
    if (!is_set(dests.of[k].noop)) emit_slots<T>(dests.of[k], slots, k, at, shared);
  }
}

template <class Producer>
__global__ void __launch_bounds__(kThreads, Producer::kBlocksPerSm)
    quantize_kernel(const __grid_constant__ Producer producer, const __grid_constant__ Dests<Producer::kOutputs> dests,
                    const __grid_constant__ Domain domain) {
  using T = typename Producer::Type;
  bool any = false;
#pragma unroll
  for (int k = 0; k < Producer::kOutputs; ++k) any = any || !is_set(dests.of[k].noop);
  if (!any) return;
  // After an amax pass the last tiles are processed first: their inputs may still be in the L2.
  const unsigned tile = dests.of[0].amax_parts != nullptr ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const Place at(tile / unsigned(domain.tile_cols), tile % unsigned(domain.tile_cols));
  if constexpr (kSharedInSlots<Producer>) {
    const Slots<T> slots{static_cast<Vector<T>*>(dynamic_shared())};
    quantize_tile_staged(producer, dests, domain, at, slots,
                         *reinterpret_cast<Shared*>(slots.plane(Producer::kOutputs)));
  } else {
    __shared__ Shared shared;
    if constexpr (Producer::kStaged) {
      const Slots<T> slots{static_cast<Vector<T>*>(dynamic_shared())};
      quantize_tile_staged(producer, dests, domain, at, slots, shared);
    } else {
      quantize_tile(producer, dests, domain, at, shared);
    }
  }
}

// The largest magnitude of tiles first, first + step, ..., for all threads of the block.
template <class Producer>
__device__ __forceinline__ float amax_of_tiles(const Producer& producer, const Domain& domain, int64_t first,
                                               int64_t step, Shared& shared) {
  using T = typename Producer::Type;
  Vector<T> largest = {};
  const auto take = [&](int, const Vector<T>(&out)[Producer::kOutputs]) {
#pragma unroll
    for (int k = 0; k < Producer::kAmaxOutputs; ++k) take_magnitudes<T>(largest, out[k]);
  };
  for (int64_t tile = first; tile < domain.tile_rows * domain.tile_cols; tile += step) {
    const Place at(tile / domain.tile_cols, tile % domain.tile_cols);
    if (is_whole(domain, at)) {
      for_whole_rows<false>(producer, at, take);
    } else {
      for_some_rows<false>(producer, domain, at, take);
    }
  }
  return block_max(largest_of<T>(largest), shared);
}

template <class Producer>
__global__ void __launch_bounds__(kThreads, Producer::kBlocksPerSm)
    amax_kernel(const __grid_constant__ Producer producer, const __grid_constant__ Domain domain, float* parts,
                int n_parts, const float* noop) {
  __shared__ Shared shared;
  if (is_set(noop)) return;
  const float amax = amax_of_tiles(producer, domain, blockIdx.x, gridDim.x, shared);
  if (threadIdx.x == 0) parts[blockIdx.x] = amax;
  if (blockIdx.x > 0) return;
  for (int part = int(gridDim.x + threadIdx.x); part < n_parts; part += kThreads) parts[part] = 0.f;
}

// ---- host side ----

inline int64_t tiles_of(int64_t n) { return (n + kTile - 1) / kTile; }

inline unsigned grid_of(const char* op, int64_t tiles) {
  if (tiles > INT32_MAX) throw Error(TE_NOT_IMPLEMENTED, concat(op, ": more than 2^31 tiles of 128 x 128 elements."));
  return static_cast<unsigned>(tiles < 1 ? 1 : tiles);  // at least one: the scale of an empty tensor is written too
}

// Covers the elements and the tails of both pitches.
template <int kOutputs>
Domain domain_of(int64_t rows, int64_t cols, bool wide, const Dests<kOutputs>& dests) {
  int64_t last_row = rows, last_col = cols;
  for (const Dest& dest : dests.of) {
    if (dest.columnwise != nullptr && dest.column_pitch > last_row) last_row = dest.column_pitch;
    const int64_t row_end = dest.row_pitch - dest.first_col;
    if (dest.rowwise != nullptr && dest.limit > dest.cols && row_end > last_col) last_col = row_end;
  }
  const int64_t tile_cols = tiles_of(last_col);
  return {rows, cols, tiles_of(last_row), tile_cols < 1 ? 1 : tile_cols, wide};
}

#if !defined(TE_EMULATED_GPU)  // the emulation launches nothing

template <class Producer>
void launch_quantize(const char* op, const Producer& producer, const Dests<Producer::kOutputs>& dests, int64_t rows,
                     int64_t cols, bool wide, te_stream stream) {
  const Domain domain = domain_of(rows, cols, wide, dests);
  const int bytes = Producer::kStaged ? kSlotBytes<Producer> : 0;
  const auto kernel = quantize_kernel<Producer>;
  if (bytes > 0) check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
  kernel<<<grid_of(op, domain.tile_rows * domain.tile_cols), kThreads, bytes, cudaStream_t(stream)>>>(producer, dests,
                                                                                                      domain);
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

#endif

}  // namespace te::quantize
