// Which pages a call takes and gives back, and what the report says of it. Decisions are pure functions of control and
// the entry, so any number of blocks can make the same one; what they decided is written down once, by whoever finishes
// last. The CPU and CUDA run these lines alike: that is why their page maps are the same.
//
// Pages taken (head) and pages given back (tails) only grow. tails[n] is what n loads, drops and evicts have given back
// (n modulo 256): a call that knows how many of them were called before it sees their pages and no others.
#pragma once

#include "ops/stash/stash_layout.h"

namespace te::stash {

constexpr int64_t kLoads = 256;   // tails that are remembered
constexpr int64_t kWaits = 128;   // a load in so many waits for the stores, so that no tail is overwritten too soon
constexpr int64_t kCanary = 128;  // bytes behind each page in debug mode
constexpr uint64_t kCanaryWord = 0x5afe9a6e5afe9a6eull;

// A macro: a format must be a literal on the device.
#define TE_STASH_NO_ROOM \
  "te_stash_store: group %lld wants %lld pages and neither tier has room; options.trap ends the process here.\n"

struct Tier {
  int64_t head;
  int64_t tails[kLoads];

  TE_HOST_DEVICE int64_t tail(int64_t loads) const { return tails[loads % kLoads]; }
  TE_HOST_DEVICE int64_t free(int64_t loads) const { return tail(loads) - head; }
};

struct Control {
  te_stash_report report;
  Tier device, host;
  Tier demand;  // pages wanted so far, and those of groups that were loaded or dropped: lost ones are in both
};

struct Entry {
  te_stash_entry head;
  int64_t generation;  // the step of the store, + 1: what is older holds nothing
  uint64_t checked;    // debug: the checksum of a load, as far as it got
  uint64_t fresh;      // debug: a store was done whose checksum is not made yet
  uint64_t reserved[4];

