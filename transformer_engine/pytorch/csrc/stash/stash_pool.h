// The engine's pool and groups as objects. They own the memory that the C API leaves to its caller: pages, control and
// entries. stash_calls.h decides when and on which stream a group is stored or loaded.
#pragma once

#include <transformer_engine/stash.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "core/common.h"
#include "stash/stash_segments.h"

namespace te_torch {

class StashPool {
 public:
  // gate: float32 of one element, 1 while a step is bad. It outlives the pool.
  StashPool(const at::Device& device, te_stash_options options, const Tensor& gate, te_stream stream);
  ~StashPool() { close(); }
  StashPool(const StashPool&) = delete;
  StashPool& operator=(const StashPool&) = delete;

  te_stash_pool* get() const {
    TORCH_CHECK(pool_ != nullptr, "PagedStash: the pool is closed; make another PagedStash.");
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

  // Memory for an empty entry, and its return. Addresses are reused, so that memory does not grow from step to step.
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

// The tensors of one layer in the pool, from their store to the load that gives the pages back. Holds the counters
// until the store has run.
class StashGroup {
 public:
  // Segments on the pool's device.
  StashGroup(std::shared_ptr<StashPool> pool, const StashSegments& segments, int32_t tail);
  // The entry can be given back at once: a reset empties it, and kernels on one entry run one after another.
  ~StashGroup() { pool_->give_entry(most_pages_, std::move(entry_)); }
  StashGroup(const StashGroup&) = delete;
  StashGroup& operator=(const StashGroup&) = delete;

  void set_targets(const StashSegments& segments);  // load() writes to the present addresses of these
  void store(int64_t number, te_stream stream);
  void release_counters() { counters_.clear(); }  // after the store has run, nothing reads them
  void allocate(StashSegments& segments) const;   // new memory for load(), of the sizes that were stored
  void load(bool keep, te_stream stream);
  void drop(te_stream stream);
  void evict(int64_t low_water, te_stream stream);
  te_stash_entry read(te_stream stream) const;
  std::vector<int32_t> map() const;
  int64_t most_pages() const { return most_pages_; }

 private:
  std::shared_ptr<StashPool> pool_;
  std::vector<std::pair<size_t, int64_t>> positions_;  // of each member: index of its segment, byte offset in it
  std::vector<Tensor> counters_;
  std::vector<int64_t> sizes_;  // of segments
  void set_addresses(std::vector<te_stash_member>& parts, const StashSegments& segments) const;

  std::vector<te_stash_member> members_, targets_;  // with the addresses of the store, and of the load
  int64_t most_pages_ = 0;
  Tensor entry_;
  bool stored_ = false;
};

// A member of the C API without its memory and counter.
te_stash_member stash_member_of(int64_t rows, int64_t row_bytes, int64_t unit_rows, int32_t tail);

}  // namespace te_torch
