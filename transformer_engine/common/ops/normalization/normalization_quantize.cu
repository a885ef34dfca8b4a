// normalization, CUDA: y in FP8, as a producer of the tile kernel of ops/quantize. normalization_forward.cuh computes
// rows and their statistics.
//
// With two launches h is written to memory and read back: 10 bytes an element with a residual. With one, blocks take
// items of work off a queue in which the rows of a band of 128 precede its tiles by some bands, so that tiles find h in
// the L2 cache: 8 bytes. An item waits for earlier items alone, which other blocks are processing, so that the queue
// makes progress with any number of resident blocks.
#include "ops/normalization/normalization_forward.cuh"

namespace te::normalization::cuda {

namespace {

using quantize::kColumns;
using quantize::Vector;

template <class T, class G>
struct Normalized {
  using Type = T;
  static constexpr int kInputs = 1, kOutputs = 1, kAmaxOutputs = 1, kBatch = 4;
  static constexpr int kBlocksPerSm = sizeof(T) == 4 ? 2 : 3;
  static constexpr bool kStaged = false;
  struct Row {
    float mean, rstd;
  };

  Rows<const T> h;
  const float* mean;  // NULL: 0
  const float* rstd;
  const G* gamma;
  const G* beta;  // NULL: none
  int64_t hidden;
  float shift;  // added to gamma
  bool wide;

  Normalized(const Plan& plan, const KnownTensors& t, bool wide)
      : h(t.h),
        mean(static_cast<const float*>(t.mean.data)),
        rstd(static_cast<const float*>(t.rstd.data)),
        gamma(static_cast<const G*>(t.gamma.data)),
        beta(static_cast<const G*>(t.beta.data)),
        hidden(t.h.cols),
        shift(plan.zero_centered_gamma ? 1.f : 0.f),
        wide(wide) {}

  __device__ __forceinline__ const T* input(int, int64_t row, int64_t col) const { return h.at(row) + col; }

  __device__ __forceinline__ int64_t pitch(int) const { return h.pitch; }

  __device__ __forceinline__ Row of(int64_t row) const { return {mean != nullptr ? mean[row] : 0.f, rstd[row]}; }

  __device__ __forceinline__ void load_parameter(const G* p, int64_t col, float (&out)[kColumns]) const {
    if (wide) return load_floats<G, kColumns>(p + col, out);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) out[j] = col + j < hidden ? to_float(p[col + j]) : 0.f;
  }

  __device__ __forceinline__ void compute(const Vector<T> (&in)[1], const Row& of_row, int64_t col,
                                          Vector<T> (&out)[1]) const {
    float v[kColumns], g[kColumns];
    widen<T, kColumns>(in[0], v);
    load_parameter(gamma, col, g);
    if (beta != nullptr) {
      float b[kColumns];
      load_parameter(beta, col, b);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] = normalized(v[j], of_row.mean, of_row.rstd, g[j] + shift, b[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[j] = normalized(v[j], of_row.mean, of_row.rstd, g[j] + shift);
    }
    out[0] = narrow<T, kColumns>(v);
  }
};

bool is_wide(const KnownTensors& t) {
  const bool aligned = aligned16(t.h) && aligned16(t.gamma) && aligned16(t.beta), divides = t.h.cols % kColumns == 0;
  note_width(aligned, divides, "CUDA, quantized in the kernel");
  return aligned && divides;
}

// ---- one launch ----

constexpr int kRowsOfPiece = 4;
constexpr int kPiecesOfBand = int(kBand) / kRowsOfPiece;
constexpr int kBlocksPerSm = 3;
constexpr int kVectors = 4;  // of a thread

// Bands between rows and their tiles: more than the items that 3 blocks on each of 132 SMs process at a time (32 + 4 to
// 64 a band), and small compared to the L2 cache (a band of 8192 bf16 columns is 2 MiB).
constexpr unsigned kLag = 8;

struct Queue {
  unsigned* next;  // the next free item
  unsigned* done;  // completed row items of each band
  unsigned bands, lag, pieces_of_step, pieces;
  int lanes;  // threads of a row
};

__device__ __forceinline__ unsigned load_acquire(const unsigned* p) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(p)) : "memory");
  return x;
}

template <class T, class G, bool kRms, bool kResidual>
__device__ __forceinline__ void make_rows(const ForwardArgs<T, G>& a, const Queue& queue, unsigned band, unsigned piece,
                                          float (&scratch)[2][2][kWarp]) {
#pragma unroll 1
  for (int i = 0; i < kRowsOfPiece; ++i) {
    const int64_t row = int64_t(band) * kBand + piece * kRowsOfPiece + i;
    const int vectors = row < a.rows && int(threadIdx.x) < queue.lanes ? a.hidden / kVec<T> : 0;
    NoStore y;
    forward_row<T, G, kVectors, kRms, kResidual>(a, y, row, queue.lanes, vectors, scratch[i % 2]);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();  // orders the block's rows before the count
    atomicAdd(queue.done + band, 1u);
  }
}

