// normalization, CUDA backward. Each block owns a fixed set of rows (a part): it loads the next two rows into shared
// memory while it computes one, and keeps the sums for dgamma and dbeta in registers from the first row to the last. A
// second kernel adds the parts. Rows that are not aligned to 16 bytes, or too wide, are read twice, one element at a
// time. No atomics, and no order that depends on the machine.
#include <cuda_pipeline_primitives.h>

#include <algorithm>

#include "ops/normalization/row_layout.cuh"

namespace te::normalization::cuda {

namespace {

constexpr const char* kOp = "te_normalization_backward";
constexpr int kVectors = 4;  // of a row, for each thread
constexpr int kMaxLanes = 512;
constexpr int kStages = 2;

template <class T, class G>
struct BackwardArgs {
  Rows<const T> dy, residual_grad, x;
  const G* gamma;
  const float* mean;  // NULL: zeros
  const float* rstd;
  float* dgamma;  // sums of the parts [parts, hidden]; NULL: not wanted
  float* dbeta;   // likewise
  bool want_dx;
  int64_t rows;
  int hidden;
  float shift;  // added to gamma

  BackwardArgs(const Plan& plan, const BackwardTensors& t, int64_t parts)
      : dy(t.dy),
        residual_grad(t.residual_grad),
        x(t.x),
        gamma(static_cast<const G*>(t.gamma.data)),
        mean(static_cast<const float*>(t.mean.data)),
        rstd(static_cast<const float*>(t.rstd.data)),
        dgamma(t.dgamma.data != nullptr ? static_cast<float*>(t.workspace.data) : nullptr),
        dbeta(t.dbeta.data != nullptr ? static_cast<float*>(t.workspace.data) + parts * t.x.cols : nullptr),
        want_dx(t.dx.data != nullptr),
        rows(t.x.rows),
        hidden(int(t.x.cols)),
        shift(plan.zero_centered_gamma ? 1.f : 0.f) {}
};

struct RowStatistics {
  float mean;
  float rstd;
};

template <bool kRms, class Args>
__device__ __forceinline__ RowStatistics statistics_at(const Args& a, int64_t row) {
  if (row >= a.rows) return {0.f, 0.f};
  return {kRms ? 0.f : a.mean[row], a.rstd[row]};
}

// Sums a block's rows of `sums` (threadIdx.y after threadIdx.y) and writes the part's row of partials. `shared` holds 4
// * N * kVectors bytes a thread; a barrier is needed between two calls and before the first.
template <int N>
__device__ __forceinline__ void write_part(const float (&sums)[kVectors][N], float* shared, float* partials,
                                           int hidden) {
  float* target = partials + int64_t(blockIdx.x) * hidden;
  const int width = kVectors * N * blockDim.x;  // columns that the threads of a row cover
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int column = int(threadIdx.x + i * blockDim.x) * N;
    if (blockDim.y > 1) {
#pragma unroll
      for (int j = 0; j < N; ++j) shared[threadIdx.y * width + column + j] = sums[i][j];
    } else if (column < hidden) {
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const float quad[4] = {sums[i][j], sums[i][j + 1], sums[i][j + 2], sums[i][j + 3]};
        store_packed<float, 4>(target + column + j, narrow<float, 4>(quad));
      }
    }
  }
  if (blockDim.y == 1) return;
  __syncthreads();
  for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < hidden; column += blockDim.x * blockDim.y) {
    float sum = 0.f;
    for (int row = 0; row < int(blockDim.y); ++row) sum += shared[row * width + column];
    target[column] = sum;
  }
}

