// cross_entropy, CUDA path. Memory-bound: a row is read once and its gradient written once, 4 bytes an element of a
// 16-bit type. A row of 128256 in bf16 is 251 KiB, more than the 227 KiB of shared memory of an SM, and 132 SMs with a
// row each would have 34 MB between a first and a second read, which may exceed the halves of a 60 MB L2. So a row is
// kept in the shared memory of a cluster: 1, 2, 4 or 8 blocks with at most 64 KiB each, so that three blocks share an
// SM and one loads while another computes or stores. Rows beyond 8 x 192 KiB are read twice. The columns of a thread,
// and so the order of each sum, depend on the row's length and dtype alone: rows that do not start on 16 bytes are read
// one element at a time by the same threads. A thread reads in shared memory only the bytes that it copied.
#include <cooperative_groups.h>

#include <algorithm>

#include "core/device.h"
#include "ops/cross_entropy/cross_entropy_row.cuh"

namespace te::cross_entropy::cuda {

namespace {

namespace cg = cooperative_groups;

constexpr int kMaxThreads = 512;
constexpr int kMaxCluster = 8;
constexpr int64_t kEasyBytes = 64 << 10;   // of a row, in each block of a cluster, while there are blocks to add
constexpr int64_t kMostBytes = 192 << 10;  // with all of them
constexpr int kSlotBytes = 16;

struct Exp {
  __device__ __forceinline__ float operator()(float x) const { return exp2_of(x * kLog2e); }
};

// A row divided into slots of 16 bytes: `slots` for each block of its cluster, assigned to its threads in turn.
struct Layout {
  int cluster, threads;
  int64_t slots;  // of a block
  bool held;

