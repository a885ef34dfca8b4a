// stash, contract: checks pools, members and entries, counts calls, and calls the CPU path (stash_cpu.cpp) or the CUDA
// path (stash.cu).
#include "ops/stash/stash.h"

#include <algorithm>
#include <cstring>

#include "core/device.h"

namespace te::stash {

namespace {

constexpr int64_t kMostPages = INT32_MAX;              // of a tier: ids have 32 bits
constexpr int64_t kMostBytes = int64_t(1) << 56;       // of a tier and of a member: no sum of them overflows
constexpr size_t kPoolAlignment = TE_STASH_ALIGNMENT;  // of memory from the caller

size_t stride_of(const te_stash_options& o) { return o.page_bytes + (o.debug != 0 ? size_t(kCanary) : 0); }

void check_pages_of_tier(const char* op, const char* argument, int64_t pages, const te_stash_options& o) {
  if (pages < 0 || pages > kMostPages) bad_argument(op, argument, pages, concat("a number from 0 to ", kMostPages));
  if (pages != 0 && stride_of(o) > size_t(kMostBytes / pages)) {
    bad_argument(op, argument, concat(pages, " of ", o.page_bytes, " bytes"), concat("at most ", kMostBytes, " bytes"));
  }
}

void check_page_bytes(const char* op, const char* argument, size_t page_bytes) {
  if (page_bytes == 0 || page_bytes % TE_STASH_ALIGNMENT != 0 || page_bytes > size_t(kMostBytes)) {
    bad_argument(op, argument, page_bytes, concat("a multiple of ", TE_STASH_ALIGNMENT, ", not 0"));
  }
}

void check_options(const char* op, const te_stash_options& o) {
  if (o.device < TE_DEVICE_CPU) bad_argument(op, "options.device", o.device, "-1 (CPU) or a CUDA ordinal");
  if (o.policy < TE_STASH_RING || o.policy > TE_STASH_BUMP) {
    bad_argument(op, "options.policy", o.policy, "a te_stash_policy");
  }
  check_page_bytes(op, "options.page_bytes", o.page_bytes);
  check_pages_of_tier(op, "options.device_pages", o.device_pages, o);
  check_pages_of_tier(op, "options.host_pages", o.host_pages, o);
  if (o.sm_budget < 1 || o.sm_budget > 65535) bad_argument(op, "options.sm_budget", o.sm_budget, "blocks, 1 to 65535");
}

// Memory from the caller.
void check_memory(const char* op, const char* argument, const void* data) {
  if (data == nullptr) bad_argument(op, argument, "NULL", "memory");
  if (reinterpret_cast<uintptr_t>(data) % kPoolAlignment != 0) {
    bad_argument(op, argument, data, concat("memory on ", kPoolAlignment, " bytes"));
  }
}

Entry* entry_of(const char* op, const void* entry) {
  check_memory(op, "entry", entry);
  return static_cast<Entry*>(const_cast<void*>(entry));
}

size_t ids_bytes(int64_t pages) { return size_t(aligned(pages * int64_t(sizeof(int32_t)))); }
size_t list_bytes(const te_stash_options& o) { return o.policy == TE_STASH_BUMP ? 0 : ids_bytes(o.device_pages); }

// argument(field): the name of a field of the member.
template <class Argument>
void check_repeats(const char* op, const te_stash_member& member, Argument&& argument) {
  if (member.repeats < 0) bad_argument(op, argument("repeats").c_str(), member.repeats, "a number of buffers >= 0");
  if (member.repeats < 2) return;
  const int64_t bytes = member.most * member.unit_bytes;
  if (member.pitch < bytes) {
    bad_argument(op, argument("pitch").c_str(), member.pitch,
                 concat("at least ", bytes, ", the bytes of a buffer: repeats may not overlap"));
  }
  const int64_t each = std::max(member.pitch, aligned(bytes));
  if (member.repeats > kMostBytes / std::max<int64_t>(each, 1)) {
    bad_argument(op, argument("repeats").c_str(), concat(member.repeats, " of ", each, " bytes"),
                 concat("at most ", kMostBytes, " bytes"));
  }
}

// Checks sizes; each call checks the other fields that it reads.
StridedTable table_of(const char* op, const te_stash_member* members, int32_t count) {
  if (count < 1 || count > kMembers) {
    bad_argument(op, "count", count, concat("1 to ", kMembers, " members; store more as several groups"));
  }
  if (members == nullptr) bad_argument(op, "members", "NULL", concat(count, " members"));
  StridedTable table{};
  table.count = count;
  for (int32_t m = 0; m < count; ++m) {
    const auto argument = [&](const char* field) { return concat("members[", m, "].", field); };
    const te_stash_member& member = members[m];
    table.members[m] = {member.data,       member.counter, member.counter_bytes, member.tail,
                        member.unit_bytes, member.most,    member.tile_units,    member.behind};
    if (member.unit_bytes < 1) bad_argument(op, argument("unit_bytes").c_str(), member.unit_bytes, "bytes, not 0");
    if (member.most < 0) bad_argument(op, argument("most").c_str(), member.most, "a number of units >= 0");
    if (member.behind < 0) bad_argument(op, argument("behind").c_str(), member.behind, "a number of units >= 0");
    if (member.most > kMostBytes / member.unit_bytes) {
      bad_argument(op, argument("most").c_str(), concat(member.most, " units of ", member.unit_bytes, " bytes"),
                   concat("at most ", kMostBytes, " bytes"));
    }
    table.repeats[m] = std::max<int64_t>(member.repeats, 1);
    table.pitch[m] = member.pitch;
    check_repeats(op, member, argument);
  }
  return table;
}

void check_data(const char* op, const Table& table) {
  for (int32_t m = 0; m < table.count; ++m) {
    if (table.members[m].data != nullptr || table.members[m].most == 0) continue;
    bad_argument(op, concat("members[", m, "].data").c_str(), "NULL", "memory");
  }
}

StridedTable stored_table(const char* op, const te_stash_member* members, int32_t count) {
  const StridedTable table = table_of(op, members, count);
  check_data(op, table);
  for (int32_t m = 0; m < count; ++m) {
    const Member& member = table.members[m];
    const auto argument = [&](const char* field) { return concat("members[", m, "].", field); };
    const int32_t bytes = member.counter_bytes;
    if (bytes != 1 && bytes != 4 && bytes != 8) {
      bad_argument(op, argument("counter_bytes").c_str(), bytes, "1, 4 or 8");
    }
    if (member.counter == nullptr) bad_argument(op, argument("counter").c_str(), "NULL", "an integer on the device");
    if (reinterpret_cast<uintptr_t>(member.counter) % uintptr_t(bytes) != 0) {
      bad_argument(op, argument("counter").c_str(), member.counter, concat("an address on ", bytes, " bytes"));
    }
  }
  return table;
}

StridedTable loaded_table(const char* op, const te_stash_member* members, int32_t count) {
  StridedTable table = table_of(op, members, count);
  check_data(op, table);
  for (int32_t m = 0; m < count; ++m) {
    Member& member = table.members[m];
    if (member.tail < TE_STASH_TAIL_KEEP || member.tail > TE_STASH_TAIL_ZERO) {
      bad_argument(op, concat("members[", m, "].tail").c_str(), member.tail, "a te_stash_tail");
    }
    if (member.tail != TE_STASH_TAIL_TILE) continue;
    if (member.tile_units < 1) {
      bad_argument(op, concat("members[", m, "].tile_units").c_str(), member.tile_units, "units, at least 1");
    }
    if (member.tile_units > member.most)
      member.tile_units = member.most == 0 ? 1 : member.most;  // which is the same tail
  }
  return table;
}

Pool view_of(const te_stash_options& o, unsigned char* host_data) {
  Pool pool{};
  auto* memory = static_cast<unsigned char*>(o.control);
  pool.control = static_cast<Control*>(o.control);
  pool.gate = o.gate;
  memory += aligned(sizeof(Control));
  pool.device_ids = reinterpret_cast<int32_t*>(memory);
  pool.host_ids = reinterpret_cast<int32_t*>(memory + list_bytes(o));
  pool.device_data = static_cast<unsigned char*>(o.pages);
  pool.host_data = host_data;
  pool.device_pages = o.device_pages;
  pool.host_pages = o.host_pages;
  pool.stride = int64_t(stride_of(o));
  pool.grid = {int64_t(o.page_bytes), ceil_div(int64_t(o.page_bytes), kTile)};
  pool.policy = o.policy;
  pool.trap = o.trap != 0;
  pool.debug = o.debug != 0;
  return pool;
}

// Runs body(op, pool) under the pool's lock and returns its error as a status.
template <class Body>
te_status with_pool(const char* op, const te_stash_pool* pool, Body&& body) {
  return c_guard([&] {
    auto& found = const_cast<te_stash_pool&>(object(op, "pool", pool));
    const std::lock_guard<std::mutex> lock(found.mutex);
    body(op, found);
  });
}

std::unique_ptr<pinned::Arena> make_arena(const char* op, int32_t device) {
  return std::make_unique<pinned::Arena>(
      pinned::account_of("stash"), [=](size_t bytes) { return pinned::allocate(op, device, bytes); },
      [=](void* data) { pinned::release(device, data); }, 0, false);
}

void start_step([[maybe_unused]] const char* op, te_stash_pool& pool, bool first, te_stream stream) {
  TE_ON_DEVICE_OF(op, pool.options, cpu::start_step(pool.view, first), cuda::start_step(pool.view, first, stream));
  pool.loads = 0;
  pool.evicted = false;
}

void copy_out([[maybe_unused]] const char* op, const te_stash_pool& pool, void* out, const void* from, size_t bytes,
              te_stream stream) {
  TE_ON_DEVICE_OF(op, pool.options, std::memcpy(out, from, bytes), cuda::read(out, from, bytes, stream));
}

void wait_for_device([[maybe_unused]] const char* op, const te_stash_pool& pool) {
  TE_ON_DEVICE_OF(op, pool.options, (void)0, cuda::wait());
}

// Called after a load, drop or evict was enqueued: a call that failed is not counted.
void count_load(te_stash_pool& pool, bool evict) {
  ++pool.loads;
  pool.evicted = evict;
}

}  // namespace

}  // namespace te::stash