template <class T, class G, bool kRms, class Store>
__global__ void __launch_bounds__(kMaxLanes) backward_kernel(BackwardArgs<T, G> a, Store dx) {
  constexpr int N = kVec<T>;
  constexpr int kSums = kRms ? 1 : 2;
  using Vector = Packed<T, N>;
  extern __shared__ uint4 shared[];
  __shared__ float scratch[kStages][kSums * kWarp];
  const int threads = blockDim.x * blockDim.y;
  const int inputs = a.residual_grad.data != nullptr ? 3 : 2;
  // A thread reads only the bytes that it copied, so that the copies need no barrier.
  Vector* const slots = reinterpret_cast<Vector*>(shared) + threadIdx.y * blockDim.x + threadIdx.x;
  const auto slot = [&](int stage, int input, int i) -> Vector& {
    return slots[((stage * inputs + input) * kVectors + i) * threads];
  };
  const auto vector_of = [](int i) { return int(threadIdx.x + i * blockDim.x); };
  const int vectors = a.hidden / N;

  // Vectors beyond the row's end are zeros throughout; rows beyond the last are filled with zeros in turn.
  for (int i = 0; i < kVectors; ++i) {
    for (int k = 0; k < kStages * inputs && vector_of(i) >= vectors; ++k) slot(k / inputs, k % inputs, i) = {};
  }
  const auto copy_row = [&](int64_t row, int stage) {
    const size_t blank = row < a.rows ? 0 : sizeof(Vector);
    const int64_t source = row < a.rows ? row : 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (vector_of(i) >= vectors) continue;
      const int column = vector_of(i) * N;
      __pipeline_memcpy_async(&slot(stage, 0, i), a.dy.at(source) + column, sizeof(Vector), blank);
      __pipeline_memcpy_async(&slot(stage, 1, i), a.x.at(source) + column, sizeof(Vector), blank);
      if (inputs == 3) {
        __pipeline_memcpy_async(&slot(stage, 2, i), a.residual_grad.at(source) + column, sizeof(Vector), blank);
      }
    }
    __pipeline_commit();
  };

  const int64_t step = int64_t(gridDim.x) * blockDim.y;
  int64_t base = int64_t(blockIdx.x) * blockDim.y;  // the block's rows are base + threadIdx.y
  copy_row(base + threadIdx.y, 0);
  copy_row(base + threadIdx.y + step, 1);
  RowStatistics s = statistics_at<kRms>(a, base + threadIdx.y);
  // A float gamma with 16-bit rows needs twice the registers, and is loaded again for each row.
  constexpr bool kHoldGamma = sizeof(G) == sizeof(T);
  Packed<G, N> gamma[kHoldGamma ? kVectors : 1];
  const auto load_gamma = [&](int i) -> Packed<G, N> {
    if (vector_of(i) < vectors) return load_packed<G, N>(a.gamma + vector_of(i) * N);
    return {};
  };
  const auto gamma_at = [&](int i, float(&g)[N]) {
    if constexpr (kHoldGamma) {
      widen<G, N>(gamma[i], g);
    } else {
      widen<G, N>(load_gamma(i), g);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) g[j] += a.shift;
  };
  if constexpr (kHoldGamma) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) gamma[i] = load_gamma(i);
  }
  float dgamma[kVectors][N] = {};
  float dbeta[kRms ? 1 : kVectors][N] = {};

  for (int stage = 0; base < a.rows; base += step, stage ^= 1) {
    const int64_t row = base + threadIdx.y;
    const RowStatistics next = statistics_at<kRms>(a, row + step);
    __pipeline_wait_prior(kStages - 1);
    forget(gamma);
    float mean[kSums] = {};  // of w * n, and of w
    if (a.want_dx) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float d[N], h[N], g[N];
        widen<T, N>(slot(stage, 0, i), d);
        widen<T, N>(slot(stage, 1, i), h);
        gamma_at(i, g);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          d[j] *= g[j];
          h[j] = d[j] * ((h[j] - s.mean) * s.rstd);
        }
        mean[0] += vector_sum(h);
        if constexpr (!kRms) mean[1] += vector_sum(d);
      }
      row_sum(mean, scratch[stage]);
      forget(gamma);
