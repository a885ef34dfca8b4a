// gemm, CUDA path: selects the algorithm of a problem. Holds the plans, the choices of te_gemm_choose, and one library
// handle per device, under one mutex. Owns no device memory.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/gemm/cublaslt/cublaslt.h"

namespace te::gemm::cuda {

namespace {

constexpr int kMostCandidates = 256;

// The largest power of two, at most 16, that divides the address and the pitch in bytes.
int32_t alignment_of(const te_tensor& t) {
  if (t.data == nullptr) return 0;
  const uint64_t bits = reinterpret_cast<uint64_t>(t.data) | uint64_t(t.row_pitch) * te_dtype_bytes(t.dtype) | 16u;
  return int32_t(bits & (~bits + 1));
}

struct PlanKey {
  te_gemm_key problem;
  int64_t whole_rows;  // rows of the product that these rows are part of; 0: a product of its own
};

struct ByBytes {
  bool operator()(const PlanKey& x, const PlanKey& y) const { return std::memcmp(&x, &y, sizeof x) < 0; }
};
static_assert(sizeof(te_gemm_key) == 7 * 8 + 16 * 4 && sizeof(PlanKey) == sizeof(te_gemm_key) + 8,
              "keys are compared as bytes, padding would count");
static_assert(sizeof(cublasLtMatmulAlgo_t) == sizeof(te_gemm_choice::algorithm), "an algorithm is passed as bytes");

// A problem with this key, whose addresses have the key's alignments.
te_gemm_problem problem_of(const te_gemm_key& k) {
  const auto tensor = [&](int32_t alignment, int64_t rows, int64_t columns, int64_t pitch, int32_t dtype) {
    return te_tensor{reinterpret_cast<void*>(intptr_t(alignment)), rows, columns, pitch, te_dtype(dtype), k.device};
  };
  const auto absent = te_tensor{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
  const bool a_k_major = k.layout == TE_GEMM_TN, b_k_major = k.layout != TE_GEMM_NT;
  te_gemm_problem p{};
  p.a = tensor(k.a_alignment, a_k_major ? k.cols : k.depth, a_k_major ? k.depth : k.cols, k.a_pitch, k.dtype);
  p.b = tensor(k.b_alignment, b_k_major ? k.rows : k.depth, b_k_major ? k.depth : k.rows, k.b_pitch, k.b_dtype);
  p.d = tensor(k.d_alignment, k.rows, k.cols, k.d_pitch, k.d_dtype);
  const int64_t bias_cols = k.epilogue == TE_GEMM_BGRAD ? k.rows : k.cols;
  p.bias = k.bias_dtype < 0 ? absent : tensor(16, 1, bias_cols, bias_cols, k.bias_dtype);
  p.aux = k.aux_alignment == 0 ? absent : tensor(k.aux_alignment, k.rows, k.cols, k.aux_pitch, k.d_dtype);
  p.layout = te_gemm_layout(k.layout);
  p.epilogue = te_gemm_epilogue(k.epilogue);
  p.accumulate = k.accumulate;
  p.allow_tf32 = k.tf32;
  p.a_scale_inv = p.b_scale_inv = absent;
  p.a_scaling = te_scaling(k.a_scaling);
  p.b_scaling = te_scaling(k.b_scaling);
  p.fast_accumulation = k.fast_accumulation;
  const auto scales = [&](const ScaleShape& e) { return tensor(16, e.rows, e.columns, e.columns, TE_FLOAT32); };
  if (is_fp8(p.a.dtype)) {
    p.a_scale_inv = scales(scales_of(p.a_scaling, k.cols, k.depth));
    p.b_scale_inv = scales(scales_of(p.b_scaling, k.rows, k.depth));
  }
  return p;
}

// Checks a key, which may have been read from a file.
te_gemm_problem checked_problem_of(const char* op, const te_gemm_key& k) {
  const auto wrong = [&](const char* field, int64_t got, const char* wanted) {
    bad_argument(op, "key", concat("with ", field, " ", got), wanted);
  };
  if (k.rows < 1 || k.cols < 1 || k.depth < 1) wrong("an extent of", std::min({k.rows, k.cols, k.depth}), ">= 1");
  if (k.dtype < 0 || k.b_dtype < 0 || k.d_dtype < 0 || k.bias_dtype < -1) wrong("a dtype of", -1, "a te_dtype");
  for (const int32_t alignment : {k.a_alignment, k.b_alignment, k.d_alignment}) {
    if (alignment < 1 || alignment > 16 || (alignment & (alignment - 1)) != 0) {
      wrong("an alignment of", alignment, "1, 2, 4, 8 or 16");
    }
  }
  const te_gemm_problem p = problem_of(k);
  check_problem(p);
  const te_gemm_key expected = key_of(p, gemm_shape(p));
  if (std::memcmp(&expected, &k, sizeof k) != 0) {
    bad_argument(op, "key", "inconsistent with any problem", "a key that te_gemm_key_of returned");
  }
  return p;
}

cublasLtHandle_t handle_of(int32_t device) {  // the caller holds the mutex; the device is current
  static std::map<int32_t, cublasLtHandle_t> handles;
  cublasLtHandle_t& handle = handles[device];
  if (handle == nullptr) check(lt().cublasLtCreate(&handle), "cublasLtCreate");
  return handle;
}

class Preference {
 public:
  explicit Preference(const te_gemm_problem& p) {
    check(lt().cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate");
    const uint64_t most = 32u << 20;  // cuBLAS's recommendation for Hopper
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, most);
    // A separate pass adds partial sums in a fixed order; schemes that reduce in place are excluded.
    const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(alignment_of(p.a)));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(alignment_of(p.b)));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(alignment_of(p.d)));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(alignment_of(p.d)));
  }
  ~Preference() { lt().cublasLtMatmulPreferenceDestroy(preference_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  cublasLtMatmulPreference_t get() const { return preference_; }

 private:
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, const T& value) {
    check(lt().cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &value, sizeof value),
          "cublasLtMatmulPreferenceSetAttribute");
  }

  cublasLtMatmulPreference_t preference_ = nullptr;
};

