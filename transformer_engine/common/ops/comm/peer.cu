// The verbs of a channel on CUDA: copies on the channel's own stream, words by stream memory operations on host memory
// that the ranks share, a launch that poisons. A stream that is being captured records all of it as nodes.
#include <cuda.h>

#include <algorithm>

#include "core/device.h"
#include "core/vec.cuh"
#include "ops/comm/comm.h"
#include "ops/comm/peer_verbs.h"

namespace te::comm::cuda {

namespace {

// By name, with the types of the driver's own header; _v2 as the header itself says.
struct Driver {
  decltype(&::cuStreamBatchMemOp) batch =
      reinterpret_cast<decltype(&::cuStreamBatchMemOp)>(library_symbol("cuda", "cuStreamBatchMemOp_v2"));
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

constexpr int kThreads = 256;

__global__ void poison_kernel(char* data, size_t bytes, const volatile uint32_t* failed) {
  __shared__ uint32_t found;
  if (threadIdx.x == 0) found = *failed;
  __syncthreads();
  if (found == 0) return;
  const size_t step = size_t(gridDim.x) * kThreads;
  for (size_t i = size_t(blockIdx.x) * kThreads + threadIdx.x; i < bytes; i += step) data[i] = char(0xff);
}

class CudaVerbs final : public Verbs {
 public:
  CudaVerbs(int32_t device, void* words, size_t bytes) : device_(device), words_(static_cast<char*>(words)) {
    const DeviceGuard guard(device);
    const RelaxedCapture relaxed;
    check_cuda(cudaHostRegister(words, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
               "te_comm_peer_create");
    try {
      void* mapped = nullptr;
      check_cuda(cudaHostGetDevicePointer(&mapped, words, 0), "te_comm_peer_create");
      mapped_ = static_cast<char*>(mapped);
      int lowest = 0, highest = 0;
      check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "te_comm_peer_create");
      check_cuda(cudaStreamCreateWithPriority(&lane_, cudaStreamNonBlocking, highest), "te_comm_peer_create");
      check_cuda(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), "te_comm_peer_create");
      check_cuda(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), "te_comm_peer_create");
      driver();
    } catch (...) {
      cudaHostUnregister(words);
      throw;
    }
  }

  ~CudaVerbs() override {
    cudaStreamDestroy(lane_);
    cudaEventDestroy(fork_);
    cudaEventDestroy(join_);
    if (last_ != nullptr) cudaEventDestroy(last_);
    cudaHostUnregister(words_);
  }

  void follow(te_stream stream) override {
    const DeviceGuard guard(device_);
    // Calls of one stream follow each other; one of another stream waits for the last. Replays are their caller's.
    const bool recorded = is_captured(stream);
    captured_ = captured_ || recorded;
    if (last_ != nullptr && last_on_ != stream && !recorded) {
      check_cuda(cudaStreamWaitEvent(cudaStream_t(stream), last_, 0), "te_comm_peer_follow");
    }
    check_cuda(cudaEventRecord(fork_, cudaStream_t(stream)), "te_comm_peer_follow");
    check_cuda(cudaStreamWaitEvent(lane_, fork_, 0), "te_comm_peer_follow");
  }

  void join(te_stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaEventRecord(join_, lane_), "te_comm_peer_join");
    check_cuda(cudaStreamWaitEvent(cudaStream_t(stream), join_, 0), "te_comm_peer_join");
  }

  void copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
            int64_t rows) override {
    const DeviceGuard guard(device_);
    if (target_pitch == row_bytes && source_pitch == row_bytes) {
      check_cuda(cudaMemcpyAsync(target, source, row_bytes * size_t(rows), cudaMemcpyDefault, lane_),
                 "te_comm_peer_push");
    } else {
      check_cuda(cudaMemcpy2DAsync(target, target_pitch, source, source_pitch, row_bytes, size_t(rows),
                                   cudaMemcpyDefault, lane_),
                 "te_comm_peer_push");
    }
  }

  void set(bool lane, te_stream stream, uint32_t* value, uint32_t to) override {
    CUstreamBatchMemOpParams op = write(value, to);
    run(lane, stream, &op, 1);
    if (lane || is_captured(stream)) return;
    const DeviceGuard guard(device_);
    if (last_ == nullptr) {
      check_cuda(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "te_comm_peer_done");
    }
    check_cuda(cudaEventRecord(last_, cudaStream_t(stream)), "te_comm_peer_done");
    last_on_ = stream;
  }

  void wait(bool lane, te_stream stream, const Awaited& what) override {
    CUstreamBatchMemOpParams ops[5] = {
        write(what.wants, what.wanted), {}, write(what.value, 0), write(what.wants, 0), write(what.timed, 0)};
    ops[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    ops[1].waitValue.address = mapped(what.value);
    ops[1].waitValue.value = what.wanted;
    ops[1].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
    run(lane, stream, ops, 5);
  }

  void poison(void* data, size_t bytes, uint32_t* failed, te_stream stream) override {
    const DeviceGuard guard(device_);
    const auto blocks = unsigned(std::min<size_t>((bytes + kThreads - 1) / kThreads, 132));
    poison_kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(
        static_cast<char*>(data), bytes, reinterpret_cast<const volatile uint32_t*>(mapped(failed)));
    check_launch("te_comm_peer_poison");
  }

  bool idle() const override {
    if (captured_) return false;
    if (last_ == nullptr) return true;
    const RelaxedCapture relaxed;
    const cudaError_t found = cudaEventQuery(last_);
    if (found == cudaErrorNotReady) (void)cudaGetLastError();  // it is no error that somebody should find
    return found == cudaSuccess;
  }

 private:
  CUdeviceptr mapped(const uint32_t* value) const {
    return CUdeviceptr(mapped_ + (reinterpret_cast<const char*>(value) - words_));
  }

  CUstreamBatchMemOpParams write(uint32_t* value, uint32_t to) const {
    CUstreamBatchMemOpParams op{};
    op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op.writeValue.address = mapped(value);
    op.writeValue.value = to;
    op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    return op;
  }

  void run(bool lane, te_stream stream, CUstreamBatchMemOpParams* ops, unsigned count) const {
    const DeviceGuard guard(device_);
    const CUresult result = driver().batch(lane ? CUstream(lane_) : CUstream(stream), count, ops, 0);
    if (result != CUDA_SUCCESS) {
      throw Error(TE_RUNTIME_ERROR,
                  concat("te_comm_peer: the driver refuses stream memory operations (CUresult ", int(result),
                         "), by which ranks wait for each other; go by the group alone here (tp_overlap='off')."));
    }
  }

  const int32_t device_;
  char* const words_;
  char* mapped_ = nullptr;
  cudaStream_t lane_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  cudaEvent_t last_ = nullptr;  // behind the last eager call
  te_stream last_on_ = nullptr;
  bool captured_ = false;  // a graph has recorded calls
};

}  // namespace

std::unique_ptr<Verbs> peer_verbs(int32_t device, void* words, size_t bytes) {
  return std::make_unique<CudaVerbs>(device, words, bytes);
}

}  // namespace te::comm::cuda
