// Memory that tensors lie in: what is known of a storage as long as it lives, and tensors over one that nobody's graph
// knows. Used with the GIL held, which is the lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

namespace te_torch {

// Whether there is memory that may be moved, and told from other memory.
inline bool has_storage(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.is_meta() && !t.is_nested() && !t.is_quantized();
}

inline const c10::StorageImpl* key_of(const at::Tensor& t) { return t.storage().unsafeGetStorageImpl(); }

inline int64_t byte_offset(const at::Tensor& t) { return t.storage_offset() * int64_t(t.element_size()); }

// The tensor without its graph; versions are shared.
inline at::Tensor detached(const at::Tensor& t) {
  if (t.is_inference()) return t.detach();
  const auto* impl = t.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

// A view of a storage, as `dtype`; offset in elements.
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

// Storage -> Value. Weak: an entry ends with the memory, and no later storage can be taken for it meanwhile, as the
// address is not free before the entry is swept.
template <class Value>
class Storages {
 public:
  Value& at(const c10::Storage& storage) {
    auto* key = storage.unsafeGetStorageImpl();
    if (known_.size() >= sweep_at_) sweep();
    return known_.try_emplace(key, storage.getWeakStorageImpl(), Value{}).first->second.second;
  }
  // Of a storage that is alive; null where nothing is known of it.
  const Value* find(const c10::StorageImpl* key) const {
    const auto found = known_.find(key);
    return found == known_.end() || found->second.first.expired() ? nullptr : &found->second.second;
  }

 private:
  void sweep() {
    std::vector<Value> gone;  // freed after the walk: what frees a value may come back here
    for (auto i = known_.begin(); i != known_.end();) {
      if (!i->second.first.expired()) {
        ++i;
        continue;
      }
      gone.push_back(std::move(i->second.second));
      i = known_.erase(i);
    }
    sweep_at_ = std::max<size_t>(64, 2 * known_.size());
  }

  std::unordered_map<const c10::StorageImpl*, std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, Value>> known_;
  size_t sweep_at_ = 64;
};

}  // namespace te_torch
