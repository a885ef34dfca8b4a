// See rows_view.h.
#include "core/rows_view.h"

#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

namespace te_torch {

namespace {

constexpr int64_t kSmall = int64_t(1) << 20;  // bytes, up to which torch's allocator splits blocks
constexpr int64_t kAlignment = 512;           // bytes, alignment of that allocator

// elements: from the tensor's first element to that of the view.
at::Tensor view_at(const at::Tensor& t, int64_t elements, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto view =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  view->set_storage_offset(t.storage_offset() + elements);
  view->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(view));
}

}  // namespace

at::Tensor rows_view(const at::Tensor& t, int64_t first, int64_t count) {
  if (t.layout() != at::kStrided) return t.narrow(0, first, count);
  TORCH_INTERNAL_ASSERT(t.dim() == 2 && first >= 0 && count >= 0 && first + count <= t.size(0));
  const int64_t sizes[] = {count, t.size(1)};
  return view_at(t, first * t.stride(0), sizes, t.strides());
}

at::Tensor matrix_view(const at::Tensor& t) {
  TORCH_INTERNAL_ASSERT(t.layout() == at::kStrided && t.dim() > 0 && t.is_contiguous());
  const int64_t cols = t.size(-1);
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
  const int64_t sizes[] = {rows, cols}, strides[] = {std::max<int64_t>(cols, 1), 1};
  return view_at(t, 0, sizes, strides);
}

at::Tensor element_view(const at::Tensor& t, int64_t index) {
  TORCH_INTERNAL_ASSERT(t.dim() == 1 && index >= 0 && index < t.size(0));
  const int64_t sizes[] = {1};
  return view_at(t, index * t.stride(0), sizes, t.strides());
}

at::Tensor row_view(const at::Tensor& t, int64_t row) {
  TORCH_INTERNAL_ASSERT(t.dim() == 2 && row >= 0 && row < t.size(0));
  return view_at(t, row * t.stride(0), t.sizes().slice(1), t.strides().slice(1));
}

at::Tensor matrix_at(const at::Tensor& stacked, int64_t index) {
  TORCH_INTERNAL_ASSERT(stacked.dim() == 3 && index >= 0 && index < stacked.size(0) && stacked.is_contiguous());
  const int64_t rows = stacked.size(1), cols = stacked.size(2);
  const int64_t sizes[] = {rows, cols}, strides[] = {std::max<int64_t>(cols, 1), 1};
  return view_at(stacked, index * rows * cols, sizes, strides);
}

std::vector<at::Tensor> matrices_of(const at::Tensor& stacked) {
  std::vector<at::Tensor> all;
  all.reserve(size_t(stacked.size(0)));
  for (int64_t i = 0; i < stacked.size(0); ++i) all.push_back(matrix_at(stacked, i));
  return all;
}

std::vector<at::Tensor> new_matrices(size_t count, int64_t rows, int64_t cols, const at::TensorOptions& options) {
  std::vector<at::Tensor> all(count);
  const auto element = int64_t(options.dtype().itemsize());
  if (count < 2 || rows * cols * element > kSmall) {
    for (at::Tensor& one : all) one = at::empty({rows, cols}, options);
    return all;
  }
  const int64_t each = (rows * cols * element + kAlignment - 1) / kAlignment * kAlignment / element;
  const at::Tensor memory = at::empty({int64_t(count), each}, options);
  const int64_t sizes[] = {rows, cols}, strides[] = {cols, 1};
  for (size_t i = 0; i < count; ++i) all[i] = view_at(memory, int64_t(i) * each, sizes, strides);
  return all;
}

}  // namespace te_torch