  static Layout of(int64_t cols, int64_t element_bytes) {
    const int64_t all = (cols * element_bytes + kSlotBytes - 1) / kSlotBytes;
    int cluster = 1;
    while (cluster < kMaxCluster && (all + cluster - 1) / cluster * kSlotBytes > kEasyBytes) cluster *= 2;
    const int64_t slots = (all + cluster - 1) / cluster;
    const int threads = int(std::min<int64_t>(kMaxThreads, (slots + kWarp - 1) / kWarp * kWarp));
    return {cluster, threads, slots, slots * kSlotBytes <= kMostBytes};
  }
};

template <class T>
struct Args {
  T* logits;
  const int64_t* target;
  float* loss;
  const float* scale;
  const Statistic* given;  // of all ranks; NULL: computed here
  Statistic* out;          // if the statistics alone are wanted
  int64_t pitch, rows, cols, slots, classes, ignore_idx, first_class;
  int cluster, ranks, scale_step;
  float smoothing;
  bool gradient, wide;
};

// A cluster processes a row, each block its columns. kHeld: in dynamic shared memory.
template <class T, bool kHeld>
__global__ void __launch_bounds__(kMaxThreads, 3) forward_kernel(const __grid_constant__ Args<T> a) {
  extern __shared__ uint4 shared[];
  __shared__ float scratch[3 * kWarp];
  __shared__ Statistic block_statistic;
  const int64_t row = blockIdx.x / unsigned(a.cluster);
  const int block = int(blockIdx.x % unsigned(a.cluster));
  T* const logits = a.logits + row * a.pitch;
  const int64_t first = block * a.slots;
  const Part<T> part = Part<T>::of(logits, first, a.slots, a.cols, a.wide);
  const int64_t target = a.target[row];
  const Kind kind = kind_of(target, a.ignore_idx, a.classes);
  const bool is_writer = block == 0 && threadIdx.x == 0;  // writes the row's results
  if (a.out == nullptr && kind != Kind::kMeant) {         // the same for all blocks of the cluster
    const float value = kind == Kind::kIgnored ? 0.f : NAN;
    if (is_writer) a.loss[row] = value;
    if (a.gradient) part.fill(value);
    return;
  }
  const int64_t own = target - a.first_class;  // column, or outside of the row
  // Read before any block of the cluster overwrites it: all blocks wait for this one first.
  float at_target = is_writer && own >= 0 && own < a.cols ? to_float(logits[own]) : NAN;

  const std::conditional_t<kHeld, HeldView<T>, ReadView<T>> view(part, shared);
  Statistic statistic;
  if (a.given == nullptr) {
    statistic = statistic_of(part, a.smoothing, scratch, view);
    if (a.cluster > 1) {
      const cg::cluster_group cluster = cg::this_cluster();
      if (threadIdx.x == 0) block_statistic = statistic;
      cluster.sync();
      statistic = merged(
          a.cluster, Exp{}, [&](int i) { return *cluster.map_shared_rank(&block_statistic, i); },
          [&](int i) { return float(Part<T>::of(logits, i * a.slots, a.slots, a.cols, false).cols); });
      cluster.barrier_arrive();  // other blocks may still read this block's shared memory
    }
    statistic.target = at_target;
  } else {
    statistic = merged(
        a.ranks, Exp{}, [&](int r) { return a.given[r * a.rows + row]; }, [&](int) { return float(a.cols); });
  }
  if (a.out != nullptr) {
    if (is_writer) a.out[row] = statistic;
  } else {
    const RowOptions options{a.smoothing, float(a.classes)};
    if (is_writer) a.loss[row] = options.loss(statistic, logf(statistic.sum));
    if (a.gradient) {
      const float scale = a.scale != nullptr ? a.scale[row * a.scale_step] : 1.f;
      write_gradient(part, own - first * Part<T>::N, Slope::of(statistic, options, scale), view);
    }
  }
  if (a.given == nullptr && a.cluster > 1) cg::this_cluster().barrier_wait();
}

template <class T, bool kHeld>
void launch(const char* op, const Args<T>& args, const Layout& layout, te_stream stream) {
  const auto kernel = forward_kernel<T, kHeld>;
  const int bytes = kHeld ? int(layout.slots * kSlotBytes) : 0;
  if (bytes > 0) check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {unsigned(layout.cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(args.rows * layout.cluster));
  config.blockDim = dim3(unsigned(layout.threads));
  config.dynamicSmemBytes = size_t(bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args), op);
}

// Columns are counted in 32 bits.
void check_cols(const char* op, const char* argument, const te_tensor& t) {
  if (t.cols <= INT32_MAX - kSlotBytes) return;
  throw Error(TE_NOT_IMPLEMENTED, concat(op, ": argument '", argument, "' has ", t.cols, " columns, wanted at most ",
                                         INT32_MAX - kSlotBytes, "; spread them over ranks."));
}

void run(const char* op, const te_cross_entropy_plan& plan, Statistic* out, te_stream stream) {
  const te_tensor& x = plan.logits;
  check_cols(op, "plan.logits", x);
  const Layout layout = Layout::of(x.cols, int64_t(te_dtype_bytes(x.dtype)));
  if (x.rows > INT32_MAX / layout.cluster) {
    throw Error(TE_NOT_IMPLEMENTED, concat(op, ": argument 'plan.logits' has ", x.rows, " rows, wanted at most ",
                                           INT32_MAX / layout.cluster, "; pass it in parts."));
  }
  const bool wide = aligned16(x), given = out == nullptr && plan.statistics.data != nullptr;
  note_width(wide, true, "CUDA, 16-byte accesses, one cluster a row");
  dispatch_float(x.dtype, op, "plan.logits", [&](auto t) {
    using T = decltype(t);
    const Args<T> args{static_cast<T*>(x.data),
                       static_cast<const int64_t*>(plan.target.data),
                       static_cast<float*>(plan.loss.data),
                       static_cast<const float*>(plan.scale.data),
                       given ? static_cast<const Statistic*>(plan.statistics.data) : nullptr,
                       out,
                       x.row_pitch,
                       x.rows,
                       x.cols,
                       layout.slots,
                       plan.ranks * x.cols,
                       plan.ignore_idx,
                       plan.rank * x.cols,
                       layout.cluster,
                       plan.ranks,
                       plan.scale.cols == 1 ? 0 : 1,
                       plan.label_smoothing,
                       plan.gradient != 0,
                       wide};
    layout.held && !given ? launch<T, true>(op, args, layout, stream) : launch<T, false>(op, args, layout, stream);
  });
}

// One block walks all rows.
constexpr int kThreads = 1024;

constexpr int kScaleBlocks = 16;  // for each SM: four at a time, and more for balance

template <class T, class F>
__device__ __forceinline__ T block_sum(int64_t n, F&& f) {
  __shared__ T scratch[kWarp];
  T sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += kThreads) sum += f(i);
  const auto over_warp = [](T x) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  };
  sum = over_warp(sum);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = sum;
  __syncthreads();
  return over_warp(scratch[threadIdx.x % kWarp]);
}

