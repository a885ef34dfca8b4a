// Shared by stash.cpp, the CPU path and the CUDA path: the pool of the C API, and the functions of both paths, called
// after all checks.
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
  bool evicted = false;  // there was an evict since the last load or drop
};

namespace te::stash {

// loads: number of loads, drops and evicts of this step before the call.
namespace cpu {
void start_step(const Pool& pool, bool first);
void store(const Pool& pool, const StridedTable& table, Entry& entry, int64_t number, int64_t loads);
void load(const Pool& pool, const StridedTable& table, Entry& entry, bool keep, int64_t loads);
void drop(const Pool& pool, Entry& entry, int64_t loads);
void evict(const Pool& pool, Entry& entry, int64_t low_water, int64_t loads);
void post(const Pool& pool, te_stash_report& mailbox);
}  // namespace cpu

namespace cuda {
void prepare();
void start_step(const Pool& pool, bool first, te_stream stream);
void store(const Pool& pool, const StridedTable& table, Entry* entry, int64_t number, int64_t loads, int32_t sm_budget,
           te_stream stream);
void load(const Pool& pool, const StridedTable& table, Entry* entry, bool keep, int64_t loads, int32_t sm_budget,
          te_stream stream);
void drop(const Pool& pool, Entry* entry, int64_t loads, te_stream stream);
void evict(const Pool& pool, Entry* entry, int64_t low_water, int64_t loads, te_stream stream);
void post(const Pool& pool, te_stash_report* mailbox, te_stream stream);
void read(void* out, const void* from, size_t bytes, te_stream stream);
void wait();
uint64_t capture_of(te_stream stream);
}  // namespace cuda

}  // namespace te::stash
