// The engine's pool and groups as objects that own the memory which the C API leaves to its caller: pages, control and
// entries. When something is stored or loaded, and on which stream, is stash_calls.h's.
#pragma once

#include <transformer_engine/stash.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/common.h"
#include "stash/stash_handle.h"

namespace te_torch {

class StashPool {
 public:
  // gate: float32 of one element, which is 1 while a step is bad, and outlives the pool.
  StashPool(const at::Device& device, te_stash_options options, const Tensor& gate, te_stream stream);
  ~StashPool() { close(); }
  StashPool(const StashPool&) = delete;
  StashPool& operator=(const StashPool&) = delete;

  te_stash_pool* get() const {
    TORCH_CHECK(pool_ != nullptr, "PagedStash: its pool is closed; make another one.");
    return pool_;
  }
  int64_t device_pages() const { return device_pages_; }
  bool load_waits() const { return te_stash_load_waits(get()) != 0; }
  void reset(te_stream stream) { check(te_stash_reset(get(), stream)); }
  void post(const Tensor& mailbox, te_stream stream) {
    check(te_stash_post(get(), static_cast<te_stash_report*>(mailbox.data_ptr()), stream));
  }
  const at::Device& device() const { return device_; }
  size_t page_bytes() const { return page_bytes_; }
  int64_t bytes() const { return pages_.defined() ? int64_t(pages_.nbytes() + control_.nbytes()) : 0; }

  // Memory of an entry that is empty, and back: an address is used again, so that no step takes more than another.
  Tensor take_entry(int64_t most_pages);
  void give_entry(int64_t most_pages, Tensor entry) {
    if (pool_ != nullptr) entries_[most_pages].push_back(std::move(entry));
  }

  void close();

 private:
  at::Device device_;
  size_t page_bytes_ = 0;
  int64_t device_pages_ = 0;
  Tensor pages_, control_, gate_;
  te_stash_pool* pool_ = nullptr;
  std::map<int64_t, std::vector<Tensor>> entries_;
};

// What one layer keeps, from its store to the load that empties it. Holds counters until it was stored.
class StashGroup {
 public:
  // The handle's pieces: bytes on the pool's device.
  StashGroup(std::shared_ptr<StashPool> pool, const StashHandle& handle, int32_t tail);
  // A reset forgets what it holds. Kernels that use it run behind each other, or behind a load of another's use.
  ~StashGroup() { pool_->give_entry(most_pages_, std::move(entry_)); }
  StashGroup(const StashGroup&) = delete;
  StashGroup& operator=(const StashGroup&) = delete;

  void aim(const StashHandle& handle);  // load() writes where its pieces are now
  void store(int64_t number, te_stream stream);
  void forget_counters() { counters_.clear(); }  // the store has run: nobody reads them any more
  void bring(StashHandle& handle) const;         // memory for load(), of the sizes that were stored
  void load(bool keep, te_stream stream);
  void drop(te_stream stream);
  void evict(int64_t low_water, te_stream stream);
  te_stash_entry read(te_stream stream) const;
  std::vector<int32_t> map() const;
  int64_t most_pages() const { return most_pages_; }

 private:
  std::shared_ptr<StashPool> pool_;
  std::vector<std::pair<size_t, int64_t>> places_;  // of members: in which piece, at which byte of it
  std::vector<Tensor> counters_;
  std::vector<int64_t> sizes_;  // of pieces
  void place(std::vector<te_stash_member>& members, const StashHandle& handle) const;

  std::vector<te_stash_member> members_, targets_;  // as they were stored, as they come back
  int64_t most_pages_ = 0;
  Tensor entry_;
  bool stored_ = false;
};

// A member as the engine takes it, but for its memory and counter.
te_stash_member stash_member_of(int64_t rows, int64_t row_bytes, int64_t unit_rows, int32_t tail);
int64_t stash_units_behind(const StashRegion& region);

}  // namespace te_torch
