// See comm_buffer_pool.h. Slots are named by group, device, stream and kind: calls of one stream read and write in its
// order, so no event is needed. Within a kind a pool takes the first slot that nobody has. While a stream is being
// captured its buffers have memory of the graph's pool, which replays write at times of their own.
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

// The arena has it for good, or until nobody has it and it is asked to let go.
struct Slot {
  c10::Storage memory;
  bool pooled = false, lasting = true;
};

namespace {

constexpr int kPoison = 0xff;  // NaN in every float dtype, FP8's among them
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

// What a slot's memory is known by: all views of it share the storage.
void give_up(void* backing) { delete static_cast<Tensor*>(backing); }

c10::Storage new_memory(int64_t bytes, const at::TensorOptions& options) {
  return pooled_storage(at::empty({bytes}, options.dtype(at::kByte).layout(at::kStrided)));
}

bool is_there(const std::string& group) {
  try {
    return c10d::resolve_process_group(group) != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

class Arena {
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
    // Nobody waits for the allocator: what has no memory meanwhile is this call's.
    try {
      // Who still has a view of what a call had in a pooled buffer keeps it, as it is.
      const bool shared = memory && memory.use_count() > 1;
      const int64_t before = memory ? int64_t(memory.nbytes()) : 0;
      if (shared || !memory || before < bytes) {
        memory = {};  // first, so that there is room
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

  // Memory that no call uses.
  void let_go() {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (auto& [key, slots] : kinds_) {
      std::erase_if(slots, [](const auto& slot) { return !slot->pooled; });
    }
  }

  struct Usage {
    int64_t bytes = 0, slots = 0, pooled = 0;
  };

  // Of a group; of all for an empty name.
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
    // Something new begins: what groups have left that are gone is let go.
    std::erase_if(kinds_, [](const auto& entry) {
      for (const auto& slot : entry.second) {
        if (slot->pooled) return false;
      }
      return !is_there(entry.first.group);
    });
    return kinds_.emplace_back(std::move(key), std::vector<std::shared_ptr<Slot>>()).second;
  }

  std::mutex mutex_;
  std::vector<std::pair<Key, std::vector<std::shared_ptr<Slot>>>> kinds_;
};

Arena& arena() {
  static auto* const the_one = new Arena;  // outlives torch's own statics
  return *the_one;
}

bool may_last(const at::Device& device, te_stream stream) {
  if (device.is_cpu()) return true;
  int32_t capturing = 0;
  check(te_comm_is_captured(stream, &capturing));
  return capturing == 0;
}

// As torch fills what it allocates, where that is asked for.
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
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(data, backing.release(), give_up, device),
                      nullptr, false);
}

Tensor pooled_tensor(const c10::Storage& memory, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::DispatchKeySet keys(
      c10::computeDispatchKey(options.dtype().toScalarType(), at::kStrided, options.device()));
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory), keys, options.dtype());
  made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return made;
}

ScopedBuffer::ScopedBuffer(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group,
                           SlotKind kind) {
  const int64_t bytes = c10::multiply_integers(sizes) * int64_t(options.dtype().itemsize());
  const at::Device device = indexed(options.device());
  const te_stream stream = current_stream(device);
  if (may_last(device, stream)) {
    slot_ = arena().take({std::string(group), device, stream, kind}, bytes, options.device(device));
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
    // What others have a view of is theirs, as it is.
    if (filled && slot_->memory.use_count() == 1) fill_returned(slot_->memory, options);
  } catch (...) {  // of a stream that has failed
    sound_ = false;
  }
  if (slot_->lasting) arena().give_back(*slot_, sound_);
}

ScopedBuffer& ScopedBuffers::take(at::IntArrayRef sizes, const at::TensorOptions& options, std::string_view group,
                                  SlotKind kind) {
  return list_.emplace_back(sizes, options, group, kind);
}

bool is_pooled(const Tensor& t) {
  if (!t.defined() || !t.has_storage()) return false;
  // A traced tensor's storage may be asked for nothing else.
  return t.unsafeGetTensorImpl()
             ->unsafe_storage()
             .unsafeGetStorageImpl()
             ->_mutable_data_ptr_no_checks()
             .get_deleter() == give_up;
}

void refuse_pooled(const Tensor& t, const char* op, const char* what) {
  TORCH_CHECK(!is_pooled(t), op, ": ", what, " of shape ", t.sizes(),
              " lies in memory that is on lease for this call alone, and that the next collective overwrites; keep a "
              "clone() of it.");
}

void register_comm_buffer_pool(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("lease_usage", [](const std::string& group) {
    const auto found = [&] {
      const py::gil_scoped_release released;  // who has the arena may be waiting for the GIL
      return arena().usage(group);
    }();
    return py::make_tuple(found.bytes, found.slots, found.pooled);
  });
  m.def(
      "let_go_of_leases", [] { arena().let_go(); }, py::call_guard<py::gil_scoped_release>());
  m.def("poison_leases", [](bool on) { return poison.exchange(on); });
  m.def("on_lease", &is_pooled);
}

}  // namespace te_torch