__global__ void __launch_bounds__(kThreads)
    count_kernel(const int64_t* target, int64_t n, int64_t ignore_idx, float* inverse) {
  const int64_t count = block_sum<int64_t>(n, [&](int64_t i) { return int64_t(target[i] != ignore_idx); });
  if (threadIdx.x == 0) *inverse = 1.f / float(count);
}

__global__ void __launch_bounds__(kThreads)
    mean_kernel(const float* loss, int64_t n, const float* inverse, float* mean) {
  const float sum = block_sum<float>(n, [&](int64_t i) { return loss[i]; });
  if (threadIdx.x == 0) *mean = sum * *inverse;
}

// One block for several rows: most rows have a factor of 1, which should not cost as many blocks.
template <class T>
__global__ void __launch_bounds__(kMaxThreads)
    scale_kernel(T* grad, int64_t pitch, int64_t rows, int64_t cols, bool wide, const float* dloss, int step,
                 const float* scale) {
  constexpr int N = kVec<T>;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const float factor = dloss[row * step] * (scale != nullptr ? *scale : 1.f);
    if (factor == 1.f) {
      if (step == 0) return;
      continue;
    }
    const Part<T> part = Part<T>::of(grad + row * pitch, 0, (cols + N - 1) / N, cols, wide);
    for (int i = int(threadIdx.x); i < part.slots; i += int(blockDim.x)) {
      float x[N];
      widen<T, N>(part.load(i), x);
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] = scaled(x[j], factor);
      part.store(i, x);
    }
  }
}

}  // namespace

void count(te_tensor target, int64_t ignore_idx, te_tensor inverse_count, te_stream stream) {
  count_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const int64_t*>(target.data), target.cols, ignore_idx, static_cast<float*>(inverse_count.data));
  check_launch("te_cross_entropy_count");
}

void statistics(const te_cross_entropy_plan& plan, te_tensor out, te_stream stream) {
  run("te_cross_entropy_statistics", plan, static_cast<Statistic*>(out.data), stream);
}

void forward(const te_cross_entropy_plan& plan, te_stream stream) {
  run("te_cross_entropy_forward", plan, nullptr, stream);
}

void mean(te_tensor loss, te_tensor inverse_count, te_tensor mean, te_stream stream) {
  mean_kernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const float*>(loss.data), loss.cols,
                                                                     static_cast<const float*>(inverse_count.data),
                                                                     static_cast<float*>(mean.data));
  check_launch("te_cross_entropy_mean");
}

void backward(te_tensor grad, te_tensor dloss, te_tensor scale, te_stream stream) {
  constexpr const char* kOp = "te_cross_entropy_backward";
  check_cols(kOp, "grad", grad);
  const bool wide = aligned16(grad);
  note_width(wide, true);
  dispatch_float(grad.dtype, kOp, "grad", [&](auto t) {
    using T = decltype(t);
    const int64_t slots = (grad.cols + kVec<T> - 1) / kVec<T>;
    const int threads = int(std::min<int64_t>(kMaxThreads, (slots + kWarp - 1) / kWarp * kWarp));
    const int64_t blocks =
        std::min<int64_t>(grad.rows, int64_t(device_properties(grad.device).sm_count) * kScaleBlocks);
    scale_kernel<T><<<unsigned(blocks), threads, 0, static_cast<cudaStream_t>(stream)>>>(
        static_cast<T*>(grad.data), grad.row_pitch, grad.rows, grad.cols, wide, static_cast<const float*>(dloss.data),
        dloss.cols == 1 ? 0 : 1, static_cast<const float*>(scale.data));
    check_launch(kOp);
  });
}

}  // namespace te::cross_entropy::cuda
