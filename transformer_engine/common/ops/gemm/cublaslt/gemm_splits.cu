// te_gemm_splits, CUDA path: caches by count whether a product's plan splits the reduction. The cache is cleared when
// te_gemm_choose changes a plan.
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "ops/gemm/cublaslt/cublaslt.h"

namespace te::gemm::cuda {

namespace {

constexpr int64_t kMostKept =
    int64_t(1) << 20;  // larger counts are not cached, since a table is as long as its largest

enum : uint8_t { kUnknown, kWhole, kSplit };

void be_dense(te_tensor& t, int64_t rows, int64_t columns) {
  t.rows = rows;
  t.cols = t.row_pitch = columns;
}

void fit_scales(te_tensor& scales, te_scaling scaling, int64_t outer, int64_t k) {
  if (scales.data == nullptr) return;
  const ScaleShape e = scales_of(scaling, outer, k);
  be_dense(scales, e.rows, e.columns);
}

te_gemm_problem with_count(te_gemm_problem p, bool along_k, int64_t count) {
  GemmShape s = gemm_shape(p);
  (along_k ? s.k : s.m) = count;
  const bool a_k_major = p.layout == TE_GEMM_TN, b_k_major = p.layout != TE_GEMM_NT;
  be_dense(p.a, a_k_major ? s.n : s.k, a_k_major ? s.k : s.n);
  be_dense(p.b, b_k_major ? s.m : s.k, b_k_major ? s.k : s.m);
  be_dense(p.d, s.m, s.n);
  fit_scales(p.a_scale_inv, p.a_scaling, s.n, s.k);
  fit_scales(p.b_scale_inv, p.b_scaling, s.m, s.k);
  return p;
}

uint8_t splits_one(const te_gemm_problem& problem, bool along_k, int64_t count) {
  const te_gemm_problem p = with_count(problem, along_k, count);
  try {
    const GemmShape s = check_problem(p);
    return is_empty(s) || !splits(plan_of(p, s, SIZE_MAX)) ? kWhole : kSplit;
  } catch (const Error& error) {
    if (error.status() == TE_RUNTIME_ERROR) throw;
    return kSplit;  // te_gemm reports the error if the product is computed
  }
}

// The key of a product without its count.
struct Kind {
  std::array<char, sizeof(te_gemm_key)> key;
  bool along_k;

  Kind(const te_gemm_problem& problem, bool along) : along_k(along) {
    const te_gemm_problem p = with_count(problem, along_k, 16);
    const te_gemm_key of_16 = key_of(p, gemm_shape(p));
    std::memcpy(key.data(), &of_16, sizeof of_16);
  }
  bool operator<(const Kind& o) const { return std::tie(key, along_k) < std::tie(o.key, o.along_k); }
};

}  // namespace

void splits_of(const te_gemm_problem& problem, bool along_k, const int64_t* counts, int32_t number, uint8_t* splits) {
  static auto* const mutex = new std::mutex;
  static auto* const tables = new std::map<Kind, std::vector<uint8_t>>;
  static uint64_t of_choice = 0;
  const Kind kind(problem, along_k);
  const std::lock_guard<std::mutex> lock(*mutex);
  if (const uint64_t now = choice_count(); now != of_choice) {
    tables->clear();
    of_choice = now;
  }
  std::vector<uint8_t>& table = (*tables)[kind];
  for (int32_t i = 0; i < number; ++i) {
    const int64_t count = counts[i];
    if (count == 0) continue;
    if (count > kMostKept) {
      splits[i] = splits_one(problem, along_k, count) == kSplit;
      continue;
    }
    if (size_t(count) >= table.size()) table.resize(size_t(count) + 1, kUnknown);
    if (table[size_t(count)] == kUnknown) table[size_t(count)] = splits_one(problem, along_k, count);
    splits[i] = table[size_t(count)] == kSplit;
  }
}

}  // namespace te::gemm::cuda
