// See grouped_operands.h.
#include "core/grouped_operands.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>

#include "core/rows_view.h"

namespace te_torch::grouped {

namespace {

constexpr int64_t kAlignment = 16;  // bytes, of addresses and of pitches

bool aligned(const Tensor& t) {
  return t.stride(1) == 1 && t.stride(0) >= t.size(1) && (t.stride(0) * t.element_size()) % kAlignment == 0 &&
         reinterpret_cast<uintptr_t>(t.data_ptr()) % kAlignment == 0 && !t.is_neg();
}

te_tensor view_of(const Tensor& t, te_dtype dtype) {
  return {t.data_ptr(), t.size(0),
          t.size(1),    std::max<int64_t>(t.stride(0), t.size(1)),
          dtype,        t.is_cpu() ? TE_DEVICE_CPU : int32_t(t.get_device())};
}

}  // namespace

void check_stacked(const char* op, const char* argument, const Tensor& stacked) {
  TORCH_CHECK_VALUE(stacked.sym_size(0) > 0, op, ": argument '", argument, "' has shape ", stacked.sym_sizes(),
                    ", wanted [groups, out_features, in_features] with at least one group.");
  TORCH_CHECK_VALUE(stacked.is_contiguous(), op, ": argument '", argument, "' has shape ", stacked.sym_sizes(),
                    " and strides ", stacked.sym_strides(),
                    ", wanted a contiguous tensor, since each group's matrix is read in place; call contiguous().");
}

void check_offsets(const Tensor& offsets, const Tensor& rows, size_t groups) {
  TORCH_CHECK_VALUE(offsets.scalar_type() == at::kInt && offsets.dim() == 1 && offsets.is_contiguous() &&
                        offsets.sym_size(0) == int64_t(groups) + 1 && offsets.device() == rows.device(),
                    kOp, ": argument 'offsets' is ", offsets.scalar_type(), " ", offsets.sym_sizes(), " of strides ",
                    offsets.sym_strides(), " on ", offsets.device(), ", wanted contiguous Int [", groups + 1, "] on ",
                    rows.device(), ".");
}

size_t groups_of(const Tensor& offsets) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.sym_size(0) > 1, kOp, ": argument 'offsets' has shape ",
                    offsets.sym_sizes(), ", wanted [groups + 1].");
  return size_t(offsets.size(0) - 1);
}

void check_targets(const Tensor& rows, const c10::SymInt& n, const c10::SymInt& k, at::TensorList outs,
                   at::ArrayRef<int64_t> modes, size_t groups) {
  size_t wanted = 0;
  for (const int64_t one : modes) {
    TORCH_CHECK_VALUE(one >= -1 && one <= 1, kOp, ": argument 'how' has ", one, ", wanted 0 (+=), 1 (=) or -1 (none).");
    wanted += one >= 0 ? 1 : 0;
  }
  TORCH_CHECK_VALUE(modes.size() == groups && outs.size() == wanted, kOp, ": arguments 'outs' and 'how' have ",
                    outs.size(), " and ", modes.size(), " entries, wanted ", wanted, " and ", groups, ".");
  const at::ScalarType dtype = rows.scalar_type();
  const bool fp8 = dtype == at::kByte;
  for (const Tensor& out : outs) {
    const at::ScalarType its = out.scalar_type();
    const bool fits = its == at::kFloat || (fp8 ? its == at::kHalf || its == at::kBFloat16 : its == dtype);
    TORCH_CHECK_VALUE(fits, kOp, ": argument 'outs' has a tensor of dtype ", its, ", wanted Float",
                      fp8                   ? ", Half or BFloat16"
                      : dtype == at::kFloat ? ""
                                            : c10::str(" or ", dtype),
                      ".");
    TORCH_CHECK_VALUE(out.dim() == 2 && out.sym_size(0) == n && out.sym_size(1) == k && out.is_contiguous() &&
                          out.device() == rows.device(),
                      kOp, ": argument 'outs' has a tensor of shape ", out.sym_sizes(), " on ", out.device(),
                      ", wanted contiguous [", n, ", ", k, "] on ", rows.device(), ".");
  }
}

const Tensor& Operands::ready(const Tensor& t, const char* argument) {
  check_memory(t, kOp, argument);
  if (aligned(t) || t.numel() == 0) return t.use_count() == 1 ? held_.emplace_back(t) : t;
  const int64_t step = kAlignment / int64_t(t.element_size());
  held_.push_back(at::empty({t.size(0), (t.size(1) + step - 1) / step * step}, t.options()).narrow(1, 0, t.size(1)));
  held_.back().copy_(t);
  if (t.is_cpu()) return held_.back();
  copied_ += held_.back().nbytes();
  if (names_.find(argument) == std::string::npos) names_ += (names_.empty() ? "" : ", ") + std::string(argument);
  return held_.back();
}

te_tensor Operands::add(const Tensor& t, const char* argument) {
  const Tensor& read = ready(t, argument);
  return view_of(read, dtype_of(read, kOp, argument));
}

te_tensor Operands::add_bytes(const Tensor& t, te_dtype dtype, const char* argument) {
  return view_of(ready(t, argument), dtype);
}

std::vector<te_tensor> Operands::add_biases(at::TensorList biases) {
  std::vector<te_tensor> views;
  for (const Tensor& bias : biases) views.push_back(view_2d(held_.emplace_back(bias.contiguous()), kOp, "bias"));
  return views;
}

void Operands::note() const {
  if (copied_ == 0) return;
  thread_local std::string why;  // read after this function has returned
  why = "copies " + std::to_string(copied_) + " bytes of " + names_ +
        ": it reads addresses and row pitches that are multiples of 16";
  te_note_path("grouped kernel on copies", why.c_str());
}

std::vector<te_tensor> views_of_results(const std::vector<Tensor>& results) {
  std::vector<te_tensor> views;
  views.reserve(results.size());
  for (const Tensor& result : results) views.push_back(result.defined() ? view_2d(result, kOp, "outs") : absent());
  return views;
}

std::vector<te_tensor> views_of_stacked(const Tensor& stacked) {
  const Tensor first = matrix_at(stacked, 0);
  std::vector<te_tensor> views(size_t(stacked.size(0)), view_2d(first, kOp, "outs"));
  const auto bytes = int64_t(first.nbytes());
  for (size_t g = 0; g < views.size() && views[g].data != nullptr; ++g) {
    views[g].data = static_cast<char*>(views[g].data) + int64_t(g) * bytes;
  }
  return views;
}

Targets::Targets(at::TensorList outs, at::ArrayRef<int64_t> modes) : results(modes.size()) {
  accumulate.reserve(modes.size());
  for (size_t g = 0, next = 0; g < modes.size(); ++g) {
    if (modes[g] >= 0) results[g] = outs[next++];
    accumulate.push_back(modes[g] == 0 ? 1 : 0);
  }
}

void check_apart(at::TensorList outs) {
  std::vector<const void*> starts;
  starts.reserve(outs.size());
  for (const Tensor& out : outs) {
    if (out.numel() > 0) starts.push_back(out.const_data_ptr());
  }
  std::sort(starts.begin(), starts.end());
  TORCH_CHECK_NOT_IMPLEMENTED(std::adjacent_find(starts.begin(), starts.end()) == starts.end(), kOp,
                              ": two groups with one main_grad and sizes on the device alone are not available "
                              "in this version; pass 'm_splits' as a list of integers.");
}

}  // namespace te_torch::grouped
