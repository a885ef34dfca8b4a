// See gemm_list.h.
#include "gemm/gemm_list.h"

#include <algorithm>

#include "core/tune.h"
#include "gemm/gemm.h"
#include "gemm/grouped_gemm.h"

namespace te_torch {

namespace {

// Whether the matrix is strided, in memory of its own dtype and device, and not empty.
bool is_plain(const Tensor& t, const Tensor& like) {
  return t.dim() == 2 && t.layout() == at::kStrided && t.scalar_type() == like.scalar_type() &&
         t.device() == like.device() && !t.is_neg() && t.numel() > 0 && t.storage().nbytes() != 0;
}
bool is_dense(const Tensor& t, const Tensor& like) { return is_plain(t, like) && t.is_contiguous(); }
bool has_rows(const Tensor& t, const Tensor& like) {
  return is_plain(t, like) && (t.size(1) == 1 || t.stride(1) == 1) && (t.size(0) == 1 || t.stride(0) >= t.size(1));
}

bool is_float(const Tensor& t) {
  return t.scalar_type() == at::kFloat || t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

// As the grouped kernels read a matrix, and as te_gemm's algorithm of any group's rows is the same wherever they lie.
bool on_16_bytes(const Tensor& t) {
  return t.is_contiguous() && t.size(1) * t.element_size() % 16 == 0 &&
         reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// As view_2d() of these rows alone.
te_tensor piece(const te_tensor& matrix, int64_t element_bytes, const Rows& rows) {
  te_tensor part = matrix;
  part.rows = rows.count;
  part.row_pitch = rows.count > 1 ? matrix.row_pitch : matrix.cols;
  part.data =
      rows.count == 0 ? nullptr : static_cast<char*>(matrix.data) + rows.first * matrix.row_pitch * element_bytes;
  return part;
}

te_gemm_problem problem_of(te_gemm_layout layout, te_gemm_epilogue epilogue) {
  te_gemm_problem p{};
  p.bias = p.aux = absent();
  p.layout = layout;
  p.epilogue = epilogue;
  return p;
}

bool is_ours(const GemmPath& path) {
  return (path.by == GemmBy::kCublasLt || path.by == GemmBy::kCpuLoop) && !path.apart;
}

bool one_gpu_reads(const Tensor& t) {
  return t.size(0) < INT32_MAX - 256 && t.scalar_type() != at::kFloat && on_16_bytes(t) && !tuning::looks_on();
}

std::vector<int64_t> counts_of(at::ArrayRef<Rows> groups) {
  std::vector<int64_t> counts;
  counts.reserve(groups.size());
  for (const Rows& group : groups) counts.push_back(group.count);
  return counts;
}

// How the groups of a list are computed: one grouped kernel computes all but those that `each` marks; te_gemm computes
// these after it, since it sums their elements in parts. te_gemm computes all if those are most, or if list_refuses().
struct ListGemmSplit {
  bool grouped = false;
  const char* why;  // not grouped
  std::vector<uint8_t> each;

  // like: the product of any group.
  ListGemmSplit(const GemmList& list, const te_gemm_problem& like, bool along_depth, const std::vector<int64_t>& counts)
      : why(list_refuses(list)) {
    if (why != nullptr) return;
    why = "cuBLASLt adds most of the groups' products up in parts, which rounds otherwise";
    each.resize(counts.size());
    check(te_gemm_splits(&like, along_depth ? 1 : 0, counts.data(), int32_t(counts.size()), each.data()));
    leave_groups(counts, each);
    grouped = 2 * std::count(each.begin(), each.end(), 1) <= list.groups;
  }
  bool leaves(size_t g) const { return !grouped || each[g] != 0; }
};

}  // namespace

bool rows_by_list(const Tensor& rows, at::ArrayRef<const Tensor*> weights, bool across, at::TensorList biases,
                  at::ArrayRef<Rows> groups, const Tensor& d, const char*& why) {
  if (!is_float(rows) || !has_rows(rows, rows) || !is_dense(d, rows)) return false;
  const int64_t cols = d.size(1), depth = rows.size(1), bytes = int64_t(rows.element_size());
  const te_gemm_epilogue epilogue = biases.empty() ? TE_GEMM_NONE : TE_GEMM_BIAS;
  bool readable = one_gpu_reads(rows) && on_16_bytes(d);
  for (const Tensor* weight : weights) {
    if (!is_dense(*weight, rows) || weight->size(0) != (across ? depth : cols) ||
        weight->size(1) != (across ? cols : depth)) {
      return false;
    }
    readable = readable && on_16_bytes(*weight);
  }
  for (const Tensor& bias : biases) {
    if (bias.dim() != 1 || bias.size(0) != cols || bias.scalar_type() != rows.scalar_type() ||
        bias.device() != rows.device() || !bias.is_contiguous() || bias.is_neg() || bias.storage().nbytes() == 0) {
      return false;
    }
  }
  const te_tensor x = view_2d(rows, "gemm", "b"), all = view_2d(d, "gemm", "d");
  te_gemm_problem p = problem_of(across ? TE_GEMM_NN : TE_GEMM_TN, epilogue);
  p.a = view_2d(*weights[0], "gemm", "a");
  p.b = x;
  p.d = all;
  if (!biases.empty()) p.bias = view_2d(biases[0], "gemm", "bias");
  const std::vector<int64_t> counts = counts_of(groups);
  GemmList list{all.device, readable, 0, 0};
  for (const int64_t count : counts) {
    list.groups += count > 0;
    list.tiles += result_tiles(count, cols);
  }
  const ListGemmSplit plan(list, p, false, counts);
  const GemmPath path =
      gemm_path({rows.is_cpu(), rows.scalar_type(), rows.scalar_type(), false, epilogue, rows.scalar_type()});
  // A recording names each product.
  if (!plan.grouped && (probe::active() || !is_ours(path))) {
    why = plan.why;
    return false;
  }
  if (plan.grouped) {
    const probe::PathReason because(kListAtOnce);
    const Tensor offsets = grouped_offsets_of(counts, rows);
    std::vector<Tensor> matrices;
    matrices.reserve(weights.size());
    for (const Tensor* weight : weights) matrices.push_back(*weight);
    const at::TensorList of_all(matrices);
    Direct::call<grouped_rows>(across ? "te::grouped_dgrad" : "te::grouped_fprop",
                               across ? TE_GROUPED_DGRAD : TE_GROUPED_FPROP, rows, of_all, biases, offsets, d);
  } else {
    for (const Rows& group : groups) {  // gemm_into() has others brought in from where they are aligned
      const void* at = piece(all, bytes, group).data;
      if (reinterpret_cast<uintptr_t>(at) % 16 != 0) return false;
    }
  }
  const OneWorkspace for_all;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].count == 0 || !plan.leaves(g)) continue;
    p.a.data = weights[g]->data_ptr();
    p.b = piece(x, bytes, groups[g]);
    p.d = piece(all, bytes, groups[g]);
    if (!biases.empty()) p.bias.data = biases[g].data_ptr();
    run_gemm(path, p, rows);
  }
  return true;
}

