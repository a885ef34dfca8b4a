// The operations of a channel on CUDA: copies on streams of the channel, words by stream memory operations on host
// memory that the ranks share, and a launch that poisons. A stream that is being captured records all of them as nodes.
#include <cooperative_groups.h>
#include <cuda.h>

#include <array>
#include <vector>

#include "core/device.h"
#include "core/vec.cuh"
#include "ops/comm/comm.h"
#include "ops/comm/peer_verbs.h"
#include "transformer_engine/comm_peer.h"

namespace te::comm::cuda {

namespace {

// Entry points with the types of the driver's header, where _v2 is a macro.
struct Driver {
  decltype(&::cuStreamBatchMemOp) batch =
      reinterpret_cast<decltype(&::cuStreamBatchMemOp)>(library_symbol("cuda", "cuStreamBatchMemOp_v2"));
};

const Driver& driver() {
  static const Driver functions;
  return functions;
}

constexpr int kThreads = 512, kBlocks = 8;  // one cluster

// A read of host memory takes about a microsecond, and reads by all blocks of a launch are serialised: one block reads,
// and the others of its cluster read its answer.
__device__ bool has_failed(const volatile uint32_t* failed) {
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  __shared__ uint32_t found;
  if (cluster.block_rank() == 0 && threadIdx.x == 0) found = *failed;
  cluster.sync();
  const bool answer = *cluster.map_shared_rank(&found, 0) != 0;
  cluster.sync();  // the first block must not exit while others read its answer
  return answer;
}

__device__ void fill(char* data, size_t bytes) {
  const size_t first = size_t(blockIdx.x) * kThreads + threadIdx.x, step = size_t(kBlocks) * kThreads;
  const size_t head = min(bytes, size_t(-reinterpret_cast<uintptr_t>(data) & 15)), vectors = (bytes - head) / 16;
  uint4* const middle = reinterpret_cast<uint4*>(data + head);
  for (size_t i = first; i < vectors; i += step) middle[i] = make_uint4(~0U, ~0U, ~0U, ~0U);
  for (size_t i = first; i < head; i += step) data[i] = char(0xff);
  for (size_t i = head + 16 * vectors + first; i < bytes; i += step) data[i] = char(0xff);
}

__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads)
    poison_kernel(char* data, size_t bytes, const volatile uint32_t* failed) {
  if (has_failed(failed)) fill(data, bytes);
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
      check_cuda(cudaStreamCreateWithPriority(&copy_stream_, cudaStreamNonBlocking, highest), "te_comm_peer_create");
      check_cuda(cudaStreamCreateWithPriority(&own_stream_, cudaStreamNonBlocking, highest), "te_comm_peer_create");
      for (cudaEvent_t& each : own_) {
        check_cuda(cudaEventCreateWithFlags(&each, cudaEventDisableTiming), "te_comm_peer_create");
      }
      check_cuda(cudaEventCreateWithFlags(&fork_, cudaEventDisableTiming), "te_comm_peer_create");
      check_cuda(cudaEventCreateWithFlags(&join_, cudaEventDisableTiming), "te_comm_peer_create");
      driver();
    } catch (...) {
      cudaHostUnregister(words);
      throw;
    }
  }

  ~CudaVerbs() override {
    cudaStreamDestroy(copy_stream_);
    cudaStreamDestroy(own_stream_);
    for (const cudaEvent_t each : own_) cudaEventDestroy(each);
    cudaEventDestroy(fork_);
    cudaEventDestroy(join_);
    if (last_ != nullptr) cudaEventDestroy(last_);
    cudaHostUnregister(words_);
  }

  void follow(te_stream stream) override {
    const DeviceGuard guard(device_);
    // Calls on one stream are ordered; a call on another stream waits for the last one. The caller orders replays.
    const bool recorded = is_captured(stream);
    captured_ = captured_ || recorded;
    if (last_ != nullptr && last_on_ != stream && !recorded) {
      check_cuda(cudaStreamWaitEvent(cudaStream_t(stream), last_, 0), "te_comm_peer_follow");
    }
    check_cuda(cudaEventRecord(fork_, cudaStream_t(stream)), "te_comm_peer_follow");
    check_cuda(cudaStreamWaitEvent(copy_stream_, fork_, 0), "te_comm_peer_follow");
  }

  void join(int32_t slot, te_stream stream) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaEventRecord(join_, copy_stream_), "te_comm_peer_join");
    check_cuda(cudaStreamWaitEvent(cudaStream_t(stream), join_, 0), "te_comm_peer_join");
    wait_own(slot, stream);
  }

  void copy(void* target, size_t target_pitch, const void* source, size_t source_pitch, size_t row_bytes,
            int64_t rows) override {
    copy_on(copy_stream_, target, target_pitch, source, source_pitch, row_bytes, rows);
  }

  void copy_own(int32_t slot, void* target, size_t target_pitch, const void* source, size_t source_pitch,
                size_t row_bytes, int64_t rows) override {
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamWaitEvent(own_stream_, fork_, 0), "te_comm_peer_push");
    copy_on(own_stream_, target, target_pitch, source, source_pitch, row_bytes, rows);
    check_cuda(cudaEventRecord(own_[size_t(slot)], own_stream_), "te_comm_peer_push");
    copies_own_[size_t(slot)] = true;
  }

  void wait_own(int32_t slot, te_stream stream) override {
    if (!copies_own_[size_t(slot)]) return;
    const DeviceGuard guard(device_);
    check_cuda(cudaStreamWaitEvent(cudaStream_t(stream), own_[size_t(slot)], 0), "te_comm_peer_wait");
    copies_own_[size_t(slot)] = false;
  }

  void set(bool on_copy_stream, te_stream stream, Part<uint32_t*> values, uint32_t to) override {
    std::vector<CUstreamBatchMemOpParams> ops;
    ops.reserve(values.size());
    for (uint32_t* value : values) ops.push_back(write(value, to));
    run(on_copy_stream ? copy_stream_ : cudaStream_t(stream), ops);
    if (on_copy_stream || is_captured(stream)) return;
    const DeviceGuard guard(device_);
    if (last_ == nullptr) {
      check_cuda(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "te_comm_peer_done");
    }
    check_cuda(cudaEventRecord(last_, cudaStream_t(stream)), "te_comm_peer_done");
    last_on_ = stream;
  }

  // All words are announced before the first wait.
  void wait(bool on_copy_stream, te_stream stream, Part<Awaited> all, uint32_t wanted) override {
    std::vector<CUstreamBatchMemOpParams> ops;
    ops.reserve(4 * all.size());
    for (const Awaited& each : all) ops.push_back(write(each.expected, wanted));
    for (const Awaited& each : all) {
      CUstreamBatchMemOpParams op{};
      op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
      op.waitValue.address = CUdeviceptr(mapped(each.value));
      op.waitValue.value = wanted;
      op.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
      ops.push_back(op);
      ops.push_back(write(each.expected, 0));
      ops.push_back(write(each.value, 0));
    }
    run(on_copy_stream ? copy_stream_ : cudaStream_t(stream), ops);
  }

  void poison(void* data, size_t bytes, const uint32_t* failed, te_stream stream) override {
    const DeviceGuard guard(device_);
    poison_kernel<<<kBlocks, kThreads, 0, cudaStream_t(stream)>>>(static_cast<char*>(data), bytes, mapped(failed));
    check_launch("te_comm_peer_poison");
  }

  bool idle() const override {
    if (captured_) return false;
    if (last_ == nullptr) return true;
    const RelaxedCapture relaxed;
    const cudaError_t found = cudaEventQuery(last_);
    if (found == cudaErrorNotReady) (void)cudaGetLastError();  // not an error; clear it
    return found == cudaSuccess;
  }

 private:
  template <class T>
  T* mapped(T* shared) const {
    return reinterpret_cast<T*>(mapped_ + (reinterpret_cast<const char*>(shared) - words_));
  }

  CUstreamBatchMemOpParams write(uint32_t* value, uint32_t to) const {
    CUstreamBatchMemOpParams op{};
    op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    op.writeValue.address = CUdeviceptr(mapped(value));
    op.writeValue.value = to;
    op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    return op;
  }

  void copy_on(cudaStream_t stream, void* target, size_t target_pitch, const void* source, size_t source_pitch,
               size_t row_bytes, int64_t rows) const {
    const DeviceGuard guard(device_);
    if (target_pitch == row_bytes && source_pitch == row_bytes) {
      check_cuda(cudaMemcpyAsync(target, source, row_bytes * size_t(rows), cudaMemcpyDefault, stream),
                 "te_comm_peer_push");
    } else {
      check_cuda(cudaMemcpy2DAsync(target, target_pitch, source, source_pitch, row_bytes, size_t(rows),
                                   cudaMemcpyDefault, stream),
                 "te_comm_peer_push");
    }
  }

  void run(cudaStream_t stream, std::vector<CUstreamBatchMemOpParams>& ops) const {
    const DeviceGuard guard(device_);
    const CUresult result = driver().batch(stream, unsigned(ops.size()), ops.data(), 0);
    if (result != CUDA_SUCCESS) {
      throw Error(
          TE_RUNTIME_ERROR,
          concat("te_comm_peer: the driver refuses stream memory operations (CUresult ", int(result),
                 "), by which ranks wait for each other; use the group's collectives instead (tp_overlap='off')."));
    }
  }

  const int32_t device_;
  char* const words_;
  char* mapped_ = nullptr;
  cudaStream_t copy_stream_ = nullptr, own_stream_ = nullptr;
  cudaEvent_t fork_ = nullptr, join_ = nullptr;
  std::array<cudaEvent_t, TE_COMM_PEER_SLOTS> own_{};  // after the copy of own rows into a slot
  std::array<bool, TE_COMM_PEER_SLOTS> copies_own_{};  // and not waited for so far
  cudaEvent_t last_ = nullptr;                         // after the last eager call
  te_stream last_on_ = nullptr;
  bool captured_ = false;  // a graph has recorded calls
};

}  // namespace

std::unique_ptr<Verbs> peer_verbs(int32_t device, void* words, size_t bytes) {
  return std::make_unique<CudaVerbs>(device, words, bytes);
}

}  // namespace te::comm::cuda