#pragma unroll
      for (int k = 0; k < kSums; ++k) mean[k] /= float(a.hidden);
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float d[N], h[N], g[N];
      widen<T, N>(slot(stage, 0, i), d);
      widen<T, N>(slot(stage, 1, i), h);
      gamma_at(i, g);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        h[j] = (h[j] - s.mean) * s.rstd;
        dgamma[i][j] += d[j] * h[j];
        if constexpr (!kRms) dbeta[i][j] += d[j];
        d[j] = (d[j] * g[j] - (kRms ? 0.f : mean[kSums - 1]) - h[j] * mean[0]) * s.rstd;
      }
      if (inputs == 3) {
        widen<T, N>(slot(stage, 2, i), h);
#pragma unroll
        for (int j = 0; j < N; ++j) d[j] += h[j];
      }
      if (a.want_dx && row < a.rows && vector_of(i) < vectors) dx.store(row, vector_of(i) * N, d);
    }
    copy_row(row + kStages * step, stage);
    s = next;
  }

  __pipeline_wait_prior(0);  // copies of zeros beyond the last row: the memory is reused
  float* const sums = reinterpret_cast<float*>(shared);
  __syncthreads();
  if (a.dgamma != nullptr) write_part(dgamma, sums, a.dgamma, a.hidden);
  if constexpr (!kRms) {
    __syncthreads();
    if (a.dbeta != nullptr) write_part(dbeta, sums, a.dbeta, a.hidden);
  }
}

// Any alignment and width: dx alone, one row of threads for each row.
template <class T, class G, class Store>
__global__ void __launch_bounds__(kMaxLanes) dx_any_kernel(BackwardArgs<T, G> a, Store dx) {
  __shared__ float scratch[2 * kWarp];
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int hidden = row < a.rows ? a.hidden : 0;
  const RowStatistics s = a.mean != nullptr ? statistics_at<false>(a, row) : statistics_at<true>(a, row);
  const auto w_at = [&](int c) { return to_float(a.dy.at(row)[c]) * (to_float(a.gamma[c]) + a.shift); };
  const auto n_at = [&](int c) { return (to_float(a.x.at(row)[c]) - s.mean) * s.rstd; };
  float mean[2] = {0.f, 0.f};  // of w * n, and of w
  for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
    const float w = w_at(c);
    mean[0] += w * n_at(c);
    mean[1] += w;
  }
  row_sum(mean, scratch);
  mean[0] /= float(a.hidden);
  mean[1] = a.mean != nullptr ? mean[1] / float(a.hidden) : 0.f;
  for (int c = threadIdx.x; c < hidden; c += blockDim.x) {
    float v[1] = {(w_at(c) - mean[1] - n_at(c) * mean[0]) * s.rstd};
    if (a.residual_grad.data != nullptr) v[0] += to_float(a.residual_grad.at(row)[c]);
    dx.store(row, c, v);
  }
}

// Any alignment and width: the sums of the parts alone, a thread for each column, a blockIdx.y for each part.
template <class T, class G>
__global__ void parts_any_kernel(BackwardArgs<T, G> a) {
  const int column = blockIdx.x * blockDim.x + threadIdx.x;
  if (column >= a.hidden) return;
  float dgamma = 0.f, dbeta = 0.f;
#pragma unroll 4
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    const float d = to_float(a.dy.at(row)[column]);
    dgamma += d * ((to_float(a.x.at(row)[column]) - (a.mean != nullptr ? a.mean[row] : 0.f)) * a.rstd[row]);
    dbeta += d;
  }
  const int64_t at = int64_t(blockIdx.y) * a.hidden + column;
  if (a.dgamma != nullptr) a.dgamma[at] = dgamma;
  if (a.dbeta != nullptr) a.dbeta[at] = dbeta;
}

