// See comm_buffer_pool.h.
// - The key of a slot is group, device, stream and kind. Calls of one stream run in order, so that no event is needed.
// - take() returns the first free slot of a key.
// - During a capture, buffers are allocated from the graph's memory pool and are not reused: replays write to them
//   later.
#include "core/comm_buffer_pool.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/utils/pybind.h>
#include <transformer_engine/comm.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "core/common.h"

namespace te_torch {

// pooled: in use. lasting: belongs to the pool, which keeps it until release_unused().
struct Slot {
  c10::Storage memory;
  bool pooled = false, lasting = true;
};

namespace {

constexpr int kPoison = 0xff;  // NaN in every float dtype, FP8 included
std::atomic<bool> poison{false};

struct Key {
  std::string group;
  at::Device device;
  te_stream stream;
  SlotKind kind;
  bool operator==(const Key& o) const {
    return kind == o.kind && stream == o.stream && device == o.device && group == o.group;
  }
};

// The deleter marks a slot's storage, which all views share.
void delete_backing(void* backing) { delete static_cast<Tensor*>(backing); }

c10::Storage new_memory(int64_t bytes, const at::TensorOptions& options) {
  return pooled_storage(at::empty({bytes}, options.dtype(at::kByte).layout(at::kStrided)));
}

bool group_exists(const std::string& group) {
  try {
    return c10d::resolve_process_group(group) != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

class CommBufferPool {
 public:
  std::shared_ptr<Slot> take(Key key, int64_t bytes, const at::TensorOptions& options) {
    std::shared_ptr<Slot> found;
    c10::Storage memory;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      std::vector<std::shared_ptr<Slot>>& slots = slots_of(std::move(key));
      for (const auto& slot : slots) {
        if (slot->pooled) continue;
        found = slot;
        break;
      }
      if (found == nullptr) found = slots.emplace_back(std::make_shared<Slot>());
      found->pooled = true;
      memory = std::move(found->memory);
    }
    // Allocates without the lock: the slot is in use, so that no other thread touches it.
    try {
      // A view of an earlier call that is still alive keeps the old memory.
      const bool shared = memory && memory.use_count() > 1;
      const int64_t before = memory ? int64_t(memory.nbytes()) : 0;
      if (shared || !memory || before < bytes) {
        memory = {};  // freed first, to allocate less at once
        memory = new_memory(std::max(bytes, before), options);
      }
    } catch (...) {
      give_back(*found, false);
      throw;
    }
    const std::lock_guard<std::mutex> guard(mutex_);
    found->memory = std::move(memory);
    return found;
  }

  void give_back(Slot& slot, bool sound) {
    const std::lock_guard<std::mutex> guard(mutex_);
    slot.pooled = false;
    if (!sound) slot.memory = {};
  }

  // Frees slots that are not in use.
  void release_unused() {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [key, slots] : kinds_) {
      std::erase_if(slots, [](const auto& slot) { return !slot->pooled; });
    }
  }

  struct Usage {
    int64_t bytes = 0, slots = 0, pooled = 0;
  };

  // Of one group, or of all for an empty name.
  Usage usage(const std::string& group) {
    const std::lock_guard<std::mutex> guard(mutex_);
    Usage total;
    for (const auto& [key, slots] : kinds_) {
      if (!group.empty() && key.group != group) continue;
      for (const auto& slot : slots) {
        total.bytes += slot->memory ? int64_t(slot->memory.nbytes()) : 0;
        ++total.slots;
        total.pooled += slot->pooled;
      }
    }
    return total;
  }

 private:
  std::vector<std::shared_ptr<Slot>>& slots_of(Key key) {
    for (auto& [known, slots] : kinds_) {
      if (known == key) return slots;
    }
    // A new key: frees the slots of groups that no longer exist.
    std::erase_if(kinds_, [](const auto& entry) {
      for (const auto& slot : entry.second) {
        if (slot->pooled) return false;
      }
      return !group_exists(entry.first.group);
    });
    return kinds_.emplace_back(std::move(key), std::vector<std::shared_ptr<Slot>>()).second;
  }

  std::mutex mutex_;
  std::vector<std::pair<Key, std::vector<std::shared_ptr<Slot>>>> kinds_;
};

CommBufferPool& pool() {
  static auto* const pool = new CommBufferPool;  // outlives torch's statics
  return *pool;
}

bool may_pool(const at::Device& device, te_stream stream) {
  if (device.is_cpu()) return true;
  int32_t capturing = 0;
  check(te_comm_is_captured(stream, &capturing));
  return capturing == 0;
}

// Like torch's option to fill uninitialized memory.
bool fills() {
  return poison.load(std::memory_order_relaxed) ||
         (at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory());
}

}  // namespace

void fill_returned(const c10::Storage& memory, const at::TensorOptions& options) {
  if (!fills() || memory.nbytes() == 0) return;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::empty({0}, options.dtype(at::kByte))
      .set_(c10::Storage(memory), 0, {int64_t(memory.nbytes())}, {1})
      .fill_(kPoison);
}

c10::Storage pooled_storage(const Tensor& memory) {
  auto backing = std::make_unique<Tensor>(memory);
  void* const data = backing->data_ptr();
  const size_t bytes = backing->nbytes();
  const at::Device device = backing->device();
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                      at::DataPtr(data, backing.release(), delete_backing, device), nullptr, false);
}

