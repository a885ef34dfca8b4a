// Allocates pages: selects the pages that a call takes (plan_store, page_id) and frees (plan_free), and updates the
// numbers of the report.
// - A decision is a pure function of the control block and the entry. All blocks of a launch therefore make the same
//   decision, and the last block writes it to memory. The CPU and CUDA run the same lines, so their page maps are
//   equal.
// - The counts of pages taken (head) and freed (tails) only grow. tails[n] counts the pages freed by the first n loads,
//   drops and evictions (n modulo 256). A call receives the number of these calls that precede it in the step, and may
//   take the pages that they freed, but no others.
#pragma once

#include "ops/stash/stash_layout.h"

namespace te::stash {

constexpr int64_t kLoads = 256;   // length of Tier::tails
constexpr int64_t kWaits = 128;   // every 128th load waits for the stores, so that no tail is overwritten too soon
constexpr int64_t kCanary = 128;  // bytes after each page in debug mode
constexpr uint64_t kCanaryWord = 0x5afe9a6e5afe9a6eull;

// A macro, because printf in device code needs a literal as its format.
#define TE_STASH_NO_SPACE \
  "te_stash_store: group %lld needs %lld pages and neither tier has space for them; options.trap ends the process.\n"

struct Tier {
  int64_t head;
  int64_t tails[kLoads];

  TE_HOST_DEVICE int64_t tail(int64_t loads) const { return tails[loads % kLoads]; }
  TE_HOST_DEVICE int64_t free(int64_t loads) const { return tail(loads) - head; }
};

struct Control {
  te_stash_report report;
  Tier device, host;
  Tier demand;  // pages of all groups so far, lost ones included, and of those that were loaded or dropped
};

struct Entry {
  te_stash_entry head;
  int64_t generation;  // the step of the store, + 1; an entry of an earlier step is empty
  uint64_t checked;    // debug: the checksum of a load in progress
  uint64_t fresh;      // debug: a store ran and its checksum is not computed yet
  uint64_t reserved[4];

  TE_HOST_DEVICE int32_t* map() { return reinterpret_cast<int32_t*>(this + 1); }
  TE_HOST_DEVICE const int32_t* map() const { return reinterpret_cast<const int32_t*>(this + 1); }
};
static_assert(sizeof(Entry) == 256, "the map comes after it");

// A kernel argument.
struct Pool {
  Control* control;
  float* gate;                     // options.gate, may be null
  int32_t *device_ids, *host_ids;  // of free pages
  unsigned char *device_data, *host_data;
  int64_t device_pages, host_pages;
  int64_t stride;  // from page to page
  Grid grid;
  int32_t policy, trap, debug;

  TE_HOST_DEVICE unsigned char* page(bool host, int32_t id) const {
    return (host ? host_data : device_data) + id * stride;
  }
};

TE_HOST_DEVICE unsigned char* page_of(const Pool& pool, const Entry& entry, int64_t page) {
  return pool.page(page >= entry.head.pages - entry.head.host_pages, entry.map()[page]);
}

// ---- the report ----

TE_HOST_DEVICE void add(int64_t& value, int64_t by) {
#if defined(__CUDA_ARCH__)
  atomicAdd(reinterpret_cast<unsigned long long*>(&value), static_cast<unsigned long long>(by));
#else
  value += by;
#endif
}

TE_HOST_DEVICE void raise_flags(const Pool& pool, uint32_t flags, int64_t number) {
  if (flags == 0) return;
  te_stash_report& report = pool.control->report;
#if defined(__CUDA_ARCH__)
  atomicOr(&report.flags, flags);
  atomicExch(&report.gate, 1.f);
  if (pool.gate != nullptr) atomicExch(pool.gate, 1.f);
  atomicCAS(reinterpret_cast<unsigned long long*>(&report.flagged_entry), ~0ull,
            static_cast<unsigned long long>(number));
#else
  report.flags |= flags;
  report.gate = 1.f;
  if (pool.gate != nullptr) *pool.gate = 1.f;
  if (report.flagged_entry == -1) report.flagged_entry = number;
#endif
}

TE_HOST_DEVICE void raise_peak(int64_t& peak, int64_t was, int64_t value) {
  if (value > was) peak = value;
}
TE_HOST_DEVICE void raise_peak(int64_t& peak, int64_t value) { raise_peak(peak, peak, value); }

// ---- taking pages ----

// The functions from here on read all that they need before their first comparison or write: a GPU thread waits once
// for consecutive reads, and once more for each read after a write or a branch.
TE_HOST_DEVICE bool holds_group(const Pool& pool, const Entry& entry) {
  const int32_t state = entry.head.state;
  const int64_t generation = entry.generation, step = pool.control->report.step;
  return state != TE_STASH_STATE_EMPTY && generation == step + 1;
}

// Wraps a position in a ring; the position is less than twice the capacity.
TE_HOST_DEVICE int64_t wrapped(int64_t position, int64_t capacity) {
  return position >= capacity ? position - capacity : position;
}
// Capacities have 31 bits. Counts of more than 32 bits are correct, but slower.
TE_HOST_DEVICE int64_t ring_at(int64_t count, int64_t capacity) {
  if (capacity == 0) return 0;
  return (count >> 32) == 0 ? int64_t(uint32_t(count) % uint32_t(capacity)) : count % capacity;
}

struct PageAlloc {
  int32_t state;  // EMPTY: nothing is stored, as the entry already holds a group
  uint32_t flags;
  int64_t stream_bytes, pages;
  int64_t device_pages, host_pages;  // taken
  int64_t device_at, host_at;        // positions of the first page in the lists of ids
};

// The state that a store starts from; it depends on no count.
struct FreeSpace {
  int64_t device_head, device_free, host_head, host_free;
  bool stored;  // the entry already holds a group