// target[column] = sum of the parts: 32 columns a block; a warp's lanes cover the columns, its 32 warps the parts, and
// then a butterfly adds the 32 sums of a column. blockIdx.y: 0 for dgamma, 1 for dbeta.
template <class G>
__global__ void __launch_bounds__(kWarp* kWarp)
    sum_parts_kernel(const float* dgamma_parts, const float* dbeta_parts, int parts, int hidden, G* dgamma, G* dbeta) {
  __shared__ float sums[kWarp][kWarp + 1];
  const float* source = blockIdx.y == 0 ? dgamma_parts : dbeta_parts;
  G* target = blockIdx.y == 0 ? dgamma : dbeta;
  if (target == nullptr) return;
  const int column = blockIdx.x * kWarp + threadIdx.x;
  float sum = 0.f;
  if (column < hidden) {
#pragma unroll 8
    for (int part = threadIdx.y; part < parts; part += kWarp) sum += source[int64_t(part) * hidden + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
  const int summed = blockIdx.x * kWarp + threadIdx.y;
  if (threadIdx.x == 0 && summed < hidden) target[summed] = from_float<G>(sum);
}

template <class T, class G>
int64_t launch_parts(const Plan& plan, const BackwardTensors& t, cudaStream_t stream) {
  const Layout layout = layout_for(t.x.cols / kVec<T>, kVectors, kMaxLanes);
  const int64_t groups = (t.x.rows + layout.rows - 1) / layout.rows;
  const int64_t parts =
      std::min({groups, max_parts(t.x.rows, t.x.cols), kSms * std::max<int64_t>(1, kThreadsPerSm / layout.threads())});
  const int inputs = t.residual_grad.data != nullptr ? 3 : 2;
  const int bytes = kStages * inputs * kVectors * layout.threads() * 16;
  const auto launch = [&](auto rms) {
    const auto kernel = backward_kernel<T, G, rms(), quantize::PlainStore<T>>;
    if (bytes >= 40 * 1024) {  // the default limit of 48 KiB includes the static shared memory
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), kOp);
    }
    kernel<<<unsigned(parts), layout.block(), size_t(bytes), stream>>>(BackwardArgs<T, G>(plan, t, parts),
                                                                       quantize::PlainStore<T>(t.dx));
  };
  if (plan.rms) {
    launch(std::true_type{});
  } else {
    launch(std::false_type{});
  }
  check_launch(kOp);
  return parts;
}

template <class T, class G>
int64_t launch_any(const Plan& plan, const BackwardTensors& t, cudaStream_t stream) {
  const int64_t parts = max_parts(t.x.rows, t.x.cols);
  const BackwardArgs<T, G> args(plan, t, parts);
  if (args.dgamma != nullptr || args.dbeta != nullptr) {  // before dx, which may overwrite dy
    constexpr int kColumns = 128;
    parts_any_kernel<<<dim3(unsigned((t.x.cols + kColumns - 1) / kColumns), unsigned(parts)), kColumns, 0, stream>>>(
        args);
    check_launch(kOp);
  }
  if (args.want_dx) {
    const Layout layout = layout_for(t.x.cols, 8, kMaxLanes);
    dx_any_kernel<<<blocks_for(t.x.rows, layout, kOp), layout.block(), 0, stream>>>(args,
                                                                                    quantize::PlainStore<T>(t.dx));
    check_launch(kOp);
  }
  return parts;
}

template <class G>
void launch_sum(const BackwardTensors& t, int64_t parts, cudaStream_t stream) {
  if (t.dgamma.data == nullptr && t.dbeta.data == nullptr) return;
  const float* partials = static_cast<const float*>(t.workspace.data);
  const dim3 blocks(unsigned((t.x.cols + kWarp - 1) / kWarp), t.dbeta.data != nullptr ? 2 : 1);
  sum_parts_kernel<G><<<blocks, dim3(kWarp, kWarp), 0, stream>>>(partials, partials + parts * t.x.cols, int(parts),
                                                                 int(t.x.cols), static_cast<G*>(t.dgamma.data),
                                                                 static_cast<G*>(t.dbeta.data));
  check_launch(kOp);
}

}  // namespace

void backward(const Plan& plan, const BackwardTensors& t, te_stream stream) {
  bool aligned = true;
  for (const te_tensor* tensor : {&t.dy, &t.residual_grad, &t.x, &t.gamma, &t.dx}) {
    aligned = aligned && aligned16(*tensor);
  }
  dispatch_types(t.x, t.gamma, kOp, [&](auto x_type, auto gamma_type) {
    using T = decltype(x_type);
    using G = decltype(gamma_type);
    const bool divides = t.x.cols % kVec<T> == 0;
    const bool held = aligned && divides && t.x.cols / kVec<T> <= kVectors * kMaxLanes;
    note_row_path(aligned, divides, held);
    int64_t parts = 0;
    if (t.x.rows > 0) {
      parts =
          held ? launch_parts<T, G>(plan, t, cudaStream_t(stream)) : launch_any<T, G>(plan, t, cudaStream_t(stream));
    }
    launch_sum<G>(t, parts, cudaStream_t(stream));
  });
}

}  // namespace te::normalization::cuda
