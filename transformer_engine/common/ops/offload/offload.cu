// offload, CUDA path: two streams, events, and the kernels that gather small pieces into one range and
// scatter them back. A block moves 16 KiB of one piece, 16 bytes a thread and access where addresses allow.
#include <vector>

#include "core/device.h"
#include "core/vec.cuh"
#include "ops/offload/backend.h"

namespace te::offload::cuda {

namespace {

constexpr int kThreads = 512;  // with two accesses each, which is best for HBM: 256 with four lose 4 %
constexpr int kUnroll = 2;
constexpr int64_t kTile = int64_t(kThreads) * kUnroll * 16;
constexpr int kMost = 96;  // pieces of one launch, limited by the 4 KiB of kernel arguments

struct Move {
  const unsigned char* from[kMost];
  unsigned char* to[kMost];
  int64_t bytes[kMost];
  int32_t first_tile[kMost + 1];
  int32_t count;
};

__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ Move move) {
  int low = 0, high = move.count - 1;  // the last piece whose first tile is at or before this one
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (move.first_tile[middle] <= int32_t(blockIdx.x)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t first = int64_t(int32_t(blockIdx.x) - move.first_tile[low]) * kTile;
  const int64_t bytes = min(kTile, move.bytes[low] - first);
  const unsigned char* from = move.from[low] + first;
  unsigned char* to = move.to[low] + first;
  const bool wide = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int64_t vectors = wide ? bytes / 16 : 0;
  if (vectors * 16 == kTile) {  // the common case: no access needs a check
    Packed<unsigned char, 16> held[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
      held[i] = load_packed<unsigned char, 16>(from + (threadIdx.x + i * kThreads) * 16);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) store_packed<unsigned char, 16>(to + (threadIdx.x + i * kThreads) * 16, held[i]);
    return;
  }
  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    store_packed<unsigned char, 16>(to + v * 16, load_packed<unsigned char, 16>(from + v * 16));
  }
  for (int64_t b = vectors * 16 + threadIdx.x; b < bytes; b += kThreads) to[b] = from[b];
}

struct Span {
  const void* from;
  void* to;
  size_t bytes;
};

void move(const std::vector<Span>& spans, te_stream stream) {
  for (size_t done = 0; done < spans.size();) {
    Move m{};
    int64_t tiles = 0;
    for (; done < spans.size() && m.count < kMost; ++done) {
      const Span& span = spans[done];
      if (span.bytes == 0) continue;
      const int64_t more = (int64_t(span.bytes) + kTile - 1) / kTile;
      if (tiles + more > INT32_MAX) {
        if (tiles == 0) throw Error(TE_NOT_IMPLEMENTED, "te_offload_pack: a piece of more than 32 TiB.");
        break;
      }
      m.from[m.count] = static_cast<const unsigned char*>(span.from);
      m.to[m.count] = static_cast<unsigned char*>(span.to);
      m.bytes[m.count] = int64_t(span.bytes);
      m.first_tile[m.count] = int32_t(tiles);
      tiles += more;
      ++m.count;
    }
    if (m.count != 0) move_kernel<<<dim3(unsigned(tiles)), kThreads, 0, cudaStream_t(stream)>>>(m);
  }
  check_launch("te_offload_pack");
}

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const te_offload_options& options) : device_(options.device) {
    const DeviceGuard guard(device_);
    d2h_ = h2d_ = cudaStream_t(options.stream);
    if (options.stream != nullptr) return;
    check_cuda(cudaStreamCreateWithFlags(&d2h_, cudaStreamNonBlocking), "te_offload_engine_create");
    own_ = true;
    check_cuda(cudaStreamCreateWithFlags(&h2d_, cudaStreamNonBlocking), "te_offload_engine_create");
  }
  ~CudaBackend() override {
    if (!own_) return;
    cudaStreamDestroy(d2h_);
    if (h2d_ != d2h_) cudaStreamDestroy(h2d_);
  }

  te_stream d2h() const override { return d2h_; }
  te_stream h2d() const override { return h2d_; }

  uint64_t capture_of(te_stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    check_cuda(cudaStreamGetCaptureInfo(cudaStream_t(stream), &status, &id), "te_offload: cudaStreamGetCaptureInfo");
    return status == cudaStreamCaptureStatusActive ? uint64_t(id) + 1 : 0;
  }

  void* create_event() override {
    const DeviceGuard guard(device_);
    cudaEvent_t event = nullptr;
    check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "te_offload: cudaEventCreate");
    return event;
  }
  void destroy_event(void* event) override { cudaEventDestroy(cudaEvent_t(event)); }
  void record(void* event, te_stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaEventRecord(cudaEvent_t(event), cudaStream_t(stream)), "te_offload: cudaEventRecord");
  }
  void wait(te_stream stream, void* event) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamWaitEvent(cudaStream_t(stream), cudaEvent_t(event), 0), "te_offload: cudaStreamWaitEvent");
  }
  void wait_on_host(void* event) override {
    const DeviceGuard guard(device_);
    const RelaxedCapture relaxed;
    check_cuda(cudaEventSynchronize(cudaEvent_t(event)), "te_offload: cudaEventSynchronize");
  }

  void copy(void* to, const void* from, size_t bytes, te_stream stream) override {
    if (bytes == 0) return;
    const DeviceGuard guard(device_);
    check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cudaStream_t(stream)), "te_offload: copy");
  }
  void pack(const te_offload_piece* pieces, int64_t count, void* packed, te_stream stream) override {
    const DeviceGuard guard(device_);
    cuda::pack(pieces, count, packed, stream);
  }
  void unpack(const void* packed, const te_offload_piece* pieces, int64_t count, te_stream stream) override {
    const DeviceGuard guard(device_);
    cuda::unpack(packed, pieces, count, stream);
  }

 private:
  int32_t device_;
  cudaStream_t d2h_ = nullptr, h2d_ = nullptr;
  bool own_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_backend(const te_offload_options& options) {
  return std::make_unique<CudaBackend>(options);
}

void pack(const te_offload_piece* pieces, int64_t count, void* packed, te_stream stream) {
  std::vector<Span> spans;
  size_t offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    spans.push_back({pieces[i].data, static_cast<char*>(packed) + offset, pieces[i].bytes});
    offset += round_up(pieces[i].bytes, kAlignment);
  }
  move(spans, stream);
}

void unpack(const void* packed, const te_offload_piece* pieces, int64_t count, te_stream stream) {
  std::vector<Span> spans;
  size_t offset = 0;
  for (int64_t i = 0; i < count; ++i) {
    spans.push_back({static_cast<const char*>(packed) + offset, pieces[i].data, pieces[i].bytes});
    offset += round_up(pieces[i].bytes, kAlignment);
  }
  move(spans, stream);
}

}  // namespace te::offload::cuda