template <class T, class G, bool kRms, bool kResidual>
__global__ void __launch_bounds__(quantize::kThreads, kBlocksPerSm)
    once_kernel(const __grid_constant__ ForwardArgs<T, G> a, const __grid_constant__ Normalized<T, G> producer,
                const __grid_constant__ quantize::Dests<1> dests, const __grid_constant__ quantize::Domain domain,
                const __grid_constant__ Queue queue) {
  __shared__ quantize::Shared shared;
  __shared__ float scratch[2][2][kWarp];
  __shared__ unsigned ticket;
  while (true) {
    __syncthreads();  // for the readers of the last item's shared memory
    if (threadIdx.x == 0) ticket = atomicAdd(queue.next, 1u);
    __syncthreads();
    if (ticket >= queue.pieces) return;
    const unsigned step = ticket / queue.pieces_of_step, piece = ticket % queue.pieces_of_step;
    if (piece < kPiecesOfBand) {
      if (step < queue.bands) make_rows<T, G, kRms, kResidual>(a, queue, step, piece, scratch);
      continue;
    }
    if (step < queue.lag) continue;
    const unsigned band = step - queue.lag;
    if (threadIdx.x == 0) {
      while (load_acquire(queue.done + band) < kPiecesOfBand) __nanosleep(64);
    }
    __syncthreads();
    quantize::quantize_tile(producer, dests, domain, quantize::Place(band, piece - kPiecesOfBand), shared);
  }
}

template <class T, class G>
void launch_once(const Plan& plan, const ForwardTensors& t, const te_quantize_plan& quantization,
                 const te_quantized& out, const te_tensor& workspace, int lanes, cudaStream_t stream) {
  const char* op = "te_normalization_forward_quantize";
  const quantize::Dests<1> dests{{quantize::Dest(quantization, out, t.x.rows, t.x.cols)}};
  const quantize::Domain domain = quantize::domain_of(t.x.rows, t.x.cols, true, dests);
  auto* counters = static_cast<unsigned*>(workspace.data);
  const auto bands = unsigned(domain.tile_rows), pieces_of_step = unsigned(kPiecesOfBand + domain.tile_cols);
  const unsigned lag = bands < kLag ? bands : kLag;
  const Queue queue{counters, counters + 1, bands, lag, pieces_of_step, (bands + lag) * pieces_of_step, lanes};
  check_cuda(cudaMemsetAsync(counters, 0, (bands + 1) * sizeof(unsigned), stream), op);
  const int blocks = device_properties(t.x.device).sm_count * kBlocksPerSm;
  by_form(plan, t, [&](auto rms, auto residual) {
    once_kernel<T, G, rms(), residual()><<<unsigned(blocks), quantize::kThreads, 0, stream>>>(
        ForwardArgs<T, G>(plan, t), Normalized<T, G>(plan, KnownTensors(t), true), dests, domain, queue);
  });
  check_launch(op);
}

// The threads of a row, or 0 if one launch is not possible: there rows have the layout of forward().
int lanes_in_one_launch(const ForwardTensors& t, const te_quantize_plan& quantization, const te_quantized& out,
                        const te_tensor& workspace) {
  const int64_t vectors = t.x.cols / kColumns;
  bool aligned = t.x.cols % kColumns == 0;
  for (const te_tensor* tensor : {&t.x, &t.residual, &t.gamma, &t.beta, &t.residual_out}) {
    aligned = aligned && aligned16(*tensor);
  }
  if (t.x.dtype == TE_FLOAT32 || quantization.amax_parts.data != nullptr || !aligned || t.x.rows == 0) return 0;
  const Layout layout = layout_for(vectors, kVectors, quantize::kThreads);
  const bool held = layout.lanes > kWarp && vectors <= int64_t(layout.lanes) * kVectors;
  const quantize::Dests<1> dests{{quantize::Dest(quantization, out, t.x.rows, t.x.cols)}};
  const quantize::Domain domain = quantize::domain_of(t.x.rows, t.x.cols, true, dests);
  const bool counted = (domain.tile_rows + kLag) * (kPiecesOfBand + domain.tile_cols) < INT32_MAX &&
                       (domain.tile_rows + 1) * int64_t(sizeof(unsigned)) <= workspace.cols;
  return held && counted ? layout.lanes : 0;
}

}  // namespace

void quantize(const Plan& plan, const KnownTensors& t, const te_quantize_plan& quantization, const te_quantized& out,
              te_stream stream) {
  const char* op = "te_normalization_quantize";
  dispatch_types(t.h, t.gamma, op, [&](auto h_type, auto gamma_type) {
    const bool wide = is_wide(t);
    const Normalized<decltype(h_type), decltype(gamma_type)> producer(plan, t, wide);
    const quantize::Dests<1> dests{{quantize::Dest(quantization, out, t.h.rows, t.h.cols)}};
    quantize::launch_quantize(op, producer, dests, t.h.rows, t.h.cols, wide, stream);
  });
}

void forward_quantize(const Plan& plan, const ForwardTensors& t, const te_quantize_plan& quantization,
                      const te_quantized& out, const te_tensor& workspace, te_stream stream) {
  const int lanes = lanes_in_one_launch(t, quantization, out, workspace);
  if (lanes == 0) {
    forward(plan, t, quantization.amax_parts, stream);
    return quantize(plan, KnownTensors(t), quantization, out, stream);
  }
  te_note_path("CUDA, statistics and FP8 in one launch", "");
  const auto launch = [&](auto type) {
    using T = decltype(type);
    if (t.gamma.dtype == t.x.dtype) {
      launch_once<T, T>(plan, t, quantization, out, workspace, lanes, cudaStream_t(stream));
    } else {
      launch_once<T, float>(plan, t, quantization, out, workspace, lanes, cudaStream_t(stream));
    }
  };
  if (t.x.dtype == TE_BFLOAT16) {
    launch(bf16{});
  } else {
    launch(fp16{});
  }
}

}  // namespace te::normalization::cuda