  TE_HOST_DEVICE static FreeSpace of(const Pool& pool, const Entry& entry, int64_t loads) {
    const Control& control = *pool.control;
    return {control.device.head, control.device.free(loads), control.host.head, control.host.free(loads),
            holds_group(pool, entry)};
  }
};

TE_HOST_DEVICE PageAlloc plan_store(const Pool& pool, const FreeSpace& space, int64_t stream_bytes, uint32_t flags) {
  PageAlloc alloc{TE_STASH_STATE_EMPTY, flags, stream_bytes, 0, 0, 0, 0, 0};
  if (space.stored) {
    alloc.flags |= TE_STASH_EMPTY;
    return alloc;
  }
  alloc.pages = pool.grid.pages_of(stream_bytes);
  const int64_t device = least(alloc.pages, space.device_free), host = alloc.pages - device;
  if (host > space.host_free) {
    alloc.state = TE_STASH_STATE_LOST;
    alloc.flags |= TE_STASH_LOST;
    return alloc;
  }
  alloc.state = TE_STASH_STATE_STORED;
  alloc.device_pages = device;
  alloc.host_pages = host;
  alloc.host_at = ring_at(space.host_head, pool.host_pages);
  alloc.device_at = pool.policy == TE_STASH_RING    ? ring_at(space.device_head, pool.device_pages)
                    : pool.policy == TE_STASH_STACK ? space.device_free - 1
                                                    : pool.device_pages - space.device_free;
  return alloc;
}

// The id of page `i` of the allocation: a device page for the first device_pages of them, else a host page.
TE_HOST_DEVICE int32_t page_id(const Pool& pool, const PageAlloc& alloc, int64_t i) {
  if (i >= alloc.device_pages) {
    return pool.host_ids[wrapped(alloc.host_at + i - alloc.device_pages, pool.host_pages)];
  }
  if (pool.policy == TE_STASH_RING) return pool.device_ids[wrapped(alloc.device_at + i, pool.device_pages)];
  return pool.policy == TE_STASH_STACK ? pool.device_ids[alloc.device_at - i] : int32_t(alloc.device_at + i);
}

// Entries first, first + step, ... of the map.
TE_HOST_DEVICE void write_map(const Pool& pool, const PageAlloc& alloc, Entry& entry, int64_t first, int64_t step) {
  for (int64_t i = first; i < alloc.device_pages + alloc.host_pages; i += step)
    entry.map()[i] = page_id(pool, alloc, i);
}

// The report and the demand before a store.
struct Totals {
  te_stash_report report;
  int64_t demand, returned;

