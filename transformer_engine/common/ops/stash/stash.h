// What the room's contract, its CPU path and its CUDA path share: the pool behind the handle, and the entries of both
// paths, after all checks.
#pragma once

#include <memory>
#include <mutex>

#include "core/arena.h"
#include "ops/stash/stash_pages.h"

struct te_stash_pool {
  te_stash_options options;
  te::stash::Pool view;
  std::unique_ptr<te::pinned::Arena> arena;  // of the host pages
  mutable std::mutex mutex;
  int64_t loads = 0;     // loads, drops and evicts of this step
  bool evicted = false;  // one was called that no load has waited for
};

namespace te::stash {

// `loads`: those called before a store; the number of a load, drop or evict.
namespace cpu {
void start_step(const Pool& pool, bool first);
void store(const Pool& pool, const Table& table, Entry& entry, int64_t number, int64_t loads);
void load(const Pool& pool, const Table& table, Entry& entry, bool keep, int64_t loads);
void drop(const Pool& pool, Entry& entry, int64_t loads);
void evict(const Pool& pool, Entry& entry, int64_t low_water, int64_t loads);
void post(const Pool& pool, te_stash_report& mailbox);
}  // namespace cpu

namespace cuda {
void prepare();
void start_step(const Pool& pool, bool first, te_stream stream);
void store(const Pool& pool, const Table& table, Entry* entry, int64_t number, int64_t loads, int32_t sm_budget,
           te_stream stream);
void load(const Pool& pool, const Table& table, Entry* entry, bool keep, int64_t loads, int32_t sm_budget,
          te_stream stream);
void drop(const Pool& pool, Entry* entry, int64_t loads, te_stream stream);
void evict(const Pool& pool, Entry* entry, int64_t low_water, int64_t loads, te_stream stream);
void post(const Pool& pool, te_stash_report* mailbox, te_stream stream);
void read(void* out, const void* from, size_t bytes, te_stream stream);
void wait();
}  // namespace cuda

}  // namespace te::stash