std::vector<cublasLtMatmulHeuristicResult_t> ranked(const te_gemm_problem& p, int most) {
  const MatrixLayout a(p.a), b(p.b), d(p.d);
  const Preference preference(p);
  const Descriptor descriptor(p);
  std::vector<cublasLtMatmulHeuristicResult_t> results(static_cast<size_t>(most));
  int found = 0;
  const cublasStatus_t status =
      lt().cublasLtMatmulAlgoGetHeuristic(handle_of(p.a.device), descriptor.get(), a.get(), b.get(), d.get(), d.get(),
                                          preference.get(), most, results.data(), &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
    const std::string fp8 = is_fp8(p.a.dtype)
                                ? concat(", scalings ", scaling_name(p.a_scaling), " and ", scaling_name(p.b_scaling),
                                         ", fast accumulation ", p.fast_accumulation ? "on" : "off", ", accumulate ",
                                         p.accumulate ? "on" : "off")
                                : std::string();
    throw Error(TE_NOT_IMPLEMENTED,
                concat("te_gemm: cuBLASLt has no algorithm for a ", te_dtype_name(p.a.dtype), " ", shape_of(p.a),
                       ", b ", te_dtype_name(p.b.dtype), " ", shape_of(p.b), ", d ", te_dtype_name(p.d.dtype), " ",
                       shape_of(p.d), ", layout ", layout_name(p.layout), ", epilogue ", int(p.epilogue), fp8, " (",
                       lt().cublasLtGetStatusString(status), "). Drop the epilogue, or pad the sizes to multiples of ",
                       fp8.empty() ? 8 : 128, "."));
  }
  results.resize(size_t(found));
  return results;
}