  TE_HOST_DEVICE static Totals of(const Pool& pool, int64_t loads) {
    const Control& control = *pool.control;
    return {control.report, control.demand.head, control.demand.tail(loads)};
  }
};

template <class AnyTable>
TE_HOST_DEVICE void finish_store(const Pool& pool, const FreeSpace& space, const Totals& totals, const PageAlloc& alloc,
                                 const AnyTable& table, const Layout& layout, int64_t number, Entry& entry) {
  Control& control = *pool.control;
  te_stash_report& report = control.report;
  const te_stash_report& was = totals.report;
  raise_flags(pool, alloc.flags, number);
  if (alloc.state == TE_STASH_STATE_EMPTY) return;
  const int64_t demand = totals.demand + alloc.pages;
  te_stash_entry& head = entry.head;
  head.state = alloc.state;
  head.members = table.count;
  head.number = number;
  head.stream_bytes = alloc.stream_bytes;
  head.pages = alloc.pages;
  head.host_pages = alloc.host_pages;
  head.checksum = 0;
  int64_t live = 0;
  for (int m = 0; m < table.count; ++m) {
    head.counts[m] = layout.counts[m];
    live += live_bytes(table, layout, m) * repeats_of(table, m);
  }
  head.live_bytes = live;
  entry.generation = was.step + 1;
  entry.checked = 0;
  entry.fresh = 1;
  report.groups = was.groups + 1;
  control.demand.head = demand;
  raise_peak(report.demand, was.demand, demand - totals.returned);
  if (alloc.state == TE_STASH_STATE_LOST) {
    report.lost_groups = was.lost_groups + 1;
    return;
  }
  report.live_bytes = was.live_bytes + live;
  report.stream_bytes = was.stream_bytes + alloc.stream_bytes;
  report.taken_bytes = was.taken_bytes + alloc.pages * pool.grid.page_bytes;
  if (alloc.host_pages != 0) {
    report.spilled_bytes = was.spilled_bytes + alloc.stream_bytes - alloc.device_pages * pool.grid.page_bytes;
  }
  control.device.head = space.device_head + alloc.device_pages;
  control.host.head = space.host_head + alloc.host_pages;
  add(report.device_in_use, alloc.device_pages);
  add(report.host_in_use, alloc.host_pages);
  // In the order of calls: pages that a concurrent load frees meanwhile still count.
  raise_peak(report.device_peak, was.device_peak, pool.device_pages - space.device_free + alloc.device_pages);
  raise_peak(report.host_peak, was.host_peak, pool.host_pages - space.host_free + alloc.host_pages);
}

// The group in an entry, without its counts.
struct StoredEntry {
  bool present;  // stored in this step
  int32_t state, members;
  int64_t stream_bytes, pages, host_pages;

  TE_HOST_DEVICE static StoredEntry of(const Pool& pool, const Entry& entry) {
    const te_stash_entry& head = entry.head;
    StoredEntry stored{false, head.state, head.members, head.stream_bytes, head.pages, head.host_pages};
    stored.present = holds_group(pool, entry);
    return stored;
  }
};

// Returns the state that a load starts from. layout.counts holds the counts of the entry. Returns EMPTY if the sizes
// are those of another group; all units count as live then, so that all of them are written.
template <class AnyTable>
TE_HOST_DEVICE int32_t plan_load(const StoredEntry& stored, const AnyTable& table, Layout& layout) {
  bool same = stored.present && stored.members == table.count;
  for (int m = 0; m < table.count && same; ++m) same = layout.counts[m] <= table.members[m].most;
  set_starts(table, layout);
  if (same && layout.starts[table.count] == stored.stream_bytes) return stored.state;
  for (int m = 0; m < table.count; ++m) layout.counts[m] = table.members[m].most;
  return TE_STASH_STATE_EMPTY;
}

// ---- freeing pages; `load` is the number of the call among the loads, drops and evicts of the step ----

struct PageFree {
  uint32_t flags;
  int64_t pages;  // in the demand
  int64_t device_pages, host_pages;
  int64_t device_at, host_at;
  int64_t device_tail, host_tail, demand_tail;  // before this call

