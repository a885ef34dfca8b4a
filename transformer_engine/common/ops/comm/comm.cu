// comm, CUDA paths. The ordered sum: each thread adds one 16-byte vector (or one element) of all partials, count + 1
// times out's bytes. The interleave: each thread copies one such piece of several rows, twice out's bytes. Both are
// memory-bound.
#include <algorithm>

#include "core/device.h"
#include "core/vec.cuh"
#include "ops/comm/comm.h"

namespace te::comm::cuda {

namespace {

constexpr int kThreads = 256;  // of a block: x over columns, y over rows
constexpr int64_t kMostRowBlocks = 65535;

// No pointer is __restrict__: out may be one of the partials.
template <class T, int N>
__global__ void __launch_bounds__(kThreads) ordered_sum_kernel(const __grid_constant__ Ranks partials, const T* bias,
                                                               T* out, int64_t out_pitch, int64_t rows, int64_t cols) {
  const int64_t col = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (col >= cols) return;
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    float sum[N];
    load_floats<T, N>(static_cast<const T*>(partials.data[0]) + row * partials.row_pitch[0] + col, sum);
#pragma unroll 4
    for (int rank = 1; rank < partials.count; ++rank) {
      float values[N];
      load_floats<T, N>(static_cast<const T*>(partials.data[rank]) + row * partials.row_pitch[rank] + col, values);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += values[i];
    }
    if (bias != nullptr) {
      float values[N];
      load_floats<T, N>(bias + col, values);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += values[i];
    }
    store_packed<T, N>(out + row * out_pitch + col, narrow<T, N>(sum));
  }
}

// Blocks for a matrix of `across` items a row, one item a thread, over rows in grid-sized steps.
struct Shape {
  dim3 block, grid;

  Shape(int64_t across, int64_t rows) {
    unsigned width = 1;
    while (width < kThreads && int64_t(width) < across) width *= 2;
    block = dim3(width, kThreads / width);
    grid = dim3(unsigned((across + width - 1) / width),
                unsigned(std::min((rows + block.y - 1) / block.y, kMostRowBlocks)));
  }
};

template <class T, int N>
void launch(const Ranks& partials, const te_tensor& bias, const te_tensor& out, cudaStream_t stream) {
  const Shape shape((out.cols + N - 1) / N, out.rows);
  ordered_sum_kernel<T, N><<<shape.grid, shape.block, 0, stream>>>(
      partials, static_cast<const T*>(bias.data), static_cast<T*>(out.data), out.row_pitch, out.rows, out.cols);
}

// Sizes and pitches in pieces W, but for the shards' pitches: bytes.
template <class W>
__global__ void __launch_bounds__(kThreads)
    interleave_kernel(const __grid_constant__ Ranks shards, W* out, int64_t out_pitch, int64_t rows, int64_t run) {
  const int64_t col = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (col >= out_pitch) return;
  const int64_t rank = col / run;
  const bool inside = rank < shards.count;  // else beyond the columns, which become zeros
  const char* source = nullptr;
  int64_t pitch = 0;
  if (inside) {
    source = static_cast<const char*>(shards.data[rank]) + (col - rank * run) * int64_t(sizeof(W));
    pitch = shards.row_pitch[rank];
  }
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows;
       row += int64_t(gridDim.y) * blockDim.y) {
    W piece{};
    if (inside) piece = *reinterpret_cast<const W*>(source + row * pitch);
    out[row * out_pitch + col] = piece;
  }
}

template <class W>
void launch_interleave(const Ranks& shards, const te_tensor& out, int64_t run_bytes, cudaStream_t stream) {
  const int64_t width = int64_t(sizeof(W)), pitch = out.row_pitch * int64_t(te_dtype_bytes(out.dtype)) / width;
  const Shape shape(pitch, out.rows);
  interleave_kernel<W>
      <<<shape.grid, shape.block, 0, stream>>>(shards, static_cast<W*>(out.data), pitch, out.rows, run_bytes / width);
}

}  // namespace

void ordered_sum(const te_tensor* tensors, int32_t count, const te_tensor& bias, const te_tensor& out,
                 te_stream stream) {
  Ranks partials;
  partials.count = count;
  bool aligned = aligned16(out) && aligned16(bias);
  for (int32_t rank = 0; rank < count; ++rank) {
    partials.data[rank] = tensors[rank].data;
    partials.row_pitch[rank] = tensors[rank].row_pitch;
    aligned = aligned && aligned16(tensors[rank]);
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  dispatch_float(out.dtype, "te_comm_ordered_sum", "out", [&](auto t) {
    using T = decltype(t);
    const bool divides = out.cols % kVec<T> == 0;
    note_width(aligned, divides);
    if (aligned && divides) {
      launch<T, kVec<T>>(partials, bias, out, cuda_stream);
    } else {
      launch<T, 1>(partials, bias, out, cuda_stream);
    }
  });
  check_launch("te_comm_ordered_sum");
}

void interleave(const te_tensor* tensors, int32_t count, const te_tensor& out, te_stream stream) {
  const int64_t element = int64_t(te_dtype_bytes(out.dtype)), run_bytes = tensors[0].cols * element;
  Ranks shards;
  shards.count = count;
  // The tail of a single row is written too.
  bool aligned = aligned16(out) && out.row_pitch * element % 16 == 0;
  for (int32_t rank = 0; rank < count; ++rank) {
    shards.data[rank] = tensors[rank].data;
    shards.row_pitch[rank] = tensors[rank].row_pitch * element;
    aligned = aligned && aligned16(tensors[rank]);
  }
  const bool divides = run_bytes % 16 == 0;
  note_width(aligned, divides);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (aligned && divides) {
    launch_interleave<uint4>(shards, out, run_bytes, cuda_stream);
  } else if (element == 4) {
    launch_interleave<uint32_t>(shards, out, run_bytes, cuda_stream);
  } else {
    launch_interleave<uint8_t>(shards, out, run_bytes, cuda_stream);
  }
  check_launch("te_comm_interleave");
}

bool is_captured(te_stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "te_comm_is_captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace te::comm::cuda
