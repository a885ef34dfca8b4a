// gemm, CUDA path: cuBLASLt, opened on first use. Holds the plan cache and one library handle per device; the workspace
// is the caller's. cuBLASLt is column-major, so a row-major [r, c] tensor is its c x r matrix and d^T is computed.
#include <cublasLt.h>

#include <map>
#include <mutex>
#include <tuple>

#include "core/device.h"
#include "ops/gemm/gemm_problem.h"

namespace te::gemm::cuda {

namespace {

// The library's entry points, by name, with the types of its own header.
struct Lt {
#define TE_LT_FUNCTIONS(X)          \
  X(cublasLtCreate)                 \
  X(cublasLtGetStatusString)        \
  X(cublasLtMatmul)                 \
  X(cublasLtMatmulAlgoGetHeuristic) \
  X(cublasLtMatmulDescCreate)       \
  X(cublasLtMatmulDescSetAttribute) \
  X(cublasLtMatmulDescDestroy)      \
  X(cublasLtMatrixLayoutCreate)     \
  X(cublasLtMatmulPreferenceCreate) \
  X(cublasLtMatmulPreferenceSetAttribute)
#define TE_LT_POINTER(name) \
  decltype(&::name) name = reinterpret_cast<decltype(&::name)>(library_symbol("cublasLt", #name));
  TE_LT_FUNCTIONS(TE_LT_POINTER)
#undef TE_LT_POINTER
#undef TE_LT_FUNCTIONS
};

const Lt& lt() {
  static const Lt functions;
  return functions;
}

void check(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw Error(TE_RUNTIME_ERROR, concat("te_gemm: ", what, ": ", lt().cublasLtGetStatusString(status)));
  }
}

cublasLtHandle_t handle_of(int32_t device) {  // the caller holds the cache's mutex; the device is current
  static std::map<int32_t, cublasLtHandle_t> handles;
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) check(lt().cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

cudaDataType_t cuda_type(te_dtype dtype) {
  return dtype == TE_FLOAT32 ? CUDA_R_32F : dtype == TE_FLOAT16 ? CUDA_R_16F : CUDA_R_16BF;
}

// The largest power of two, at most 16, that divides the address and the pitch in bytes.
uint32_t alignment_of(const te_tensor& t) {
  const uint64_t bits = reinterpret_cast<uint64_t>(t.data) | uint64_t(t.row_pitch) * te_dtype_bytes(t.dtype) | 16u;
  return uint32_t(bits & (~bits + 1));
}

// All that the choice of an algorithm may depend on.
using Key = std::tuple<int32_t, int, int, int, int, int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                       uint32_t, uint32_t, uint32_t, uint32_t, int, int, int>;

Key key_of(const te_gemm_problem& p, const Sizes& s) {
  const bool has_bias = p.bias.data != nullptr;
  return {p.a.device,
          p.layout,
          p.epilogue,
          p.accumulate != 0,
          p.a.dtype == TE_FLOAT32 && p.allow_tf32,
          has_bias,
          s.rows,
          s.cols,
          s.depth,
          p.a.row_pitch,
          p.b.row_pitch,
          p.d.row_pitch,
          p.aux.data != nullptr ? p.aux.row_pitch : 0,
          alignment_of(p.a),
          alignment_of(p.b),
          alignment_of(p.d),
          p.aux.data != nullptr ? alignment_of(p.aux) : 0,
          p.a.dtype,
          p.d.dtype,
          has_bias ? int(p.bias.dtype) : -1};
}

struct Plan {
  cublasLtHandle_t handle;
  cublasLtMatrixLayout_t a, b, d;
  cublasLtMatmulAlgo_t algo;
  size_t workspace_bytes;
};

template <class T>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const T& value) {
  check(lt().cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
}

template <class T>
void prefer(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
  check(lt().cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
        "cublasLtMatmulPreferenceSetAttribute");
}

cublasLtEpilogue_t epilogue_of(const te_gemm_problem& p) {
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

// One per call, since it carries the call's pointers and other threads may run the same plan.
class Descriptor {
 public:
  explicit Descriptor(const te_gemm_problem& p) {
    const bool tf32 = p.a.dtype == TE_FLOAT32 && p.allow_tf32;
    check(lt().cublasLtMatmulDescCreate(&desc_, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    set(desc_, CUBLASLT_MATMUL_DESC_TRANSA, p.layout == TE_GEMM_TN ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(desc_, CUBLASLT_MATMUL_DESC_TRANSB, p.layout == TE_GEMM_NT ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
    if (p.bias.data != nullptr) {
      set(desc_, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias.data);
      set(desc_, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t(cuda_type(p.bias.dtype)));
    }
    if (p.aux.data != nullptr) {
      set(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux.data);
      set(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.aux.row_pitch);
      set(desc_, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, int32_t(cuda_type(p.aux.dtype)));
    }
  }
  ~Descriptor() { lt().cublasLtMatmulDescDestroy(desc_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  cublasLtMatmulDesc_t get() const { return desc_; }

 private:
  cublasLtMatmulDesc_t desc_ = nullptr;
};

cublasLtMatrixLayout_t layout_of(const te_tensor& t) {
  cublasLtMatrixLayout_t layout;
  check(lt().cublasLtMatrixLayoutCreate(&layout, cuda_type(t.dtype), uint64_t(t.cols), uint64_t(t.rows), t.row_pitch),
        "cublasLtMatrixLayoutCreate");
  return layout;
}

Plan make_plan(const te_gemm_problem& p) {
  Plan plan{handle_of(p.a.device), layout_of(p.a), layout_of(p.b), layout_of(p.d), {}, 0};
  cublasLtMatmulPreference_t preference;
  check(lt().cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const uint64_t most = 32u << 20;  // cuBLAS's own recommendation for Hopper
  prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most);
  // Partial sums added in a separate pass have one order; schemes that reduce in place are left out.
  const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.a));
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.b));
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.d));
  prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.d));
  const Descriptor descriptor(p);
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = lt().cublasLtMatmulAlgoGetHeuristic(plan.handle, descriptor.get(), plan.a, plan.b,
                                                                    plan.d, plan.d, preference, 1, &result, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
    throw Error(TE_NOT_IMPLEMENTED, concat("te_gemm: cuBLASLt has no algorithm for a ", te_dtype_name(p.a.dtype), " ",
                                           shape_of(p.a), ", b ", shape_of(p.b), ", d ", te_dtype_name(p.d.dtype), " ",
                                           shape_of(p.d), ", layout ", layout_name(p.layout), ", epilogue ",
                                           int(p.epilogue), " (", lt().cublasLtGetStatusString(status),
                                           "). Drop the epilogue, or pad the sizes to multiples of 8."));
  }
  plan.algo = result.algo;
  plan.workspace_bytes = result.workspaceSize;
  return plan;
}

// Plans live as long as the process: a model has some tens of them. References stay valid in a std::map.
const Plan& plan_of(const te_gemm_problem& p, const Sizes& s) {
  static std::mutex mutex;
  static std::map<Key, Plan> plans;
  const Key key = key_of(p, s);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = plans.find(key);
  if (found != plans.end()) return found->second;
  return plans.emplace(key, make_plan(p)).first->second;
}

template <class T>
__global__ void fill_kernel(T* d, int64_t pitch, const T* bias, int64_t rows, int64_t cols) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < rows * cols) d[i / cols * pitch + i % cols] = bias != nullptr ? bias[i % cols] : from_float<T>(0.f);
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

// Nothing to reduce: the product is zero, which cuBLASLt does not take.
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

size_t workspace(const te_gemm_problem& p, const Sizes& s) {
  return s.rows == 0 || s.cols == 0 || s.depth == 0 ? 0 : plan_of(p, s).workspace_bytes;
}

void run(const te_gemm_problem& p, const Sizes& s, void* workspace, size_t bytes, te_stream stream) {
  if (s.rows == 0 || s.cols == 0 || s.depth == 0) return run_empty(p, stream);
  const Plan& plan = plan_of(p, s);
  if (bytes < plan.workspace_bytes)
    bad_argument("te_gemm", "workspace_bytes", bytes, concat(">= ", plan.workspace_bytes));
  const float alpha = 1.f;
  const float beta = p.accumulate ? 1.f : 0.f;
  const Descriptor descriptor(p);
  check(lt().cublasLtMatmul(plan.handle, descriptor.get(), &alpha, p.a.data, plan.a, p.b.data, plan.b, &beta, p.d.data,
                            plan.d, p.d.data, plan.d, &plan.algo, workspace, bytes, cudaStream_t(stream)),
        "cublasLtMatmul");
}

}  // namespace te::gemm::cuda
