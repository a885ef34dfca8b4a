// See common.h.
#include "core/common.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <string>
#include <string_view>

#include "core/torch_api.h"

namespace te_torch {

namespace {

// Whether dims [0, dim - 1) fold into one: each stride is the extent of the next dim (size-1 dims do not matter).
bool folds(const Tensor& t) {
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const int64_t dim = t.dim();
  if (dim == 0) return false;
  if (sizes[dim - 1] > 1 && strides[dim - 1] != 1) return false;
  if (t.numel() == 0) return t.is_contiguous();
  int64_t inner = -1;  // the nearest inner leading dim with more than one row
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (inner < 0 ? strides[d] < sizes[dim - 1] : strides[d] != strides[inner] * sizes[inner]) return false;
    inner = d;
  }
  return true;
}

}  // namespace

namespace {

// The engine names a member of a plan in its errors; for callers of the ops it is an argument of the same name.
std::string last_error() {
  constexpr std::string_view kPlan = "argument 'plan.", kArgument = "argument '";
  std::string message = te_last_error();
  if (const size_t found = message.find(kPlan); found != std::string::npos)
    message.replace(found, kPlan.size(), kArgument);
  return message;
}

}  // namespace

void check(te_status status) {
  switch (status) {
    case TE_SUCCESS:
      return;
    case TE_INVALID_ARGUMENT:
      TORCH_CHECK_VALUE(false, last_error());
    case TE_NOT_IMPLEMENTED:
      TORCH_CHECK_NOT_IMPLEMENTED(false, last_error());
    case TE_RUNTIME_ERROR:
    case TE_PINNED_MEMORY:
      break;
  }
  TORCH_CHECK(false, last_error());
}

te_dtype dtype_of(at::ScalarType dtype, const char* op, const char* argument) {
  switch (dtype) {
    case at::kFloat:
      return TE_FLOAT32;
    case at::kHalf:
      return TE_FLOAT16;
    case at::kBFloat16:
      return TE_BFLOAT16;
    case at::kFloat8_e4m3fn:
      return TE_FLOAT8_E4M3;
    case at::kFloat8_e5m2:
      return TE_FLOAT8_E5M2;
    case at::kInt:
      return TE_INT32;
    case at::kLong:
      return TE_INT64;
    case at::kByte:
      return TE_UINT8;
    default:
      TORCH_CHECK_VALUE(false, op, ": argument '", argument, "' has dtype ", dtype,
                        ", wanted float32, float16 or bfloat16; cast it with .to(dtype).");
  }
}

te_tensor view_2d(const Tensor& t, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(t.is_cpu() || t.is_cuda(), op, ": argument '", argument, "' is on ", t.device(),
                    ", wanted the CPU or a CUDA device.");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, op, ": argument '", argument, "' has layout ", t.layout(),
                    ", wanted a dense tensor; call .to_dense().");
  check_in_memory(t, op, argument);
  te_tensor view{};
  view.dtype = dtype_of(t, op, argument);
  view.device = t.is_cpu() ? TE_DEVICE_CPU : t.device().index();
  view.cols = t.dim() == 0 ? 1 : t.size(-1);
  view.rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) view.rows *= t.size(d);
  view.row_pitch = view.cols;
  for (int64_t d = t.dim() - 2; d >= 0 && t.numel() > 0; --d) {
    if (t.size(d) > 1) {
      view.row_pitch = t.stride(d);
      break;
    }
  }
  check_memory(t, op, argument);
  view.data = t.numel() == 0 ? nullptr : t.data_ptr();
  return view;
}

te_tensor view_2d(const OptionalTensor& t, const char* op, const char* argument) {
  return t.has_value() && t->defined() ? view_2d(*t, op, argument) : absent();
}

Tensor rows_of(const Tensor& t) {
  if (t.is_neg()) return t.resolve_neg().contiguous();
  return folds(t) ? t : t.contiguous();
}

te_stream current_stream(const at::Device& device) {
  if (device.is_cpu()) return nullptr;
  return reinterpret_cast<te_stream>(handle_of(c10::impl::VirtualGuardImpl(device.type()).getStream(device)));
}

te_stream current_stream(const Tensor& t) { return current_stream(t.device()); }

void check_same(const Tensor& t, const Tensor& like, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(t.device() == like.device(), op, ": argument '", argument, "' is on ", t.device(), ", wanted ",
                    like.device(), " like the input; move it with .to(device).");
  TORCH_CHECK_VALUE(t.scalar_type() == like.scalar_type(), op, ": argument '", argument, "' has dtype ",
                    t.scalar_type(), ", wanted ", like.scalar_type(),
                    " like the input; cast one of them, or run under torch.autocast.");
}

void check_float(const Tensor& t, const char* op, const char* argument) {
  const auto dtype = t.scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16, op, ": argument '", argument,
                    "' has dtype ", dtype, ", wanted float32, float16 or bfloat16; cast it with .to(dtype).");
}

void check_last_dim(const Tensor& t, const c10::SymInt& wanted, const char* op, const char* argument) {
  TORCH_CHECK_VALUE(t.dim() >= 1, op, ": argument '", argument, "' has no dimensions, wanted a last dimension of ",
                    wanted, ".");
  TORCH_CHECK_VALUE(t.sym_size(-1) == wanted, op, ": argument '", argument, "' has shape ", t.sym_sizes(),
                    ", wanted a last dimension of ", wanted, ".");
}

bool must_dispatch(at::ArrayRef<const Tensor*> tensors) {
  if (c10::impl::TorchDispatchModeTLS::any_modes_set()) return true;
  static const c10::DispatchKeySet tracing(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode, c10::DispatchKey::Tracer});
  if (c10::impl::tls_local_dispatch_key_set().included_.has_any(tracing)) return true;
  // Functionality keys only: a backend key such as Meta would add the Dense bit, which every tensor has.
  static const c10::DispatchKeySet special({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  for (const Tensor* t : tensors) {
    if (t != nullptr && t->defined() && (t->is_meta() || t->key_set().has_any(special))) return true;
  }
  return false;
}

bool needs_graph(at::ArrayRef<const Tensor*> tensors) {
  if (!c10::GradMode::is_enabled()) return false;
  for (const Tensor* t : tensors) {
    if (t != nullptr && t->defined() && t->requires_grad()) return true;
  }
  return false;
}

Tensor autocast(const Tensor& t) {
  const auto device = t.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return t;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), t, device);
}

OptionalTensor autocast(const OptionalTensor& t) {
  if (!t.has_value()) return t;
  return autocast(*t);
}

}  // namespace te_torch