namespace {

// The weight gradients of a list that are wanted.
struct ListTargets {
  std::vector<int64_t> counts;  // of each group; 0 where none is wanted
  std::vector<Tensor> outs;
  GemmList list{};
  bool add = false;

  ListTargets(const Tensor& dy, const Tensor& x, at::ArrayRef<Rows> groups, at::ArrayRef<Tensor> all,
              const std::vector<bool>& adds) {
    list = {view_2d(x, "gemm", "a").device, one_gpu_reads(x) && one_gpu_reads(dy), 0, 0};
    std::vector<const void*> starts;
    for (size_t g = 0; g < groups.size(); ++g) {
      const Tensor& out = all[g];
      counts.push_back(out.defined() ? groups[g].count : 0);
      if (!out.defined()) continue;
      if (outs.empty()) add = adds[g];
      outs.push_back(out);
      starts.push_back(out.const_data_ptr());
      list.readable = list.readable && on_16_bytes(out) && out.scalar_type() == outs[0].scalar_type() && adds[g] == add;
      // cuBLASLt rounds a product before it adds it to 16 bits.
      list.readable = list.readable && (!add || out.scalar_type() == at::kFloat);
      list.groups += groups[g].count > 0;
      list.tiles += groups[g].count > 0 ? result_tiles(out.size(0), out.size(1)) : 0;
    }
    std::sort(starts.begin(), starts.end());  // two groups with one buffer run one after the other
    list.readable = list.readable && std::adjacent_find(starts.begin(), starts.end()) == starts.end();
  }
};

}  // namespace

