// Storages: a map of values by storage, and tensors over a storage that belong to no graph. The GIL is the lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace te_torch {

// Whether the tensor has memory that can be moved and identified.
inline bool has_storage(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.is_meta() && !t.is_nested() && !t.is_quantized();
}

inline const c10::StorageImpl* key_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

inline int64_t byte_offset(const at::Tensor& t) { return t.storage_offset() * int64_t(t.element_size()); }

// The tensor without its graph; the version counter is shared.
inline at::Tensor detached(const at::Tensor& t) {
  if (t.is_inference()) return t.detach();
  const auto* impl = t.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

// A view of a storage as `dtype`. offset: in elements.
inline at::Tensor tensor_over(const c10::Storage& storage, at::ScalarType dtype, int64_t offset, at::IntArrayRef sizes,
                              at::IntArrayRef strides) {
  const auto key = at::TensorOptions().dtype(dtype).device(storage.device()).computeDispatchKey();
  at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                          c10::scalarTypeToTypeMeta(dtype));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return t;
}

inline at::Tensor bytes_over(const c10::Storage& storage, int64_t offset, int64_t count) {
  return tensor_over(storage, at::kByte, offset, {count}, {1});
}

// Storage -> Value, with weak references: an entry expires with the memory. The address of an expired storage is not
// reused before its entry is swept, so that entries of other storages cannot be confused.
template <class Value>
class Storages {
 public:
  Value& at(const c10::Storage& storage) {
    auto* key = storage.unsafeGetStorageImpl();
    if (known_.size() >= sweep_at_) sweep();
    return known_.try_emplace(key, storage.getWeakStorageImpl(), Value{}).first->second.second;
  }
  // The value of a storage that is alive, or null.
  const Value* find(const c10::StorageImpl* key) const {
    const auto found = known_.find(key);
    return found == known_.end() || found->second.first.expired() ? nullptr : &found->second.second;
  }

 private:
  void sweep() {
    std::vector<Value> expired;  // destroyed after the loop, as destructors may call back into this map
    for (auto i = known_.begin(); i != known_.end();) {
      if (!i->second.first.expired()) {
        ++i;
        continue;
      }
      expired.push_back(std::move(i->second.second));
      i = known_.erase(i);
    }
    sweep_at_ = std::max<size_t>(64, 2 * known_.size());
  }

  std::unordered_map<const c10::StorageImpl*, std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, Value>> known_;
  size_t sweep_at_ = 64;
};

}  // namespace te_torch
