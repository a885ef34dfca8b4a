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

// Of a storage that is a part of another one: that one, which stays as long as the part, and where the part begins.
struct Part {
  c10::Storage whole;
  size_t begin;
};

using Key = std::tuple<const c10::StorageImpl*, size_t, size_t>;  // whole, begin, bytes

// Parts by where they are, so that two names of one parameter get one storage, which torch.save writes once.
struct Parts {
  struct Entry {
    const Part* part;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  };
  std::mutex mutex;
  std::map<Key, Entry> entries;
};

Parts& parts() {
  static auto* all = new Parts;  // never destroyed: storages are freed while the process ends
  return *all;
}

void release(void* context) {
  const std::unique_ptr<Part> part(static_cast<Part*>(context));
  const std::lock_guard lock(parts().mutex);
  auto& entries = parts().entries;
  const auto first = entries.lower_bound({part->whole.unsafeGetStorageImpl(), part->begin, 0});
  for (auto it = first; it != entries.end() && std::get<0>(it->first) == part->whole.unsafeGetStorageImpl(); ++it) {
    if (it->second.part != part.get()) continue;
    entries.erase(it);
    break;
  }
}

const Part* part_of(const c10::Storage& storage) {
  const at::DataPtr& data = storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  return data.get_deleter() == release ? static_cast<const Part*>(data.get_context()) : nullptr;
}

c10::Storage make_part(const c10::Storage& whole, size_t begin, size_t bytes) {
  const std::lock_guard lock(parts().mutex);
  Parts::Entry* entry = nullptr;
  const Key key{whole.unsafeGetStorageImpl(), begin, bytes};
  if (const auto found = parts().entries.find(key); found != parts().entries.end()) {
    if (auto living = found->second.storage.lock()) return c10::Storage(std::move(living));
    entry = &found->second;  // the last one is being freed by another thread
  }
  auto part = std::make_unique<Part>(Part{whole, begin});
  const Part* const named = part.get();
  char* const memory = static_cast<char*>(whole.unsafeGetStorageImpl()->mutable_data()) + begin;
  at::DataPtr data(memory, part.release(), release, whole.device());
  c10::Storage made(c10::Storage::use_byte_size_t(), bytes, std::move(data), /*allocator=*/nullptr,
                    /*resizable=*/false);
  Parts::Entry fresh{named, made.getWeakStorageImpl()};
  if (entry != nullptr) {
    *entry = std::move(fresh);
  } else {
    parts().entries.emplace(key, std::move(fresh));
  }
  return made;
}

Tensor on(const c10::Storage& storage, int64_t offset, const Tensor& like) {
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), like.key_set(), like.dtype());
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  Tensor made(std::move(impl));
  if (!like.is_inference()) {
    torch::autograd::impl::set_version_counter(made, torch::autograd::impl::version_counter(like));
  }
  return made;
}

}  // namespace

Tensor own_storage(const Tensor& t) {
  if (!t.has_storage() || t.layout() != at::kStrided || t.numel() == 0 || t.requires_grad()) return t;
  const c10::Storage& whole = t.storage();
  const size_t bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  const size_t begin = size_t(t.storage_offset()) * t.itemsize();
  if (bytes == whole.nbytes() || begin + bytes > whole.nbytes() || whole.data() == nullptr) return t;
  return on(make_part(whole, begin, bytes), 0, t);
}

Tensor whole_storage(const Tensor& t) {
  if (!t.has_storage() || t.layout() != at::kStrided) return t;
  const Part* const part = part_of(t.storage());
  if (part == nullptr || part->begin % t.itemsize() != 0) return t;
  return on(part->whole, int64_t(part->begin / t.itemsize()) + t.storage_offset(), t);
}

void register_own_storage(pybind11::module_& m) {
  m.def("own_storage", &own_storage);
  m.def("whole_storage", &whole_storage);
}

}  // namespace te_torch
