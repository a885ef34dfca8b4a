// cuBLASLt for the CUDA path of gemm: its entry points, opened on first use, and C++ wrappers of its objects.
// cuBLASLt is column-major, so a row-major [r, c] tensor is its c x r matrix and d^T is computed.
#pragma once

#include <cublasLt.h>

#include "core/device.h"
#include "core/fp8.h"
#include "ops/gemm/gemm_problem.h"

namespace te::gemm::cuda {

// Entry points with the types of the library's header.
struct Lt {
#define TE_LT_FUNCTIONS(X)                \
  X(cublasLtCreate)                       \
  X(cublasLtGetStatusString)              \
  X(cublasLtGetVersion)                   \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoCheck)              \
  X(cublasLtMatmulAlgoConfigGetAttribute) \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute)
#define TE_LT_POINTER(name) \
  decltype(&::name) name = reinterpret_cast<decltype(&::name)>(library_symbol("cublasLt", #name));
  TE_LT_FUNCTIONS(TE_LT_POINTER)
#undef TE_LT_POINTER
#undef TE_LT_FUNCTIONS
};

inline const Lt& lt() {
  static const Lt functions;
  return functions;
}

inline void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(TE_RUNTIME_ERROR, concat("te_gemm: ", what, ": ", lt().cublasLtGetStatusString(status)));
  }
}

inline cudaDataType_t cuda_type(int32_t dtype) {
  if (dtype == TE_FLOAT8_E4M3) return CUDA_R_8F_E4M3;
  if (dtype == TE_FLOAT8_E5M2) return CUDA_R_8F_E5M2;
  return dtype == TE_FLOAT32 ? CUDA_R_32F : dtype == TE_FLOAT16 ? CUDA_R_16F : CUDA_R_16BF;
}

inline cublasLtMatmulMatrixScale_t scale_mode_of(te_scaling scaling) {
  switch (scaling) {
    case TE_SCALING_TENSOR:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case TE_SCALING_BLOCK_1D:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case TE_SCALING_BLOCK_2D:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
  bad_argument("te_gemm", "scaling", int(scaling), "a te_scaling");
}

inline cublasLtEpilogue_t epilogue_of(const te_gemm_problem& p) {
  switch (p.epilogue) {
    case TE_GEMM_NONE:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case TE_GEMM_BIAS:
      return CUBLASLT_EPILOGUE_BIAS;
    case TE_GEMM_GELU:
      return p.bias.data != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case TE_GEMM_DGELU:
      return CUBLASLT_EPILOGUE_DGELU;
    case TE_GEMM_BGRAD:
      return CUBLASLT_EPILOGUE_BGRADB;
  }
  bad_argument("te_gemm", "epilogue", int(p.epilogue), "a te_gemm_epilogue");
}

// One for each call: it holds the call's pointers, and other threads may run the same plan.
class Descriptor {
 public:
  explicit Descriptor(const te_gemm_problem& p) {
    const bool tf32 = p.a.dtype == TE_FLOAT32 && p.allow_tf32;
    check(lt().cublasLtMatmulDescCreate(&desc_, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.layout == TE_GEMM_TN ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.layout == TE_GEMM_NT ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
    if (p.bias.data != nullptr) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias.data);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(cuda_type(p.bias.dtype)));
    }
    if (p.aux.data != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux.data);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.aux.row_pitch);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t(cuda_type(p.aux.dtype)));
    }
    if (is_fp8(p.a.dtype)) set_fp8(p);
  }
  ~Descriptor() { lt().cublasLtMatmulDescDestroy(desc_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  cublasLtMatmulDesc_t get() const { return desc_; }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check(lt().cublasLtMatmulDescSetAttribute(desc_, attribute, &value, sizeof value),
          "cublasLtMatmulDescSetAttribute");
  }

  void set_fp8(const te_gemm_problem& p) {
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, int32_t(scale_mode_of(p.a_scaling)));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, int32_t(scale_mode_of(p.b_scaling)));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.a_scale_inv.data);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.b_scale_inv.data);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(p.fast_accumulation != 0));
  }

  cublasLtMatmulDesc_t desc_ = nullptr;
};

class MatrixLayout {
 public:
  explicit MatrixLayout(const te_tensor& t) {
    check(
        lt().cublasLtMatrixLayoutCreate(&layout_, cuda_type(t.dtype), uint64_t(t.cols), uint64_t(t.rows), t.row_pitch),
        "cublasLtMatrixLayoutCreate");
  }
  ~MatrixLayout() { lt().cublasLtMatrixLayoutDestroy(layout_); }
  MatrixLayout(const MatrixLayout&) = delete;
  MatrixLayout& operator=(const MatrixLayout&) = delete;
  cublasLtMatrixLayout_t get() const { return layout_; }

 private:
  cublasLtMatrixLayout_t layout_ = nullptr;
};

// An algorithm for one problem. Immutable.
struct MatmulPlan {
  cublasLtHandle_t handle;
  MatrixLayout a, b, d;  // d is also the matrix C of cuBLASLt
  cublasLtMatmulAlgo_t algo;
  size_t workspace_bytes;

  void run(const te_gemm_problem& p, const Descriptor& descriptor, void* workspace, size_t bytes,
           te_stream stream) const {
    const float alpha = 1.f;
    const float beta = p.accumulate ? 1.f : 0.f;
    check(lt().cublasLtMatmul(handle, descriptor.get(), &alpha, p.a.data, a.get(), p.b.data, b.get(), &beta, p.d.data,
                              d.get(), p.d.data, d.get(), &algo, workspace, bytes, cudaStream_t(stream)),
          "cublasLtMatmul");
  }
};

// The plan of a problem: the one that te_gemm_choose set if its workspace fits into `bytes`, else the heuristic's. It
// lives as long as the process.
const MatmulPlan& plan_of(const te_gemm_problem& p, const GemmShape& s, size_t bytes);

// Whether the algorithm splits the reduction of an element.
bool splits(const MatmulPlan& plan);

// Calls of te_gemm_choose and te_gemm_forget_choices so far.
uint64_t choice_count();

}  // namespace te::gemm::cuda
