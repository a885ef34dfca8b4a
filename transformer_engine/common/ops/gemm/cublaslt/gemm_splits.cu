// te_gemm_splits, CUDA path: what plans say of lists of counts, in a table for each kind of product. It chooses nothing
// (gemm_plan.cu does) and forgets all as soon as somebody chose.
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "ops/gemm/cublaslt/cublaslt.h"

namespace te::gemm::cuda {

namespace {

constexpr int64_t kMostKept = int64_t(1) << 20;  // counts above are asked for each time: a table is as long as its last

enum : uint8_t { kUnknown, kWhole, kSplit };

void be_dense(te_tensor& t, int64_t rows, int64_t cols) {
  t.rows = rows;
  t.cols = t.row_pitch = cols;
}

void fit_scales(te_tensor& scales, te_scaling scaling, int64_t outer, int64_t depth) {
  if (scales.data == nullptr) return;
  const Extent e = scales_of(scaling, outer, depth);
  be_dense(scales, e.rows, e.cols);
}

te_gemm_problem with_count(te_gemm_problem p, bool along_depth, int64_t count) {
  Sizes s = sizes_of(p);
  (along_depth ? s.depth : s.rows) = count;
  const bool a_along = p.layout == TE_GEMM_TN, b_along = p.layout != TE_GEMM_NT;
  be_dense(p.a, a_along ? s.cols : s.depth, a_along ? s.depth : s.cols);
  be_dense(p.b, b_along ? s.rows : s.depth, b_along ? s.depth : s.rows);
  be_dense(p.d, s.rows, s.cols);
  fit_scales(p.a_scale_inv, p.a_scaling, s.cols, s.depth);
  fit_scales(p.b_scale_inv, p.b_scaling, s.rows, s.depth);
  return p;
}

uint8_t ask(const te_gemm_problem& problem, bool along_depth, int64_t count) {
  const te_gemm_problem p = with_count(problem, along_depth, count);
  try {
    const Sizes s = check_problem(p);
    return is_empty(s) || !splits(plan_of(p, s, SIZE_MAX)) ? kWhole : kSplit;
  } catch (const Error& error) {
    if (error.status() == TE_RUNTIME_ERROR) throw;
    return kSplit;  // te_gemm says what is wrong with it, where somebody wants it
  }
}

// A product without its count.
struct Kind {
  std::array<char, sizeof(te_gemm_key)> key;
  bool along_depth;

  Kind(const te_gemm_problem& problem, bool depth) : along_depth(depth) {
    const te_gemm_problem p = with_count(problem, depth, 16);
    const te_gemm_key of_16 = key_of(p, sizes_of(p));
    std::memcpy(key.data(), &of_16, sizeof of_16);
  }
  bool operator<(const Kind& o) const { return std::tie(key, along_depth) < std::tie(o.key, o.along_depth); }
};

}  // namespace

void splits_of(const te_gemm_problem& problem, bool along_depth, const int64_t* counts, int32_t number,
               uint8_t* splits) {
  static auto* const mutex = new std::mutex;
  static auto* const tables = new std::map<Kind, std::vector<uint8_t>>;
  static uint64_t of_choice = 0;
  const Kind kind(problem, along_depth);
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
      splits[i] = ask(problem, along_depth, count) == kSplit;
      continue;
    }
    if (size_t(count) >= table.size()) table.resize(size_t(count) + 1, kUnknown);
    if (table[size_t(count)] == kUnknown) table[size_t(count)] = ask(problem, along_depth, count);
    splits[i] = table[size_t(count)] == kSplit;
  }
}

}  // namespace te::gemm::cuda
