// The bridge between ATen tensors and the engine's C API: tensor views, the current stream, exceptions for statuses,
// and the choice between direct calls and the dispatcher.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
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

te_dtype dtype_of(at::ScalarType dtype, const char* op, const char* argument);
inline te_dtype dtype_of(const Tensor& t, const char* op, const char* argument) {
  return dtype_of(t.scalar_type(), op, argument);
}

// Raises ValueError where t's memory has been freed (storage.resize_(0), as sharding frameworks do).
inline void check_memory(const Tensor& t, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(!t.has_storage() || t.storage().nbytes() != 0 || t.numel() == 0, op, ": argument '", argument,
                    "' has shape ", t.sizes(), ", but its memory has been freed; allocate it again (gather it) first.");
}

// Raises ValueError for a negated view (conj().imag is one): PyTorch negates its values on reading, the engine does
// not.
inline void check_in_memory(const Tensor& t, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(!t.is_neg(), op, ": argument '", argument,
                    "' is a negated view, which the engine cannot read; pass resolve_neg() of it.");
}

// Leading dimensions folded into rows. The tensor must be row-foldable, see rows_of().
te_tensor view_2d(const Tensor& t, const char* op, const char* argument);
te_tensor view_2d(const OptionalTensor& t, const char* op, const char* argument);  // absent() for nullopt
inline te_tensor absent() { return te_tensor{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU}; }

// t itself when its rows can be folded without a copy and its last dimension is dense, else a contiguous copy: of
// transposed tensors, of those with a stride of 0, and of negated views.
Tensor rows_of(const Tensor& t);

// PyTorch's current stream on t's device, by a device-generic interface, so that no CUDA library is linked.
te_stream current_stream(const at::Device& device);  // null on a CPU
te_stream current_stream(const Tensor& t);

// "cuda" without an index is the current device, as in torch.
inline at::Device indexed(const at::Device& device) {
  return device.is_cpu() || device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

// Raises ValueError where `t` has another device or dtype than `like`.
void check_same(const Tensor& t, const Tensor& like, const char* op, const char* argument);

// Raises ValueError unless `t` is float32, float16 or bfloat16.
void check_float(const Tensor& t, const char* op, const char* argument);

// Raises ValueError for another last dimension, or none.
void check_last_dim(const Tensor& t, const c10::SymInt& wanted, const char* op, const char* argument);

// Whether a call has to go through the dispatcher: under a TorchDispatchMode (such as FakeTensorMode), under functorch,
// under torch.jit.trace, or with a tensor subclass as an argument.
bool must_dispatch(at::ArrayRef<const Tensor*> tensors);

inline const Tensor* pointer_to(const OptionalTensor& t) { return t.has_value() ? &*t : nullptr; }

// Called after the engine has written to a caller's tensor, so that a backward that saved it raises, as after
// t.copy_(). All views of a tensor share the version.
inline void note_written(const Tensor& t) {
  if (t.defined() && !t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
}

// True when autograd would record an op on these tensors.
bool needs_graph(at::ArrayRef<const Tensor*> tensors);

// t cast to the autocast dtype by a differentiable cast when autocast is on for its device; integers and doubles stay.
Tensor autocast(const Tensor& t);
OptionalTensor autocast(const OptionalTensor& t);

// The two dispatch modes of a node's inner ops. Direct calls the kernel wrapper; Dispatched calls the registered op of
// the same signature, which torch.compile traces.
struct Direct {
  template <auto kFunction, class... Args>
  static auto call(const char* name, Args&&... args) {
    const probe::CallRecord record(name);
    return kFunction(args...);
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
    if (!direct_) return Dispatched::call<kFunction>(name, args...);
    const probe::CallRecord record(name);
    return kFunction(args...);
  }

 private:
  bool direct_;
};

}  // namespace te_torch