extern "C" {

using namespace te::stash;
using te::bad_argument;
using te::c_guard;
using te::check_place;
using te::object;

size_t te_stash_pages_bytes(te_stash_options options) {
  size_t bytes = 0;
  c_guard([&] {
    check_options("te_stash_pages_bytes", options);
    bytes = size_t(options.device_pages) * stride_of(options);
  });
  return bytes;
}

size_t te_stash_control_bytes(te_stash_options options) {
  size_t bytes = 0;
  c_guard([&] {
    check_options("te_stash_control_bytes", options);
    bytes = size_t(aligned(sizeof(Control))) + list_bytes(options) + ids_bytes(options.host_pages);
  });
  return bytes;
}

size_t te_stash_entry_bytes(int64_t most_pages) { return sizeof(Entry) + ids_bytes(most_pages < 0 ? 0 : most_pages); }

te_status te_stash_most_pages(const te_stash_member* members, int32_t count, size_t page_bytes, int64_t* pages) {
  return c_guard([&] {
    const char* op = "te_stash_most_pages";
    const StridedTable table = table_of(op, members, count);
    check_page_bytes(op, "page_bytes", page_bytes);
    check_place(op, "pages", pages);
    Layout layout;
    for (int32_t m = 0; m < count; ++m) layout.counts[m] = members[m].most;
    set_starts(table, layout);
    *pages = ceil_div(layout.starts[count], int64_t(page_bytes));
  });
}

te_status te_stash_pool_create(te_stash_options options, te_stream stream, te_stash_pool** out) {
  return c_guard([&] {
    const char* op = "te_stash_pool_create";
    check_place(op, "out", out);
    check_options(op, options);
    if (options.device_pages != 0) check_memory(op, "options.pages", options.pages);
    check_memory(op, "options.control", options.control);
#if !defined(TE_WITH_CUDA)
    if (options.device != TE_DEVICE_CPU) te::no_cuda(op);
#endif
    auto pool = std::make_unique<te_stash_pool>();
    pool->options = options;
    unsigned char* host = nullptr;
    if (options.host_pages != 0) {
      pool->arena = make_arena(op, options.device);
      host = pool->arena->take(op, size_t(options.host_pages) * stride_of(options), true).data;
    }
    pool->view = view_of(options, host);
    TE_ON_DEVICE_OF(op, options, (void)0, cuda::prepare());
    start_step(op, *pool, true, stream);
    *out = pool.release();
  });
}

te_status te_stash_pool_destroy(te_stash_pool* pool) {
  return c_guard([&] { delete &object("te_stash_pool_destroy", "pool", pool); });
}

te_status te_stash_reset(te_stash_pool* pool, te_stream stream) {
  return with_pool("te_stash_reset", pool, [&](const char* op, te_stash_pool& p) { start_step(op, p, false, stream); });
}

te_status te_stash_store(te_stash_pool* pool, const te_stash_member* members, int32_t count, void* entry,
                         int64_t number, te_stream stream) {
  return with_pool("te_stash_store", pool, [&](const char* op, te_stash_pool& p) {
    const StridedTable table = stored_table(op, members, count);
    Entry* e = entry_of(op, entry);
    TE_ON_DEVICE_OF(op, p.options, cpu::store(p.view, table, *e, number, p.loads),
                    cuda::store(p.view, table, e, number, p.loads, p.options.sm_budget, stream));
  });
}

te_status te_stash_load(te_stash_pool* pool, const te_stash_member* members, int32_t count, void* entry, int32_t keep,
                        te_stream stream) {
  return with_pool("te_stash_load", pool, [&](const char* op, te_stash_pool& p) {
    const StridedTable table = loaded_table(op, members, count);
    Entry* e = entry_of(op, entry);
    TE_ON_DEVICE_OF(op, p.options, cpu::load(p.view, table, *e, keep != 0, p.loads),
                    cuda::load(p.view, table, e, keep != 0, p.loads, p.options.sm_budget, stream));
    count_load(p, false);
  });
}

te_status te_stash_drop(te_stash_pool* pool, void* entry, te_stream stream) {
  return with_pool("te_stash_drop", pool, [&](const char* op, te_stash_pool& p) {
    Entry* e = entry_of(op, entry);
    TE_ON_DEVICE_OF(op, p.options, cpu::drop(p.view, *e, p.loads), cuda::drop(p.view, e, p.loads, stream));
    count_load(p, false);
  });
}

te_status te_stash_evict(te_stash_pool* pool, void* entry, int64_t low_water, te_stream stream) {
  return with_pool("te_stash_evict", pool, [&](const char* op, te_stash_pool& p) {
    if (p.options.policy == TE_STASH_BUMP) {
      bad_argument(op, "pool", "of policy BUMP", "RING or STACK; pages of BUMP can be freed in the reverse order only");
    }
    Entry* e = entry_of(op, entry);
    TE_ON_DEVICE_OF(op, p.options, cpu::evict(p.view, *e, low_water, p.loads),
                    cuda::evict(p.view, e, low_water, p.loads, stream));
    count_load(p, true);
  });
}

int32_t te_stash_load_waits(const te_stash_pool* pool) {
  if (pool == nullptr) return 1;
  const std::lock_guard<std::mutex> lock(pool->mutex);
  return pool->options.policy != TE_STASH_RING || pool->evicted || pool->loads % kWaits == 0;
}

te_status te_stash_read(te_stash_pool* pool, te_stash_report* out, te_stream stream) {
  return with_pool("te_stash_read", pool, [&](const char* op, te_stash_pool& p) {
    check_place(op, "out", out);
    copy_out(op, p, out, p.view.control, sizeof(te_stash_report), stream);
  });
}

te_status te_stash_post(te_stash_pool* pool, te_stash_report* mailbox, te_stream stream) {
  return with_pool("te_stash_post", pool, [&](const char* op, te_stash_pool& p) {
    check_place(op, "mailbox", mailbox);
    TE_ON_DEVICE_OF(op, p.options, cpu::post(p.view, *mailbox), cuda::post(p.view, mailbox, stream));
  });
}

int32_t te_stash_report_in(const void* mailbox, te_stash_report* out) {
  const auto step = [&] {
    return __atomic_load_n(&static_cast<const te_stash_report*>(mailbox)->step, __ATOMIC_ACQUIRE);
  };
  const int64_t before = step();
  if (before < 0) return 0;
  std::memcpy(out, mailbox, sizeof(te_stash_report));
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return step() == before && out->step == before ? 1 : 0;
}

te_status te_stash_read_entry(te_stash_pool* pool, const void* entry, te_stash_entry* out, te_stream stream) {
  return with_pool("te_stash_read_entry", pool, [&](const char* op, te_stash_pool& p) {
    check_place(op, "out", out);
    copy_out(op, p, out, entry_of(op, entry), sizeof(te_stash_entry), stream);
  });
}

te_status te_stash_read_map(te_stash_pool* pool, const void* entry, int32_t* ids, int64_t most, int64_t* count) {
  return with_pool("te_stash_read_map", pool, [&](const char* op, te_stash_pool& p) {
    check_place(op, "count", count);
    if (most < 0) bad_argument(op, "most", most, "a number >= 0");
    const Entry* e = entry_of(op, entry);
    wait_for_device(op, p);
    te_stash_entry head;
    copy_out(op, p, &head, e, sizeof(head), nullptr);
    wait_for_device(op, p);
    *count = head.state == TE_STASH_STATE_STORED ? head.pages : 0;
    if (ids == nullptr) return;
    copy_out(op, p, ids, e->map(), size_t(least(most, *count)) * sizeof(int32_t), nullptr);
    wait_for_device(op, p);
  });
}

te_status te_stash_capture(te_stream stream, uint64_t* number) {
  return c_guard([&] {
    const char* op = "te_stash_capture";
    check_place(op, "number", number);
#if defined(TE_WITH_CUDA)
    *number = cuda::capture_of(stream);
#else
    (void)stream;
    te::no_cuda(op);
#endif
  });
}

}  // extern "C"
