// What every room's binding needs to reach the C core from ATen tensors: views as PODs, the current stream, statuses as
// Python exceptions, and the choice between the direct dispatch mode and the dispatcher. No arithmetic happens here.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <transformer_engine/transformer_engine.h>

#include <optional>
#include <string_view>

#include "core/probe.h"

namespace te_torch {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// TE_INVALID_ARGUMENT -> ValueError, TE_NOT_IMPLEMENTED -> NotImplementedError, the others -> RuntimeError.
void check(te_status status);

te_dtype dtype_of(const Tensor& t, const char* op, const char* argument);

// Names the op and the argument where t's memory has been freed under it (storage.resize_(0), as sharding frameworks
// do): what reads t would read no memory at all.
inline void check_memory(const Tensor& t, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(!t.has_storage() || t.storage().nbytes() != 0 || t.numel() == 0, op, ": argument '", argument,
                    "' has shape ", t.sizes(), ", but its memory has been freed; allocate it again (gather it) first.");
}

// Names the op and the argument where t's memory holds the negatives of its values (conj().imag does): PyTorch turns
// them round as it reads them, the engine does not.
inline void check_in_memory(const Tensor& t, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(!t.is_neg(), op, ": argument '", argument,
                    "' is negated when it is read, not in memory; pass resolve_neg() of it.");
}

// Leading dimensions folded into rows. The tensor must be row-foldable, see rows_of().
te_tensor view_2d(const Tensor& t, const char* op, const char* argument);
te_tensor view_2d(const OptionalTensor& t, const char* op, const char* argument);  // absent when there is none
inline te_tensor absent() { return te_tensor{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU}; }

// t itself when its rows can be folded without a copy and its last dimension is dense, else a contiguous copy: stride-0
// and transposed gradients end here, and those that are negated when they are read.
Tensor rows_of(const Tensor& t);

// PyTorch's current stream on t's device, taken device-generically so that no CUDA library is linked.
te_stream current_stream(const at::Device& device);  // null on a CPU
te_stream current_stream(const Tensor& t);

// "cuda" is the current device, as everywhere in torch.
inline at::Device indexed(const at::Device& device) {
  return device.is_cpu() || device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

// Names the op and the argument when `t` is not on `like`'s device or not of its dtype.
void check_same(const Tensor& t, const Tensor& like, const char* op, const char* argument);

// Names the op and the argument when `t` is no float32, float16 or bfloat16 tensor.
void check_float(const Tensor& t, const char* op, const char* argument);

// The last dimension; the error for a tensor without one, or of another size, is a ValueError.
void check_last_dim(const Tensor& t, const c10::SymInt& wanted, const char* op, const char* argument);

// A call must go through the dispatcher when something there wants to see it: a TorchDispatchMode (FakeTensorMode
// among them), functorch, or an argument that is a tensor subclass.
bool must_dispatch(at::ArrayRef<const Tensor*> tensors);

inline const Tensor* pointer_to(const OptionalTensor& t) { return t.has_value() ? &*t : nullptr; }

// To be called by who has written into a tensor of somebody else's: a backward that saved it must notice, as it does
// after t.copy_(). Views of one tensor share the note.
inline void note_written(const Tensor& t) {
  if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// True when autograd would record an op on these tensors.
bool needs_graph(at::ArrayRef<const Tensor*> tensors);

// t cast to the autocast dtype by a differentiable cast when autocast is on for its device; integers and doubles stay.
Tensor autocast(const Tensor& t);
OptionalTensor autocast(const OptionalTensor& t);

// The two routes of a node's inner ops. Direct calls the kernel wrapper; Dispatched calls the registered op of the same
// signature, which is what torch.compile traces.
struct Direct {
  template <auto kFunction, class... Args>
  static auto call(const char* name, Args&&... args) {
    if (!probe::active()) return kFunction(args...);
    RECORD_FUNCTION(name, c10::ArrayRef<const c10::IValue>{});  // a profiler beside the recording names the op too
    probe::begin_call();
    if constexpr (std::is_void_v<decltype(kFunction(args...))>) {
      kFunction(args...);
      probe::end_call(name);
    } else {
      auto result = kFunction(args...);
      probe::end_call(name);
      return result;
    }
  }
};

struct Dispatched {
  template <auto kFunction, class... Args>
  static auto call(const char* name, Args&&... args) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<std::remove_pointer_t<decltype(kFunction)>>();
    return op.call(args...);
  }
};

// A dispatch mode as a value, for code that is compiled once for both.
class DispatchMode {
 public:
  constexpr explicit DispatchMode(Direct) : direct_(true) {}
  constexpr explicit DispatchMode(Dispatched) : direct_(false) {}

  constexpr bool direct() const { return direct_; }

  template <auto kFunction, class... Args>
  auto call(const char* name, Args&&... args) const {
    return direct_ ? Direct::call<kFunction>(name, args...) : Dispatched::call<kFunction>(name, args...);
  }

 private:
  bool direct_;
};

}  // namespace te_torch
