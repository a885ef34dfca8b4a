// See gemm_list.h.
#include "gemm_list.h"

#include "gemm.h"

namespace te_torch {

namespace {

// Matrices whose memory is what they say, row behind row.
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

// As view_2d() of these rows alone.
te_tensor piece(const te_tensor& whole, int64_t element_bytes, const Rows& rows) {
  te_tensor part = whole;
  part.rows = rows.count;
  part.row_pitch = rows.count > 1 ? whole.row_pitch : whole.cols;
  part.data = rows.count == 0 ? nullptr : static_cast<char*>(whole.data) + rows.first * whole.row_pitch * element_bytes;
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

}  // namespace

bool rows_by_list(const Tensor& rows, at::ArrayRef<const Tensor*> weights, bool across, at::TensorList biases,
                  at::ArrayRef<Rows> groups, const Tensor& d) {
  // A recording wants each product by its name.
  if (probe::active() || !is_float(rows) || !has_rows(rows, rows) || !is_dense(d, rows)) return false;
  const int64_t cols = d.size(1), depth = rows.size(1), bytes = int64_t(rows.element_size());
  const te_gemm_epilogue epilogue = biases.empty() ? TE_GEMM_NONE : TE_GEMM_BIAS;
  const GemmPath path =
      gemm_path({rows.is_cpu(), rows.scalar_type(), rows.scalar_type(), false, epilogue, rows.scalar_type()});
  if (!is_ours(path)) return false;
  for (const Tensor* weight : weights) {
    if (!is_dense(*weight, rows) || weight->size(0) != (across ? depth : cols) ||
        weight->size(1) != (across ? cols : depth)) {
      return false;
    }
  }
  for (const Tensor& bias : biases) {
    if (bias.dim() != 1 || bias.size(0) != cols || bias.scalar_type() != rows.scalar_type() ||
        bias.device() != rows.device() || !bias.is_contiguous() || bias.is_neg() || bias.storage().nbytes() == 0) {
      return false;
    }
  }
  const te_tensor x = view_2d(rows, "gemm", "b"), all = view_2d(d, "gemm", "d");
  for (const Rows& group : groups) {  // gemm_into() has others brought in from where they are aligned
    const void* at = piece(all, bytes, group).data;
    if (reinterpret_cast<uintptr_t>(at) % 16 != 0) return false;
  }
  te_gemm_problem p = problem_of(across ? TE_GEMM_NN : TE_GEMM_TN, epilogue);
  p.a = view_2d(*weights[0], "gemm", "a");
  if (!biases.empty()) p.bias = view_2d(biases[0], "gemm", "bias");
  const OneWorkspace for_all;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (groups[g].count == 0) continue;
    p.a.data = weights[g]->data_ptr();
    p.b = piece(x, bytes, groups[g]);
    p.d = piece(all, bytes, groups[g]);
    if (!biases.empty()) p.bias.data = biases[g].data_ptr();
    run_gemm(path, p, rows);
  }
  return true;
}

bool weights_by_list(const Tensor& dy, const Tensor& x, at::ArrayRef<Rows> groups, at::ArrayRef<Tensor> outs,
                     const std::vector<bool>& add, at::ArrayRef<Tensor> sums) {
  if (probe::active() || !is_float(x) || !has_rows(x, x) || !has_rows(dy, x) || dy.size(0) != x.size(0)) return false;
  const int64_t n = dy.size(1), k = x.size(1), bytes = int64_t(x.element_size());
  const te_gemm_epilogue epilogue = sums.empty() ? TE_GEMM_NONE : TE_GEMM_BGRAD;
  GemmPath path{};
  at::ScalarType asked = at::ScalarType::Undefined;
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
    if (out.scalar_type() == asked) continue;
    asked = out.scalar_type();
    path = gemm_path({x.is_cpu(), x.scalar_type(), asked, false, epilogue, at::kFloat, add[g]});
    if (!is_ours(path)) return false;
  }
  const te_tensor a = view_2d(x, "gemm", "a"), b = view_2d(dy, "gemm", "b");
  te_gemm_problem p = problem_of(TE_GEMM_NT, epilogue);
  const OneWorkspace for_all;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!outs[g].defined()) continue;
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