uint32_t attribute_of(const cublasLtMatmulAlgo_t& algo, cublasLtMatmulAlgoConfigAttributes_t attribute) {
  uint32_t value = 0;
  size_t written = 0;
  check(lt().cublasLtMatmulAlgoConfigGetAttribute(&algo, attribute, &value, sizeof value, &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
  return value;
}

bool order_is_fixed(const cublasLtMatmulAlgo_t& algo) {
  const uint32_t scheme = attribute_of(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME);
  return scheme == CUBLASLT_REDUCTION_SCHEME_NONE || scheme == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
}

using PlanPointer = std::unique_ptr<const MatmulPlan>;

PlanPointer plan_with(const te_gemm_problem& p, const cublasLtMatmulAlgo_t& algo, size_t workspace_bytes) {
  return PlanPointer(new MatmulPlan{handle_of(p.a.device), MatrixLayout(p.a), MatrixLayout(p.b), MatrixLayout(p.d),
                                    algo, workspace_bytes});
}

// The choice as a plan, if cuBLASLt accepts it for the problem.
PlanPointer plan_chosen(const char* op, const te_gemm_problem& p, const te_gemm_choice& choice) {
  cublasLtMatmulAlgo_t algo;
  std::memcpy(&algo, choice.algorithm, sizeof algo);
  const MatrixLayout a(p.a), b(p.b), d(p.d);
  const Descriptor descriptor(p);
  cublasLtMatmulHeuristicResult_t result{};
  const cublasStatus_t status = lt().cublasLtMatmulAlgoCheck(handle_of(p.a.device), descriptor.get(), a.get(), b.get(),
                                                             d.get(), d.get(), &algo, &result);
  if (status != CUBLAS_STATUS_SUCCESS || result.state != CUBLAS_STATUS_SUCCESS || !order_is_fixed(algo)) {
    const cublasStatus_t why = status != CUBLAS_STATUS_SUCCESS ? status : result.state;
    bad_argument(op, "choice",
                 why == CUBLAS_STATUS_SUCCESS ? "an algorithm whose order of reduction may vary"
                                              : concat("refused by cuBLASLt (", lt().cublasLtGetStatusString(why),
                                                       ") for d ", shape_of(p.d), ", layout ", layout_name(p.layout)),
                 "one that te_gemm_candidates returned for this key, on this GPU and library");
  }
  return plan_with(p, algo, std::max<size_t>(result.workspaceSize, choice.workspace_bytes));
}

// Plans are never freed, replaced ones included: another thread may be running one.
struct Entry {
  const MatmulPlan* default_plan =
      nullptr;  // the heuristic's, or for a run the whole product's; null before its first use
  const MatmulPlan* chosen = nullptr;
};

std::mutex& mutex() {
  static std::mutex mutex;
  return mutex;
}

std::map<PlanKey, Entry, ByBytes>& entries() {
  static auto* entries = new std::map<PlanKey, Entry, ByBytes>;
  return *entries;
}

std::atomic<uint64_t> choices_made{0};

}  // namespace

te_gemm_key key_of(const te_gemm_problem& p, const GemmShape& s) {
  te_gemm_key k{};
  k.rows = s.m;
  k.cols = s.n;
  k.depth = s.k;
  k.a_pitch = p.a.row_pitch;
  k.b_pitch = p.b.row_pitch;
  k.d_pitch = p.d.row_pitch;
  k.aux_pitch = p.aux.data != nullptr ? p.aux.row_pitch : 0;
  k.layout = p.layout;
  k.epilogue = p.epilogue;
  k.accumulate = p.accumulate != 0;
  k.tf32 = p.a.dtype == TE_FLOAT32 && p.allow_tf32;
  k.dtype = p.a.dtype;
  k.b_dtype = p.b.dtype;
  k.d_dtype = p.d.dtype;
  k.bias_dtype = p.bias.data != nullptr ? p.bias.dtype : -1;
  if (is_fp8(p.a.dtype)) {
    k.a_scaling = p.a_scaling;
    k.b_scaling = p.b_scaling;
    k.fast_accumulation = p.fast_accumulation != 0;
  }
  k.a_alignment = alignment_of(p.a);
  k.b_alignment = alignment_of(p.b);
  k.d_alignment = alignment_of(p.d);
  k.aux_alignment = alignment_of(p.aux);
  k.device = p.a.device;
  return k;
}

namespace {

// The product that these rows are part of. Its alignment is 16, as a run's start depends on its pitch alone.
te_gemm_problem full_product_of(const te_gemm_problem& p) {
  te_gemm_problem full = p;
  full.b.rows = full.d.rows = p.whole_rows;
  full.whole_rows = 0;
  full.b.data = full.d.data = reinterpret_cast<void*>(intptr_t(16));
  if (is_fp8(p.b.dtype)) {
    const ScaleShape scales = scales_of(p.b_scaling, p.whole_rows, p.b.cols);
    full.b_scale_inv.rows = scales.rows;
    full.b_scale_inv.cols = full.b_scale_inv.row_pitch = scales.columns;
  }
  return full;
}

const MatmulPlan& plan_alone(const te_gemm_problem& p, const GemmShape& s, size_t bytes);

// The whole product's algorithm; a new plan if te_gemm_choose has changed that since.
const MatmulPlan& plan_of_run(const te_gemm_problem& p, const GemmShape& s) {
  const te_gemm_problem full = full_product_of(p);
  const MatmulPlan& model = plan_alone(full, gemm_shape(full), SIZE_MAX);
  const std::lock_guard<std::mutex> lock(mutex());
  const MatmulPlan*& plan = entries()[{key_of(p, s), p.whole_rows}].default_plan;
  if (plan == nullptr || std::memcmp(&plan->algo, &model.algo, sizeof model.algo) != 0) {
    te_gemm_choice choice{};
    std::memcpy(choice.algorithm, &model.algo, sizeof model.algo);
    choice.workspace_bytes = model.workspace_bytes;
    plan = plan_chosen("te_gemm", p, choice).release();
  }
  return *plan;
}

struct Extents {
  uint32_t id;
  int32_t down, across;  // of d^T, which cuBLASLt computes
};

// Those that its heuristics take for products of large layers on Hopper.
constexpr Extents kTiles[] = {{CUBLASLT_MATMUL_TILE_64x256, 64, 256},   {CUBLASLT_MATMUL_TILE_256x64, 256, 64},
                              {CUBLASLT_MATMUL_TILE_128x128, 128, 128}, {CUBLASLT_MATMUL_TILE_128x256, 128, 256},
                              {CUBLASLT_MATMUL_TILE_256x128, 256, 128}, {CUBLASLT_MATMUL_TILE_128x192, 128, 192},
                              {CUBLASLT_MATMUL_TILE_192x128, 192, 128}, {CUBLASLT_MATMUL_TILE_192x192, 192, 192},
                              {CUBLASLT_MATMUL_TILE_128x320, 128, 320}, {CUBLASLT_MATMUL_TILE_320x128, 320, 128}};
constexpr Extents kClusters[] = {{CUBLASLT_CLUSTER_SHAPE_1x1x1, 1, 1},
                                 {CUBLASLT_CLUSTER_SHAPE_2x1x1, 2, 1},
                                 {CUBLASLT_CLUSTER_SHAPE_1x2x1, 1, 2},
                                 {CUBLASLT_CLUSTER_SHAPE_2x2x1, 2, 2}};

te_gemm_tile tile_of(const cublasLtMatmulAlgo_t& algo) {
  uint16_t cluster = 0;
  size_t written = 0;
  check(lt().cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster,
                                                  sizeof cluster, &written),
        "cublasLtMatmulAlgoConfigGetAttribute");
  const uint32_t id = attribute_of(algo, CUBLASLT_ALGO_CONFIG_TILE_ID);
  for (const Extents& tile : kTiles) {
    for (const Extents& each : kClusters) {
      if (tile.id != id || each.id != cluster) continue;
      return {tile.across * each.across, tile.down * each.down, each.down * each.across};
    }
  }
  return {};
}

}  // namespace