  TE_HOST_DEVICE static PageFree nothing(const Pool& pool, int64_t load) {
    const Control& control = *pool.control;
    PageFree freed{};
    freed.device_tail = control.device.tail(load);
    freed.host_tail = control.host.tail(load);
    freed.demand_tail = control.demand.tail(load);
    return freed;
  }
};

TE_HOST_DEVICE PageFree plan_free(const Pool& pool, const Entry& entry, int64_t load) {
  const Control& control = *pool.control;
  PageFree freed = PageFree::nothing(pool, load);
  if (!holds_group(pool, entry)) return freed;
  freed.pages = entry.head.pages;
  if (entry.head.state == TE_STASH_STATE_LOST) return freed;
  freed.host_pages = entry.head.host_pages;
  freed.host_at = ring_at(freed.host_tail, pool.host_pages);
  const int64_t device = entry.head.pages - entry.head.host_pages;
  const int64_t free = freed.device_tail - control.device.head;
  if (pool.policy == TE_STASH_BUMP && device != 0 && entry.map()[0] + device != pool.device_pages - free) {
    freed.flags = TE_STASH_ORDER;
    return freed;
  }
  freed.device_pages = device;
  freed.device_at = pool.policy == TE_STASH_RING ? ring_at(freed.device_tail, pool.device_pages) : free;
  return freed;
}

TE_HOST_DEVICE void return_device_ids(const Pool& pool, const PageFree& freed, const Entry& entry, int64_t first,
                                      int64_t step) {
  if (pool.policy == TE_STASH_BUMP) return;
  for (int64_t i = first; i < freed.device_pages; i += step) {
    const int64_t at = freed.device_at + i;
    pool.device_ids[pool.policy == TE_STASH_RING ? wrapped(at, pool.device_pages) : at] = entry.map()[i];
  }
}

TE_HOST_DEVICE void return_ids(const Pool& pool, const PageFree& freed, const Entry& entry, int64_t first,
                               int64_t step) {
  return_device_ids(pool, freed, entry, first, step);
  const int64_t skipped = entry.head.pages - entry.head.host_pages;
  for (int64_t i = first; i < freed.host_pages; i += step) {
    pool.host_ids[wrapped(freed.host_at + i, pool.host_pages)] = entry.map()[skipped + i];
  }
}

// Makes the pages free for later calls.
TE_HOST_DEVICE void finish_free(const Pool& pool, const PageFree& freed, int64_t load) {
  Control& control = *pool.control;
  const int64_t next = (load + 1) % kLoads;
  control.device.tails[next] = freed.device_tail + freed.device_pages;
  control.host.tails[next] = freed.host_tail + freed.host_pages;
  control.demand.tails[next] = freed.demand_tail + freed.pages;
  add(control.report.device_in_use, -freed.device_pages);
  add(control.report.host_in_use, -freed.host_pages);
}

// ---- evicting ----

// Moves the device pages of an entry to host pages; does nothing where it has no device pages.
struct Eviction {
  PageAlloc to;    // host pages alone
  PageFree freed;  // device pages alone
};

TE_HOST_DEVICE Eviction plan_evict(const Pool& pool, const Entry& entry, int64_t low_water, int64_t load) {
  const Control& control = *pool.control;
  Eviction eviction{PageAlloc{}, PageFree::nothing(pool, load)};
  if (!holds_group(pool, entry) || entry.head.state != TE_STASH_STATE_STORED) return eviction;
  const int64_t pages = entry.head.pages - entry.head.host_pages;
  if (control.device.free(load) >= low_water || control.host.free(load) < pages) return eviction;
  eviction.to.host_pages = pages;
  eviction.to.host_at = ring_at(control.host.head, pool.host_pages);
  eviction.freed.device_pages = pages;
  eviction.freed.device_at =
      pool.policy == TE_STASH_RING ? ring_at(control.device.tail(load), pool.device_pages) : control.device.free(load);
  return eviction;
}

TE_HOST_DEVICE void write_eviction(const Pool& pool, const Eviction& eviction, Entry& entry, int64_t first,
                                   int64_t step) {
  return_device_ids(pool, eviction.freed, entry, first, step);
  write_map(pool, eviction.to, entry, first, step);  // the first pages of the stream: those that were on the device
}

TE_HOST_DEVICE void finish_evict(const Pool& pool, const Eviction& eviction, int64_t load, Entry& entry) {
  te_stash_report& report = pool.control->report;
  finish_free(pool, eviction.freed, load);
  const int64_t pages = eviction.to.host_pages;
  entry.head.host_pages += pages;
  pool.control->host.head += pages;
  report.evicted_pages += pages;
  add(report.host_in_use, pages);
  raise_peak(report.host_peak, pool.host_pages - pool.control->host.free(load + 1));
}

// ---- starting a step ----

TE_HOST_DEVICE void init_ids(const Pool& pool, int64_t first, int64_t step) {
  for (int64_t i = first; i < pool.device_pages && pool.policy != TE_STASH_BUMP; i += step) {
    pool.device_ids[i] = int32_t(pool.policy == TE_STASH_STACK ? pool.device_pages - 1 - i : i);
  }
  for (int64_t i = first; i < pool.host_pages; i += step) pool.host_ids[i] = int32_t(i);
}

TE_HOST_DEVICE void start_step(const Pool& pool, bool first) {
  Control& control = *pool.control;
  te_stash_report& report = control.report;
  const bool leaked = pool.debug != 0 && !first && (report.device_in_use != 0 || report.host_in_use != 0);
  const int64_t step = first ? 0 : report.step + 1;
  report = te_stash_report{};
  report.step = step;
  report.flagged_entry = -1;
  control.device.head = control.host.head = control.demand.head = 0;
  control.device.tails[0] = pool.device_pages;
  control.host.tails[0] = pool.host_pages;
  control.demand.tails[0] = 0;
  if (pool.gate != nullptr) *pool.gate = 0.f;
  if (leaked) raise_flags(pool, TE_STASH_LEAKED, -1);
}

}  // namespace te::stash
