// optimizer, CUDA path of norms: a block sums the squares of one chunk in double, then one block adds all chunks, and
// one block for each tensor its chunks. Every order depends on sizes alone, at any address.
#include <cmath>

#include "ops/optimizer/multi_tensor.cuh"
#include "ops/optimizer/optimizer_math.h"

namespace te::optimizer::cuda {

namespace {

constexpr int kLoads = 8;  // of 16 bytes, in flight at once

// The sum of the threads' x, in thread 0; by all threads.
template <int kBlock>
__device__ __forceinline__ double block_sum(double x) {
  __shared__ double scratch[kBlock / kWarp];
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  double sum = 0.0;
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kBlock / kWarp; ++i) sum += scratch[i];
  }
  return sum;
}

struct SumsLaunch {
  const float* inv_scale;
  double* partials;
  Table<1> table;
};

// Thread t sums elements [(k * kThreads + t) * N, + N) for k = 0, 1, ..., for any width of access.
template <class T>
__global__ void __launch_bounds__(kThreads) square_sums_kernel(const __grid_constant__ SumsLaunch launch) {
  constexpr int N = kVec<T>, kStep = kThreads * N;
  static_assert(TE_OPTIMIZER_NORM_CHUNK % (kStep * kLoads / 2) == 0);
  const Place at = place_of(launch.table, TE_OPTIMIZER_NORM_CHUNK);
  const T* x = static_cast<const T*>(launch.table.data[0][at.tensor]) + at.first;
  const float factor = value_or(launch.inv_scale, 1.f);
  double sums[4] = {};
  const auto take = [&](const float(&values)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      const double value = double(values[k] * factor);
      sums[k % 4] = fma(value, value, sums[k % 4]);
    }
  };
  const bool wide = reinterpret_cast<uintptr_t>(x) % 16 == 0;
  int first = int(threadIdx.x) * N;
  for (; wide && first + (kLoads - 1) * kStep + N <= at.n; first += kLoads * kStep) {
    Packed<T, N> raw[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) raw[u] = load_packed<T, N>(x + first + u * kStep);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      float values[N];
      widen<T, N>(raw[u], values);
      take(values);
    }
  }
  for (; first < at.n; first += kStep) {
    float values[N];
    if (wide && first + N <= at.n) {
      load_floats<T, N>(x + first, values);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) values[k] = first + k < at.n ? to_float(x[first + k]) : 0.f;
    }
    take(values);
  }
  const double sum = block_sum<kThreads>((sums[0] + sums[1]) + (sums[2] + sums[3]));
  if (threadIdx.x == 0) launch.partials[blockIdx.x] = sum;
}

constexpr int kTotalThreads = 1024;

template <int kBlock>
__device__ __forceinline__ double sum_of(const double* partials, int64_t n) {
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += kBlock) sum += partials[i];
  return block_sum<kBlock>(sum);
}

__global__ void __launch_bounds__(kTotalThreads)
    total_kernel(const double* partials, int64_t n, float* norm, Flag noop) {
  const double sum = sum_of<kTotalThreads>(partials, n);
  if (threadIdx.x != 0) return;
  const float result = float(sqrt(sum));
  *norm = result;
  if (!is_finite(result)) noop.set();
}

constexpr int kNorms = 2000;  // of one launch

struct NormsLaunch {
  const double* partials;
  float* norms;
  int64_t first[kNorms + 1];
};
static_assert(sizeof(NormsLaunch) <= kArgumentBytes);

__global__ void __launch_bounds__(kThreads) norms_kernel(const __grid_constant__ NormsLaunch launch) {
  const int64_t first = launch.first[blockIdx.x];
  const double sum = sum_of<kThreads>(launch.partials + first, launch.first[blockIdx.x + 1] - first);
  if (threadIdx.x == 0) launch.norms[blockIdx.x] = float(sqrt(sum));
}

}  // namespace

void square_sums(Tensors tensors, int64_t count, te_dtype dtype, const te_tensor& inv_scale, double* partials,
                 te_stream stream) {
  const char* op = "te_optimizer_square_sums";
  SumsLaunch launch{floats_at(inv_scale), partials, {}};
  dispatch_float(dtype, op, "dtype", [&](auto t) {
    using T = decltype(t);
    for_tables(op, launch, tensors, count, TE_OPTIMIZER_NORM_CHUNK, no_extra(), [&](SumsLaunch& full, unsigned blocks) {
      square_sums_kernel<T><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(full);
      full.partials += blocks;
    });
  });
}

void norm(const double* partials, const int64_t* chunks, int64_t count, const te_tensor& norm,
          const te_tensor& per_tensor, const te_tensor& noop, te_stream stream) {
  int64_t total = 0;
  for (int64_t t = 0; t < count; ++t) total += chunks[t];
  total_kernel<<<1, kTotalThreads, 0, cudaStream_t(stream)>>>(partials, total, static_cast<float*>(norm.data),
                                                              Flag(noop));
  check_launch("te_optimizer_norm");
  if (per_tensor.data == nullptr) return;
  for (int64_t done = 0, first = 0; done < count;) {
    NormsLaunch launch;
    launch.partials = partials;
    launch.norms = static_cast<float*>(per_tensor.data) + done;
    int n = 0;
    for (; n < kNorms && done < count; ++n, ++done) {
      launch.first[n] = first;
      first += chunks[done];
    }
    launch.first[n] = first;
    norms_kernel<<<unsigned(n), kThreads, 0, cudaStream_t(stream)>>>(launch);
  }
  check_launch("te_optimizer_norm");
}

}  // namespace te::optimizer::cuda