Tensor pooled_tensor(const c10::Storage& memory, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(options.dtype().toScalarType(), at::kStrided, options.device()));
  Tensor result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory), keys, options.dtype());
  result.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return result;
}

ScopedBuffer::ScopedBuffer(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group,
                           SlotKind kind) {
  const int64_t bytes = c10::multiply_integers(sizes) * int64_t(options.dtype().itemsize());
  const at::Device device = indexed(options.device());
  const te_stream stream = current_stream(device);
  if (may_pool(device, stream)) {
    slot_ = pool().take({std::string(group), device, stream, kind}, bytes, options.device(device));
  } else {
    slot_ = std::make_shared<Slot>();
    slot_->memory = new_memory(bytes, options.device(device));
    slot_->lasting = false;
  }
  tensor_ = pooled_tensor(slot_->memory, sizes, options.device(device));
}

ScopedBuffer::~ScopedBuffer() {
  const bool filled = sound_ && tensor_.numel() > 0;
  const at::TensorOptions options = tensor_.options();
  tensor_.reset();
  try {
    // Other views of the memory keep its values.
    if (filled && slot_->memory.use_count() == 1) fill_returned(slot_->memory, options);
  } catch (...) {  // the stream has failed
    sound_ = false;
  }
  if (slot_->lasting) pool().give_back(*slot_, sound_);
}

ScopedBuffer& ScopedBuffers::take(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group,
                                  SlotKind kind) {
  return list_.emplace_back(sizes, options, group, kind);
}

bool is_pooled(const Tensor& t) {
  if (!t.defined() || !t.has_storage()) return false;
  // Reads the deleter alone: a traced tensor's storage throws on other accesses.
  return t.unsafeGetTensorImpl()
             ->unsafe_storage()
             .unsafeGetStorageImpl()
             ->_mutable_data_ptr_no_checks()
             .get_deleter() == delete_backing;
}

void refuse_pooled(const Tensor& t, const char* op, const char* what) {
  TORCH_CHECK(!is_pooled(t), op, ": ", what, " of shape ", t.sizes(),
              " is in a pooled communication buffer of this call, which the next collective overwrites; keep a clone() "
              "of it.");
}

void register_comm_buffer_pool(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("comm_buffer_usage", [](const std::string& group) {
    const auto found = [&] {
      const py::gil_scoped_release released;  // a thread that holds the lock may wait for the GIL
      return pool().usage(group);
    }();
    return py::make_tuple(found.bytes, found.slots, found.pooled);
  });
  m.def(
      "release_comm_buffers", [] { pool().release_unused(); }, py::call_guard<py::gil_scoped_release>());
  m.def("poison_comm_buffers", [](bool on) { return poison.exchange(on); });
  m.def("is_pooled", &is_pooled);
}

}  // namespace te_torch
