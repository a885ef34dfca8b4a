// See gemm_list_fp8.h. Nothing is computed and no memory is read: te_gemm decides by shapes.
#include "gemm/gemm_list_fp8.h"

#include <algorithm>
#include <numeric>

#include "core/tune.h"
#include "gemm/gemm_path.h"

namespace te_torch {

namespace {

// An aligned address that is never read.
void* somewhere() { return reinterpret_cast<void*>(uintptr_t(16)); }

te_tensor dense(int64_t rows, int64_t cols, te_dtype dtype, int32_t device) {
  return {somewhere(), rows, cols, cols, dtype, device};
}

te_dtype fp8_of(const Quantizer& quantizer) { return quantizer.spec.e5m2 ? TE_FLOAT8_E5M2 : TE_FLOAT8_E4M3; }

te_dtype dtype_of(at::ScalarType dtype) {
  return dtype == at::kHalf ? TE_FLOAT16 : dtype == at::kBFloat16 ? TE_BFLOAT16 : TE_FLOAT32;
}

struct Product {
  int64_t cols, depth;
  te_dtype rows_dtype;
  te_scaling a_scaling;
};

// d [rows, cols] = b [rows, depth] a [cols, depth]^T.
te_gemm_problem problem_of(int64_t rows, const Product& product, te_dtype d, int32_t device) {
  const auto scales = [&](te_scaling scaling, int64_t outer) {
    const auto [major, minor] = te::scale_shape(scaling, outer, product.depth);
    return dense(major, minor, TE_FLOAT32, device);
  };
  te_gemm_problem p{};
  p.a = dense(product.cols, product.depth, TE_FLOAT8_E4M3, device);
  p.b = dense(rows, product.depth, product.rows_dtype, device);
  p.d = dense(rows, product.cols, d, device);
  p.bias = p.aux = absent();
  p.layout = TE_GEMM_TN;
  p.a_scaling = product.a_scaling;
  p.b_scaling = TE_SCALING_BLOCK_1D;
  p.a_scale_inv = scales(p.a_scaling, product.cols);
  p.b_scale_inv = scales(p.b_scaling, rows);
  return p;
}

std::vector<uint8_t> splits_of(const te_gemm_problem& p, bool along_depth, const std::vector<int64_t>& counts) {
  std::vector<uint8_t> splits(counts.size());
  check(te_gemm_splits(&p, along_depth ? 1 : 0, counts.data(), int32_t(counts.size()), splits.data()));
  return splits;
}
bool any(const std::vector<uint8_t>& marks) { return std::find(marks.begin(), marks.end(), 1) != marks.end(); }

int32_t device_of(const Fp8List& l) { return l.device.is_cpu() ? TE_DEVICE_CPU : int32_t(l.device.index()); }

// Whether groups are small in the results of all three GEMMs.
bool are_small(const Fp8List& l, bool readable) {
  GemmList rows{device_of(l), readable, 0, 0}, across = rows, weights = rows;
  for (const int64_t split : l.splits) {
    if (split == 0) continue;
    for (GemmList* list : {&rows, &across, &weights}) ++list->groups;
    rows.tiles += result_tiles(split, l.n);
    across.tiles += result_tiles(split, l.k);
    weights.tiles += result_tiles(l.n, l.k);
  }
  return list_refuses(rows) == nullptr && list_refuses(across) == nullptr && list_refuses(weights) == nullptr;
}

constexpr int64_t kStep = 16;  // te_gemm's: other sizes are padded to it

// Whether the grouped kernels compute all three GEMMs, read the matrices without copies, and count the rows.
bool fits(const Fp8List& l) {
  const int64_t all = std::accumulate(l.splits.begin(), l.splits.end(), int64_t(0));
  return l.quantization.backward == BackwardReads::kQuantized && (l.dtype == at::kBFloat16 || l.dtype == at::kHalf) &&
         l.n % kStep == 0 && l.k % kStep == 0 && l.n * l.k > 0 && all < INT32_MAX - 256;
}

ListGemms blocks_by_list(const Fp8List& l) {
  const ProductQuantization& q = l.quantization;
  // cuBLASLt multiplies by a weight gradient's two scales one after the other: of powers of 2 that is the same.
  const bool exact = q.x.spec.pow_2_scales && q.dy.spec.pow_2_scales;
  if (!are_small(l, exact && !tuning::looks_on())) return {};
  std::vector<int64_t> counts;
  for (const int64_t split : l.splits) counts.push_back((split + kStep - 1) / kStep * kStep);
  const int32_t device = device_of(l);
  const te_dtype out = dtype_of(l.dtype), gradient = fp8_of(q.dy);
  te_gemm_problem fprop = problem_of(kStep, {l.n, l.k, fp8_of(q.x), TE_SCALING_BLOCK_2D}, out, device);
  if (l.bias) {
    fprop.bias = dense(1, l.n, out, device);
    fprop.epilogue = TE_GEMM_BIAS;
  }
  const te_gemm_problem dgrad = problem_of(kStep, {l.k, l.n, gradient, TE_SCALING_BLOCK_2D}, out, device);
  te_gemm_problem wgrad = problem_of(l.n, {l.k, kStep, gradient, TE_SCALING_BLOCK_1D}, out, device);
  std::vector<std::pair<te_dtype, int>> results = {{out, 0}};
  if (l.main_grads) results = {{out, 0}, {TE_FLOAT32, 0}, {TE_FLOAT32, 1}};  // which, and whether to add, shows later
  for (const auto& [dtype, add] : results) {
    wgrad.d.dtype = dtype;
    wgrad.accumulate = add;
    if (any(splits_of(wgrad, true, counts))) return {};
  }
  ListGemms plan{true, true, splits_of(fprop, false, counts), splits_of(dgrad, false, counts)};
  for (std::vector<uint8_t>* each : {&plan.fprop, &plan.dgrad}) leave_groups(counts, *each);
  return plan;
}

}  // namespace

ListGemms fp8_by_list(const Fp8List& l) {
  if (!fits(l)) return {};
  const QuantizeSpec& x = l.quantization.x.spec;
  if (x.kind == QuantizeSpec::kBlock1d) return blocks_by_list(l);
  const bool scale_a_group = x.kind == QuantizeSpec::kDelayed || x.kind == QuantizeSpec::kCurrent;
  ListGemms plan;
  plan.at_once = scale_a_group && are_small(l, true);
  return plan;
}

}  // namespace te_torch
