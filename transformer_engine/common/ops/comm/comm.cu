// comm, CUDA path of the ordered sum: each thread adds one 16-byte vector (or one element) of all partials. Bound by
// memory: count + 1 times out's bytes.
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
__global__ void __launch_bounds__(kThreads) ordered_sum_kernel(const __grid_constant__ Partials partials, const T* bias,
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

template <class T, int N>
void launch(const Partials& partials, const te_tensor& bias, const te_tensor& out, cudaStream_t stream) {
  const int64_t vectors = (out.cols + N - 1) / N;
  unsigned across = 1;
  while (across < kThreads && int64_t(across) < vectors) across *= 2;
  const unsigned down = kThreads / across;
  const dim3 block(across, down);
  const dim3 grid(unsigned((vectors + across - 1) / across),
                  unsigned(std::min((out.rows + down - 1) / down, kMostRowBlocks)));
  ordered_sum_kernel<T, N><<<grid, block, 0, stream>>>(partials, static_cast<const T*>(bias.data),
                                                       static_cast<T*>(out.data), out.row_pitch, out.rows, out.cols);
}

}  // namespace

void ordered_sum(const te_tensor* tensors, int32_t count, const te_tensor& bias, const te_tensor& out,
                 te_stream stream) {
  Partials partials;
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

}  // namespace te::comm::cuda
