// Differences between the supported minor versions of PyTorch (cmake/torch.cmake has the range): pointers to autograd
// nodes, the check of a gradient's dtype, the handle of a stream. The other interfaces in use are the same in all of
// them; qa/torch_versions.sh compiles against each.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/version.h>

#define TE_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

#if !TE_TORCH_AT_LEAST(2, 11)
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#endif

namespace te_torch {

// Nodes are intrusive since 2.13. set_grad_accumulator() takes a WeakNodePtr.
#if TE_TORCH_AT_LEAST(2, 13)
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;
using WeakNodePtr = c10::weak_intrusive_ptr<torch::autograd::Node>;
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;
using WeakNodePtr = std::weak_ptr<torch::autograd::Node>;
#endif

// Whether autograd accepts a gradient of this dtype at an edge without a cast. Since 2.10 an edge may expect another
// dtype than its tensor's, or any dtype.
inline bool takes_dtype(const torch::autograd::InputMetadata& edge, at::ScalarType dtype) {
#if TE_TORCH_AT_LEAST(2, 10)
  return dtype == edge.grad_dtype();
#else
  return dtype == edge.dtype().toScalarType();
#endif
}

// The handle of a stream, cudaStream_t on CUDA. Since 2.11 a stream has a method for it; before, libtorch_cuda's C
// interface returns the handle of the current stream, so that this one is made current for a moment.
inline void* handle_of(const c10::Stream& stream) {
#if TE_TORCH_AT_LEAST(2, 11)
  return stream.native_handle();
#else
  using GetStream = int32_t (*)(int32_t device, void** handle);
  static const auto get_stream = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  TORCH_CHECK(get_stream != nullptr, "PyTorch ", TORCH_VERSION, " has no handle for ", stream,
              ": install torch >= 2.11.");
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const c10::Stream before = guard.exchangeStream(stream);
  void* handle = nullptr;
  const int32_t status = get_stream(stream.device_index(), &handle);
  guard.exchangeStream(before);
  TORCH_CHECK(status == 0, "PyTorch ", TORCH_VERSION, " has no handle for ", stream, ": status ", status, ".");
  return handle;
#endif
}

}  // namespace te_torch
