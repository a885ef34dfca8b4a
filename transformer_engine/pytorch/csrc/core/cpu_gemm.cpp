// Registers LibTorch's CPU GEMM with the engine, for C++ callers of te_gemm in a process with torch. The extension's
// own GEMMs do not use it (gemm/gemm_path.h).
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <transformer_engine/gemm.h>

namespace te_torch {

namespace {

at::Tensor matrix(const float* data, int64_t rows, int64_t cols, int64_t row_step, int64_t col_step) {
  return at::from_blob(const_cast<float*>(data), {rows, cols}, {row_step, col_step}, at::kFloat);
}

void product(te_gemm_layout layout, int64_t rows, int64_t cols, int64_t depth, const float* a, int64_t a_pitch,
             const float* b, int64_t b_pitch, float* d, int64_t d_pitch, int accumulate) {
  // Hidden from the modes of the calling thread, as the caller did not call LibTorch.
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  using c10::DispatchKey;
  const c10::impl::ExcludeDispatchKeyGuard below_modes(
      c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                           DispatchKey::Functionalize, DispatchKey::FuncTorchDynamicLayerFrontMode,
                           DispatchKey::FuncTorchDynamicLayerBackMode}));
  const at::Tensor left =
      layout == TE_GEMM_NT ? matrix(b, rows, depth, 1, b_pitch) : matrix(b, rows, depth, b_pitch, 1);
  const at::Tensor right =
      layout == TE_GEMM_TN ? matrix(a, depth, cols, 1, a_pitch) : matrix(a, depth, cols, a_pitch, 1);
  at::Tensor out = matrix(d, rows, cols, d_pitch, 1);
  if (accumulate) {
    at::cpu::addmm_out(out, out, left, right, 1, 1);
  } else {
    at::cpu::mm_out(out, left, right);
  }
}

[[maybe_unused]] const bool installed = (te_set_cpu_gemm(product), true);

}  // namespace

}  // namespace te_torch
