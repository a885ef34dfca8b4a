// See own_storage.h.
#include <ATen/EmptyTensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "core/own_storage.h"

namespace te_torch {

namespace {

// A storage that is a part of `base`, from `begin` on. It keeps `base` alive.
struct Part {
  c10::Storage base;
  size_t begin;
};

using Key = std::tuple<const c10::StorageImpl*, size_t, size_t>;  // base, begin, bytes

// Parts by position, so that two names of one parameter get one storage, which torch.save writes once.
struct Parts {
  struct Entry {
    const Part* part;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  std::mutex mutex;
  std::map<Key, Entry> entries;
};

Parts& parts() {
  static auto* all = new Parts;  // never destroyed, as storages are freed while the process ends
  return *all;
}

void release(void* context) {
  const std::unique_ptr<Part> part(static_cast<Part*>(context));
  const std::lock_guard lock(parts().mutex);
  auto& entries = parts().entries;
  const auto first = entries.lower_bound({part->base.unsafeGetStorageImpl(), part->begin, 0});
  for (auto it = first; it != entries.end() && std::get<0>(it->first) == part->base.unsafeGetStorageImpl(); ++it) {
    if (it->second.part != part.get()) continue;
    entries.erase(it);
    break;
  }
}

const Part* part_of(const c10::Storage& storage) {
  const at::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == release ? static_cast<const Part*>(data.get_context()) : nullptr;
}

c10::Storage make_part(const c10::Storage& base, size_t begin, size_t bytes) {
  const std::lock_guard lock(parts().mutex);
  Parts::Entry* entry = nullptr;
  const Key key{base.unsafeGetStorageImpl(), begin, bytes};
  if (const auto found = parts().entries.find(key); found != parts().entries.end()) {
    if (auto living = found->second.storage.lock()) return c10::Storage(std::move(living));
    entry = &found->second;  // the last one is being freed by another thread
  }
  auto part = std::make_unique<Part>(Part{base, begin});
  const Part* const named = part.get();
  char* const memory = static_cast<char*>(base.unsafeGetStorageImpl()->mutable_data()) + begin;
  at::DataPtr data(memory, part.release(), release, base.device());
  c10::Storage result(c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr,
                      /*resizable=*/false);
  Parts::Entry fresh{named, result.getWeakStorageImpl()};
  if (entry != nullptr) {
    *entry = std::move(fresh);
  } else {
    parts().entries.emplace(key, std::move(fresh));
  }
  return result;
}

Tensor on(const c10::Storage& storage, int64_t offset, const Tensor& like) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), like.key_set(), like.dtype());
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  Tensor result(std::move(impl));
  if (!like.is_inference()) {
    torch::autograd::impl::set_version_counter(result, torch::autograd::impl::version_counter(like));
  }
  return result;
}

}  // namespace

Tensor own_storage(const Tensor& t) {
  if (!t.has_storage() || t.layout() != at::kStrided || t.numel() == 0 || t.requires_grad()) return t;
  const c10::Storage& base = t.storage();
  const size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  const size_t begin = size_t(t.storage_offset()) * t.itemsize();
  if (bytes == base.nbytes() || begin + bytes > base.nbytes() || base.data() == nullptr) return t;
  return on(make_part(base, begin, bytes), 0, t);
}

Tensor whole_storage(const Tensor& t) {
  if (!t.has_storage() || t.layout() != at::kStrided) return t;
  const Part* const part = part_of(t.storage());
  if (part == nullptr || part->begin % t.itemsize() != 0) return t;
  return on(part->base, int64_t(part->begin / t.itemsize()) + t.storage_offset(), t);
}

void register_own_storage(pybind11::module_& m) {
  m.def("own_storage", &own_storage);
  m.def("whole_storage", &whole_storage);
}

}  // namespace te_torch
