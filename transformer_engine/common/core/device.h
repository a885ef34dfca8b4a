// The device side of an entry point: selection of the path, the guard that makes a tensor's GPU current, launch checks,
// and libraries opened on first use. Does not allocate and does not wait.
#pragma once

#include "core/error.h"

#if defined(TE_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace te {

// Handle of a shared library: the copy already in the process first, then the loader's search, then the toolkit's
// folder. Throws TE_RUNTIME_ERROR naming everything tried. `name`: "cublasLt", "nccl", "cuda".
void* open_library(const char* name);
void* library_symbol(const char* library, const char* symbol);

const te_device_properties& device_properties(int32_t device);

[[noreturn]] void no_cuda(const char* op);

#if defined(TE_WITH_CUDA)

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw Error(TE_RUNTIME_ERROR, concat(what, ": CUDA error: ", cudaGetErrorString(status)));
}

// After every kernel launch, so that a launch error is reported by its op.
inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op); }

class DeviceGuard {
 public:
  explicit DeviceGuard(int32_t device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Lets the calling thread make calls that a capture forbids by default.
class RelaxedCapture {
 public:
  RelaxedCapture() { check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode"); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// The dispatch of every op: cpu_call for host tensors, cuda_call (with the tensor's GPU current) for device tensors.
#define TE_ON_DEVICE_OF(op, tensor, cpu_call, cuda_call) \
  do {                                                   \
    if ((tensor).device == TE_DEVICE_CPU) {              \
      te_note_path("CPU loop", "");                      \
      cpu_call;                                          \
    } else {                                             \
      te_note_path("CUDA kernel", "");                   \
      ::te::DeviceGuard guard((tensor).device);          \
      cuda_call;                                         \
    }                                                    \
  } while (0)

#else

// cuda_call is type-checked but not compiled in.
#define TE_ON_DEVICE_OF(op, tensor, cpu_call, cuda_call)     \
  do {                                                       \
    static_cast<void>(sizeof((cuda_call, 0)));               \
    if ((tensor).device != TE_DEVICE_CPU) ::te::no_cuda(op); \
    te_note_path("CPU loop", "");                            \
    cpu_call;                                                \
  } while (0)

#endif

}  // namespace te
