// See rows_view.h.
#include "rows_view.h"

#include <c10/core/TensorImpl.h>

namespace te_torch {

namespace {

at::Tensor view_at(const at::Tensor& t, int64_t row, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto view =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(t.storage()), t.key_set(), t.dtype());
  view->set_storage_offset(t.storage_offset() + row * t.stride(0));
  view->set_sizes_and_strides(sizes, strides);
  return at::Tensor(std::move(view));
}

}  // namespace

at::Tensor rows_view(const at::Tensor& t, int64_t first, int64_t count) {
  if (t.layout() != at::kStrided) return t.narrow(0, first, count);
  TORCH_INTERNAL_ASSERT(t.dim() == 2 && first >= 0 && count >= 0 && first + count <= t.size(0));
  const int64_t sizes[] = {count, t.size(1)};
  return view_at(t, first, sizes, t.strides());
}

at::Tensor row_view(const at::Tensor& t, int64_t row) {
  TORCH_INTERNAL_ASSERT(t.dim() == 2 && row >= 0 && row < t.size(0));
  return view_at(t, row, t.sizes().slice(1), t.strides().slice(1));
}

}  // namespace te_torch