bool takes_runs(const te_gemm_problem& p, const GemmShape& s, te_gemm_tile& tile) {
  if (is_empty(s)) return false;
  te_gemm_problem full = p;
  full.whole_rows = s.m;
  full = full_product_of(full);
  const MatmulPlan& plan = plan_alone(full, s, SIZE_MAX);
  tile = tile_of(plan.algo);
  return !splits(plan);
}

bool splits(const MatmulPlan& plan) {
  return attribute_of(plan.algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1 ||
         attribute_of(plan.algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) != CUBLASLT_REDUCTION_SCHEME_NONE;
}

uint64_t choice_count() { return choices_made.load(); }

const MatmulPlan& plan_of(const te_gemm_problem& p, const GemmShape& s, size_t bytes) {
  return p.whole_rows > s.m ? plan_of_run(p, s) : plan_alone(p, s, bytes);
}

namespace {

const MatmulPlan& plan_alone(const te_gemm_problem& p, const GemmShape& s, size_t bytes) {
  const PlanKey key{key_of(p, s), 0};
  const std::lock_guard<std::mutex> lock(mutex());
  Entry& entry = entries()[key];
  if (entry.chosen != nullptr && entry.chosen->workspace_bytes <= bytes) {
    te_note_path("cuBLASLt, the tuned algorithm", "");
    return *entry.chosen;
  }
  te_note_path("cuBLASLt, its heuristic's first algorithm", "te.tune(module, *sample) may find a faster one");
  if (entry.default_plan == nullptr) {
    const cublasLtMatmulHeuristicResult_t first = ranked(p, 1).front();
    entry.default_plan = plan_with(p, first.algo, first.workspaceSize).release();
  }
  return *entry.default_plan;
}

}  // namespace

int32_t candidates(const te_gemm_key& key, int32_t most, te_gemm_choice* choices) {
  const te_gemm_problem p = checked_problem_of("te_gemm_candidates", key);
  const std::lock_guard<std::mutex> lock(mutex());
  int32_t found = 0;
  // The first alone comes from the query that te_gemm makes.
  for (const int wanted : {1, std::min(most, kMostCandidates)}) {
    for (const cublasLtMatmulHeuristicResult_t& result : ranked(p, wanted)) {
      if (found == most || result.state != CUBLAS_STATUS_SUCCESS || !order_is_fixed(result.algo)) continue;
      te_gemm_choice choice{};
      std::memcpy(choice.algorithm, &result.algo, sizeof choice.algorithm);
      choice.workspace_bytes = result.workspaceSize;
      if (found > 0 && std::memcmp(choices, &choice, sizeof choice) == 0) continue;
      choices[found++] = choice;
    }
  }
  return found;
}

void choose(const te_gemm_key* keys, const te_gemm_choice* choices, int32_t count) {
  const std::lock_guard<std::mutex> lock(mutex());
  std::vector<PlanPointer> plans;
  for (int32_t i = 0; i < count; ++i) {
    plans.push_back(plan_chosen("te_gemm_choose", checked_problem_of("te_gemm_choose", keys[i]), choices[i]));
  }
  for (int32_t i = 0; i < count; ++i) entries()[{keys[i], 0}].chosen = plans[size_t(i)].release();
  ++choices_made;
}

void forget_choices() {
  const std::lock_guard<std::mutex> lock(mutex());
  for (auto& [key, entry] : entries()) entry.chosen = nullptr;
  ++choices_made;
}

void try_choice(const te_gemm_key& key, const te_gemm_choice& choice, const te_gemm_operands& operands, int32_t repeats,
                void* workspace, size_t bytes, te_stream stream) {
  const char* op = "te_gemm_try";
  te_gemm_problem p = checked_problem_of(op, key);
  p.a.data = operands.a;
  p.b.data = operands.b;
  p.d.data = operands.d;
  p.bias.data = operands.bias;
  p.aux.data = operands.aux;
  p.a_scale_inv.data = operands.a_scale_inv;
  p.b_scale_inv.data = operands.b_scale_inv;
  const bool scaled = is_fp8(p.a.dtype);
  if (scaled != (operands.a_scale_inv != nullptr) || scaled != (operands.b_scale_inv != nullptr)) {
    bad_argument(op, "operands", "with scales that do not match the key",
                 "scales for FP8 operands and none for others");
  }
  const te_gemm_key own = key_of(p, gemm_shape(p));
  if (std::memcmp(&own, &key, sizeof key) != 0) {
    bad_argument(op, "operands", "with alignments or tensors other than the key's", "those of the key");
  }
  PlanPointer plan;
  {
    const std::lock_guard<std::mutex> lock(mutex());
    plan = plan_chosen(op, p, choice);
  }
  if (bytes < plan->workspace_bytes) bad_argument(op, "workspace_bytes", bytes, concat(">= ", plan->workspace_bytes));
  const Descriptor descriptor(p);
  for (int32_t i = 0; i < repeats; ++i) plan->run(p, descriptor, workspace, bytes, stream);
}

int64_t library_version() { return int64_t(lt().cublasLtGetVersion()); }

}  // namespace te::gemm::cuda
