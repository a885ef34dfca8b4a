// gemm, CUDA path: runs a problem's plan (cublaslt/gemm_plan.cu) in the caller's workspace, and fills the result of an
// empty product, which cuBLASLt does not accept.
#include "ops/gemm/cublaslt/cublaslt.h"

namespace te::gemm::cuda {

namespace {

template <class T>
__global__ void fill_kernel(T* d, int64_t pitch, const T* bias, int64_t m, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < m * n) d[i / n * pitch + i % n] = bias != nullptr ? bias[i % n] : from_float<T>(0.f);
}

template <class T>
void fill(const te_tensor& d, const te_tensor* bias, te_stream stream) {
  if (d.rows * d.cols == 0) return;
  const auto blocks = static_cast<unsigned>((d.rows * d.cols + 255) / 256);
  fill_kernel<T><<<blocks, 256, 0, cudaStream_t(stream)>>>(
      static_cast<T*>(d.data), d.row_pitch, bias != nullptr ? static_cast<const T*>(bias->data) : nullptr, d.rows,
      d.cols);
  check_launch("te_gemm");
}

// The reduced dimension is empty, so that the product is zero.
void run_empty(const te_gemm_problem& p, te_stream stream) {
  const bool has_bias = p.epilogue == TE_GEMM_BIAS;
  const bool gelu = p.epilogue == TE_GEMM_GELU || p.epilogue == TE_GEMM_DGELU;
  const bool bias_has_sums = p.epilogue == TE_GEMM_BGRAD && p.b.rows > 0 && p.b.cols > 0;
  if ((gelu && p.d.rows * p.d.cols > 0) || bias_has_sums || (has_bias && p.bias.dtype != p.d.dtype)) {
    throw Error(
        TE_NOT_IMPLEMENTED,
        "te_gemm: an empty product with a gelu epilogue, with a bias gradient to sum, or with a bias of another "
        "dtype; compute it without the epilogue.");
  }
  if (!p.accumulate || has_bias) {
    dispatch_float(p.d.dtype, "te_gemm", "d",
                   [&](auto t) { fill<decltype(t)>(p.d, has_bias ? &p.bias : nullptr, stream); });
  }
  if (p.epilogue == TE_GEMM_BGRAD) {
    dispatch_float(p.bias.dtype, "te_gemm", "bias", [&](auto t) { fill<decltype(t)>(p.bias, nullptr, stream); });
  }
}

}  // namespace

size_t workspace(const te_gemm_problem& p, const GemmShape& s) {
  return is_empty(s) ? 0 : plan_of(p, s, SIZE_MAX).workspace_bytes;
}

void run(const te_gemm_problem& p, const GemmShape& s, void* workspace, size_t bytes, te_stream stream) {
  if (is_empty(s)) return run_empty(p, stream);
  const MatmulPlan& plan = plan_of(p, s, bytes);
  if (bytes < plan.workspace_bytes)
    bad_argument("te_gemm", "workspace_bytes", bytes, concat(">= ", plan.workspace_bytes));
  plan.run(p, Descriptor(p), workspace, bytes, stream);
}

}  // namespace te::gemm::cuda