bool weights_by_list(const Tensor& dy, const Tensor& x, at::ArrayRef<Rows> groups, at::ArrayRef<Tensor> outs,
                     const std::vector<bool>& add, at::ArrayRef<Tensor> sums, const char*& why) {
  if (!is_float(x) || !has_rows(x, x) || !has_rows(dy, x) || dy.size(0) != x.size(0)) return false;
  const int64_t n = dy.size(1), k = x.size(1), bytes = int64_t(x.element_size());
  const te_gemm_epilogue epilogue = sums.empty() ? TE_GEMM_NONE : TE_GEMM_BGRAD;
  GemmPath path{};
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool ours = true;
  for (size_t g = 0; g < groups.size(); ++g) {
    const Tensor& out = outs[g];
    if (!out.defined()) {
      if (!sums.empty()) return false;
      continue;
    }
    const bool fits = out.dim() == 2 && out.size(0) == n && out.size(1) == k && out.is_contiguous() &&
                      out.device() == x.device() && !out.is_neg() && out.storage().nbytes() != 0;
    const bool wide = out.scalar_type() == at::kFloat;
    if (!fits || !(wide || out.scalar_type() == x.scalar_type()) || (!sums.empty() && groups[g].count == 0)) {
      return false;
    }
    if (out.scalar_type() == dtype) continue;
    dtype = out.scalar_type();
    path = gemm_path({x.is_cpu(), x.scalar_type(), dtype, false, epilogue, at::kFloat, add[g]});
    ours = ours && is_ours(path);
  }
  const te_tensor a = view_2d(x, "gemm", "a"), b = view_2d(dy, "gemm", "b");
  te_gemm_problem p = problem_of(TE_GEMM_NT, epilogue);
  const ListTargets wanted(dy, x, groups, outs, add);
  p.a = a;
  p.b = b;
  p.accumulate = wanted.add ? 1 : 0;
  if (!wanted.outs.empty()) p.d = view_2d(wanted.outs[0], "gemm", "out");
  GemmList list = wanted.list;
  list.readable = list.readable && sums.empty();  // only te_gemm's epilogue computes sums
  const ListGemmSplit plan(list, p, true, wanted.counts);
  if (!plan.grouped && (probe::active() || !ours)) {
    why = plan.why;
    return false;
  }
  if (plan.grouped) {
    const probe::PathReason because(kListAtOnce);
    std::vector<int64_t> modes;
    std::vector<Tensor> results;
    for (size_t g = 0; g < groups.size(); ++g) {
      const bool grouped = outs[g].defined() && !plan.leaves(g);
      modes.push_back(!grouped ? -1 : wanted.add ? 0 : 1);
      if (grouped) results.push_back(outs[g]);
    }
    Direct::call<grouped_wgrad_accumulate>("te::grouped_wgrad_accumulate", dy, x,
                                           grouped_offsets_of(counts_of(groups), x), at::TensorList(results),
                                           at::ArrayRef<int64_t>(modes));
  }
  const OneWorkspace for_all;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!outs[g].defined() || !plan.leaves(g)) continue;
    p.a = piece(a, bytes, groups[g]);
    p.b = piece(b, bytes, groups[g]);
    p.d = view_2d(outs[g], "gemm", "out");
    if (!sums.empty()) p.bias = view_2d(sums[g], "gemm", "bias");
    p.accumulate = add[g] ? 1 : 0;
    run_gemm(path, p, x);
  }
  return true;
}

}  // namespace te_torch