  TE_HOST_DEVICE int32_t* map() { return reinterpret_cast<int32_t*>(this + 1); }
  TE_HOST_DEVICE const int32_t* map() const { return reinterpret_cast<const int32_t*>(this + 1); }
};
static_assert(sizeof(Entry) == 256, "the map follows");

// A pool as calls see it, by value.
struct Pool {
  Control* control;
  float* gate;                     // the caller's, or null
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

TE_HOST_DEVICE void raise(const Pool& pool, uint32_t flags, int64_t number) {
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

TE_HOST_DEVICE void lift(int64_t& peak, int64_t was, int64_t value) {
  if (value > was) peak = value;
}
TE_HOST_DEVICE void lift(int64_t& peak, int64_t value) { lift(peak, peak, value); }

// ---- taking ----

// Here and below, what memory holds is read first and compared or written then: a thread of a GPU waits once for what
// it reads in a row, and once for each read that stands behind a write or a branch.
TE_HOST_DEVICE bool holds(const Pool& pool, const Entry& entry) {
  const int32_t state = entry.head.state;
  const int64_t generation = entry.generation, step = pool.control->report.step;
  return state != TE_STASH_STATE_EMPTY && generation == step + 1;
}

// A position in a ring that has gone round.
TE_HOST_DEVICE int64_t wrapped(int64_t position, int64_t capacity) {
  return position >= capacity ? position - capacity : position;
}
// Capacities have 31 bits, and counts more than 32 only in steps that nobody has seen.
TE_HOST_DEVICE int64_t ring_at(int64_t count, int64_t capacity) {
  if (capacity == 0) return 0;
  return (count >> 32) == 0 ? int64_t(uint32_t(count) % uint32_t(capacity)) : count % capacity;
}

struct Take {
  int32_t state;  // EMPTY: the entry holds something, nothing is stored
  uint32_t flags;
  int64_t stream_bytes, pages;
  int64_t device_pages, host_pages;  // taken
  int64_t device_at, host_at;        // of the first one, in the lists
};

// What a store finds, before it knows its counts.
struct Room {
  int64_t device_head, device_free, host_head, host_free;
  bool held;  // the entry holds something

  TE_HOST_DEVICE static Room of(const Pool& pool, const Entry& entry, int64_t loads) {
    const Control& control = *pool.control;
    return {control.device.head, control.device.free(loads), control.host.head, control.host.free(loads),
            holds(pool, entry)};
  }
};

TE_HOST_DEVICE Take plan_store(const Pool& pool, const Room& room, int64_t stream_bytes, uint32_t flags) {
  Take take{TE_STASH_STATE_EMPTY, flags, stream_bytes, 0, 0, 0, 0, 0};
  if (room.held) {
    take.flags |= TE_STASH_EMPTY;
    return take;
  }
  take.pages = pool.grid.pages_of(stream_bytes);
  const int64_t device = least(take.pages, room.device_free), host = take.pages - device;
  if (host > room.host_free) {
    take.state = TE_STASH_STATE_LOST;
    take.flags |= TE_STASH_LOST;
    return take;
  }
  take.state = TE_STASH_STATE_STORED;
  take.device_pages = device;
  take.host_pages = host;
  take.host_at = ring_at(room.host_head, pool.host_pages);
  take.device_at = pool.policy == TE_STASH_RING    ? ring_at(room.device_head, pool.device_pages)
                   : pool.policy == TE_STASH_STACK ? room.device_free - 1
                                                   : pool.device_pages - room.device_free;
  return take;
}

// The id of page `i` of those that are taken: of the device tier for the first device_pages of them.
TE_HOST_DEVICE int32_t taken(const Pool& pool, const Take& take, int64_t i) {
  if (i >= take.device_pages) {
    return pool.host_ids[wrapped(take.host_at + i - take.device_pages, pool.host_pages)];
  }
  if (pool.policy == TE_STASH_RING) return pool.device_ids[wrapped(take.device_at + i, pool.device_pages)];
  return pool.policy == TE_STASH_STACK ? pool.device_ids[take.device_at - i] : int32_t(take.device_at + i);
}

// Threads `first`, first + step, ... of those that write the map.
TE_HOST_DEVICE void write_map(const Pool& pool, const Take& take, Entry& entry, int64_t first, int64_t step) {
  for (int64_t i = first; i < take.device_pages + take.host_pages; i += step) entry.map()[i] = taken(pool, take, i);
}

// What a store adds to.
struct Before {
  te_stash_report report;
  int64_t demand, met;

  TE_HOST_DEVICE static Before of(const Pool& pool, int64_t loads) {
    const Control& control = *pool.control;
    return {control.report, control.demand.head, control.demand.tail(loads)};
  }
};

TE_HOST_DEVICE void finish_store(const Pool& pool, const Room& room, const Before& before, const Take& take,
                                 const Table& table, const Layout& layout, int64_t number, Entry& entry) {
  Control& control = *pool.control;
  te_stash_report& report = control.report;
  const te_stash_report& was = before.report;
  raise(pool, take.flags, number);
  if (take.state == TE_STASH_STATE_EMPTY) return;
  const int64_t demand = before.demand + take.pages;
  te_stash_entry& head = entry.head;
  head.state = take.state;
  head.members = table.count;
  head.number = number;
  head.stream_bytes = take.stream_bytes;
  head.pages = take.pages;
  head.host_pages = take.host_pages;
  head.checksum = 0;
  int64_t live = 0;
  for (int m = 0; m < table.count; ++m) {
    head.counts[m] = layout.counts[m];
    live += live_bytes(table, layout, m);
  }
  head.live_bytes = live;
  entry.generation = was.step + 1;
  entry.checked = 0;
  entry.fresh = 1;
  report.groups = was.groups + 1;
  control.demand.head = demand;
  lift(report.demand, was.demand, demand - before.met);
  if (take.state == TE_STASH_STATE_LOST) {
    report.lost_groups = was.lost_groups + 1;
    return;
  }
  report.live_bytes = was.live_bytes + live;
  report.stream_bytes = was.stream_bytes + take.stream_bytes;
  report.taken_bytes = was.taken_bytes + take.pages * pool.grid.page_bytes;
  if (take.host_pages != 0) {
    report.spilled_bytes = was.spilled_bytes + take.stream_bytes - take.device_pages * pool.grid.page_bytes;
  }
  control.device.head = room.device_head + take.device_pages;
  control.host.head = room.host_head + take.host_pages;
  add(report.device_in_use, take.device_pages);
  add(report.host_in_use, take.host_pages);
  // As the order of calls has it, whatever a load beside this store has given back meanwhile.
  lift(report.device_peak, was.device_peak, pool.device_pages - room.device_free + take.device_pages);
  lift(report.host_peak, was.host_peak, pool.host_pages - room.host_free + take.host_pages);
}

// What an entry holds, but for its counts.
struct Held {
  bool there;  // of this step
  int32_t state, members;
  int64_t stream_bytes, pages, host_pages;

  TE_HOST_DEVICE static Held of(const Pool& pool, const Entry& entry) {
    const te_stash_entry& head = entry.head;
    Held held{false, head.state, head.members, head.stream_bytes, head.pages, head.host_pages};
    held.there = holds(pool, entry);
    return held;
  }
};

// What a load finds, whose layout has the entry's counts: sizes of another group are as good as nothing. Of nothing,
// every unit there could be is alive, so that all of it is written.
TE_HOST_DEVICE int32_t plan_load(const Held& held, const Table& table, Layout& layout) {
  bool same = held.there && held.members == table.count;
  for (int m = 0; m < table.count && same; ++m) same = layout.counts[m] <= table.members[m].most;
  place(table, layout);
  if (same && layout.starts[table.count] == held.stream_bytes) return held.state;
  for (int m = 0; m < table.count; ++m) layout.counts[m] = table.members[m].most;
  return TE_STASH_STATE_EMPTY;
}

// ---- giving back: what is load number `load` of the step, drops and evicts counted in ----

struct Give {
  uint32_t flags;
  int64_t pages;  // of the demand
  int64_t device_pages, host_pages;
  int64_t device_at, host_at;
  int64_t device_tail, host_tail, demand_tail;  // what was given back before

  TE_HOST_DEVICE static Give nothing(const Pool& pool, int64_t load) {
    const Control& control = *pool.control;
    Give give{};
    give.device_tail = control.device.tail(load);
    give.host_tail = control.host.tail(load);
    give.demand_tail = control.demand.tail(load);
    return give;
  }
};

TE_HOST_DEVICE Give plan_give(const Pool& pool, const Entry& entry, int64_t load) {
  const Control& control = *pool.control;
  Give give = Give::nothing(pool, load);
  if (!holds(pool, entry)) return give;
  give.pages = entry.head.pages;
  if (entry.head.state == TE_STASH_STATE_LOST) return give;
  give.host_pages = entry.head.host_pages;
  give.host_at = ring_at(give.host_tail, pool.host_pages);
  const int64_t device = entry.head.pages - entry.head.host_pages;
  const int64_t free = give.device_tail - control.device.head;
  if (pool.policy == TE_STASH_BUMP && device != 0 && entry.map()[0] + device != pool.device_pages - free) {
    give.flags = TE_STASH_ORDER;
    return give;
  }
  give.device_pages = device;
  give.device_at = pool.policy == TE_STASH_RING ? ring_at(give.device_tail, pool.device_pages) : free;
  return give;
}

TE_HOST_DEVICE void write_device_ids(const Pool& pool, const Give& give, const Entry& entry, int64_t first,
                                     int64_t step) {
  if (pool.policy == TE_STASH_BUMP) return;
  for (int64_t i = first; i < give.device_pages; i += step) {
    const int64_t at = give.device_at + i;
    pool.device_ids[pool.policy == TE_STASH_RING ? wrapped(at, pool.device_pages) : at] = entry.map()[i];
  }
}

TE_HOST_DEVICE void write_ids(const Pool& pool, const Give& give, const Entry& entry, int64_t first, int64_t step) {
  write_device_ids(pool, give, entry, first, step);
  const int64_t skipped = entry.head.pages - entry.head.host_pages;
  for (int64_t i = first; i < give.host_pages; i += step) {
    pool.host_ids[wrapped(give.host_at + i, pool.host_pages)] = entry.map()[skipped + i];
  }
}

// Load number `load` is over: what calls behind it find free.
TE_HOST_DEVICE void finish_give(const Pool& pool, const Give& give, int64_t load) {
  Control& control = *pool.control;
  const int64_t next = (load + 1) % kLoads;
  control.device.tails[next] = give.device_tail + give.device_pages;
  control.host.tails[next] = give.host_tail + give.host_pages;
  control.demand.tails[next] = give.demand_tail + give.pages;
  add(control.report.device_in_use, -give.device_pages);
  add(control.report.host_in_use, -give.host_pages);
}

// ---- evicting ----

// The entry's device pages go to `to`; nothing is done where there are none of them.
struct Move {
  Take to;    // host pages alone
  Give give;  // device pages alone
};

TE_HOST_DEVICE Move plan_evict(const Pool& pool, const Entry& entry, int64_t low_water, int64_t load) {
  const Control& control = *pool.control;
  Move move{Take{}, Give::nothing(pool, load)};
  if (!holds(pool, entry) || entry.head.state != TE_STASH_STATE_STORED) return move;
  const int64_t pages = entry.head.pages - entry.head.host_pages;
  if (control.device.free(load) >= low_water || control.host.free(load) < pages) return move;
  move.to.host_pages = pages;
  move.to.host_at = ring_at(control.host.head, pool.host_pages);
  move.give.device_pages = pages;
  move.give.device_at =
      pool.policy == TE_STASH_RING ? ring_at(control.device.tail(load), pool.device_pages) : control.device.free(load);
  return move;
}

TE_HOST_DEVICE void write_move(const Pool& pool, const Move& move, Entry& entry, int64_t first, int64_t step) {
  write_device_ids(pool, move.give, entry, first, step);
  write_map(pool, move.to, entry, first, step);  // the pages of the stream that were on the device: the first ones
}

TE_HOST_DEVICE void finish_evict(const Pool& pool, const Move& move, int64_t load, Entry& entry) {
  te_stash_report& report = pool.control->report;
  finish_give(pool, move.give, load);
  const int64_t pages = move.to.host_pages;
  entry.head.host_pages += pages;
  pool.control->host.head += pages;
  report.evicted_pages += pages;
  add(report.host_in_use, pages);
  lift(report.host_peak, pool.host_pages - pool.control->host.free(load + 1));
}

// ---- a step starts ----

TE_HOST_DEVICE void first_ids(const Pool& pool, int64_t first, int64_t step) {
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
  if (leaked) raise(pool, TE_STASH_LEAKED, -1);
}

}  // namespace te::stash
