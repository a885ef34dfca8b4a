// stash, CUDA path. Each call is one launch. Every block makes the same decisions from control and the entry, which do
// not change during the launch, and copies its part of the tiles; the last block to finish writes the decisions down.
// No block waits for another.
#include <algorithm>
#include <cstddef>
#include <cstdio>

#include "ops/stash/stash.h"
#include "ops/stash/stash_copy.cuh"
#include "ops/stash/stash_debug.h"
#include "ops/stash/stash_group.cuh"

namespace te::stash::cuda {

namespace {

constexpr int kHostBlocks = 4;        // two saturate the host link; few, to leave SMs to other kernels
constexpr int64_t kFill = 4 * kTile;  // bytes of a tail that a block fills at once
constexpr int kDebugBlocks = 264;

template <class AnyTable>
__device__ __forceinline__ bool by_bulk(const AnyTable& table, int m) {
  if constexpr (kStrided<AnyTable>) {
    if (table.repeats[m] > 1 && table.pitch[m] % 16 != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(table.members[m].data) % 16 == 0;
}

template <class AnyTable>
__device__ __forceinline__ unsigned char* member_at(const AnyTable& table, const Tile& tile) {
  return static_cast<unsigned char*>(table.members[tile.member].data) + tile.in_member;
}

// The part of a tile for a bulk copy: address in the member, id of the page and offset in it.
struct BulkTile {
  unsigned char* member;
  int64_t in_page;
  int32_t page;
  uint32_t bytes;
};

// Copies this block's tiles from the members to the pages (kStore), or back. id_at(page): the id of a page of the
// group.
template <bool kStore, class AnyTable, class IdAt>
__device__ __forceinline__ void copy_tiles(const Pool& pool, const AnyTable& table, Group<AnyTable>& group,
                                           const Share& share, IdAt&& id_at) {
  extern __shared__ __align__(128) unsigned char stages[];
  const int64_t* before = group.tiles.before[share.tier];
  if (threadIdx.x < kBulkThreads) {
    const auto find = [&](int i) {
      const int64_t index = share.first + int64_t(i) * share.step;
      const Tile tile = tile_at(table, group.layout, pool.grid, group.tiles, share.tier, index);
      if (!by_bulk(table, tile.member)) return BulkTile{};
      return BulkTile{member_at(table, tile), tile.in_page, id_at(tile.page), uint32_t(tile.bytes) & ~15u};
    };
    copy_bulk(group.pipes, stages, share.count(before[table.count]), find, [&](const BulkTile& piece) {
      unsigned char* page = pool.page(share.tier == 1, piece.page) + piece.in_page;
      return Job{kStore ? piece.member : page, kStore ? page : piece.member, piece.bytes};
    });
    return;
  }
  const int thread = int(threadIdx.x) - kBulkThreads;
  for (int m = 0; m < table.count; ++m) {
    const bool bulk = by_bulk(table, m);
    if (before[m] == before[m + 1] || (bulk && live_bytes(table, group.layout, m) % 16 == 0)) continue;
    // For a member that bulk copies move, the end of its last tile (of each repeat's, among all tiles); else this
    // block's part of its tiles.
    const int64_t from = bulk && repeats_of(table, m) == 1 ? before[m + 1] - 1 : before[m];
    for (int64_t index = from + (share.first + m) % share.step; index < before[m + 1]; index += share.step) {
      const Tile tile = tile_of(table, group.layout, pool.grid, group.tiles, share.tier, m, index);
      const int64_t done = bulk ? tile.bytes & ~int64_t(15) : 0;
      unsigned char* member = member_at(table, tile) + done;
      unsigned char* page = pool.page(share.tier == 1, id_at(tile.page)) + tile.in_page + done;
      copy_by_hand(kStore ? page : member, kStore ? member : page, tile.bytes - done, thread);
    }
  }
}

// The first block's other warps call write(first, step) for ids while pages are copied. No call reads those ids before
// the last block has published them.
template <class Write>
__device__ __forceinline__ void write_beside(Write&& write) {
  if (blockIdx.x == 0 && threadIdx.x >= kBulkThreads) write(int(threadIdx.x) - kBulkThreads, kHandThreads);
}

// Fills this block's part of `bytes`. Called by the other warps.
__device__ void fill_share(unsigned char* to, int64_t bytes, uint32_t byte, int64_t first, int64_t step) {
  const int thread = int(threadIdx.x) - kBulkThreads;
  for (int64_t at = first * kFill; at < bytes; at += step * kFill) {
    fill(to + at, least(kFill, bytes - at), byte, thread, kHandThreads);
  }
}

// Writes tails, and 0xFF to the units of a lost group.
template <class AnyTable>
__device__ void fill_members(const AnyTable& table, const Group<AnyTable>& group, const Share& share) {
  if (!share.fills || threadIdx.x < kBulkThreads) return;
  for (int m = 0; m < table.count; ++m) {
    const Member& member = table.members[m];
    auto* data = static_cast<unsigned char*>(member.data);
    const int64_t live = live_bytes(table, group.layout, m);
    const int64_t end = tail_end(member, group.layout.counts[m]) * member.unit_bytes;
    const int64_t first = (share.first + m) % share.step;  // spreads short tails over blocks
    if (group.state != TE_STASH_STATE_STORED) fill_share(data, live, 0xff, first, share.step);
    fill_share(data + live, end - live, 0, first, share.step);
    for (int64_t repeat = 1; repeat < repeats_of(table, m); ++repeat) {
      if constexpr (kStrided<AnyTable>) data += table.pitch[m];
      const int64_t own = (first + repeat) % share.step;
      if (group.state != TE_STASH_STATE_STORED) fill_share(data, live, 0xff, own, share.step);
      fill_share(data + live, end - live, 0, own, share.step);
    }
  }
}

// Debug: fills freed pages with 0xFF. Called by all threads of the last block.
__device__ void poison(const Pool& pool, const Entry* entry, int64_t first, int64_t count) {
  if (pool.debug == 0) return;
  for (int64_t i = first; i < first + count; ++i) {
    fill(page_of(pool, *entry, i), pool.grid.page_bytes, 0xff, int(threadIdx.x), int(blockDim.x));
  }
}

// Called by all threads of the last block.
__device__ void free_pages(const Pool& pool, const PageFree& freed, Entry* entry, int64_t load, uint32_t flags,
                           bool keep) {
  poison(pool, entry, 0, freed.device_pages);
  poison(pool, entry, entry->head.pages - entry->head.host_pages, freed.host_pages);
  if (threadIdx.x != 0) return;
  raise_flags(pool, freed.flags | flags, entry->head.number);
  finish_free(pool, freed, load);
  if (!keep) entry->head.state = TE_STASH_STATE_EMPTY;
}

__device__ __noinline__ void end_process(int64_t number, int64_t pages) {
  printf(TE_STASH_NO_SPACE, static_cast<long long>(number), static_cast<long long>(pages));
  __trap();
}

template <class AnyTable>
__global__ void __launch_bounds__(kThreads, 1)
    store_kernel(const __grid_constant__ Pool pool, const __grid_constant__ AnyTable table, Entry* entry,
                 int64_t number, int64_t loads, int device_blocks) {
  __shared__ Group<AnyTable> group;
  const int lane = int(threadIdx.x);
  if (lane < kWarp) {
    const FreeSpace space = FreeSpace::of(pool, *entry, loads);
    uint32_t flags = 0;
    if (lane < table.count) {
      const Member& member = table.members[lane];
      group.layout.counts[lane] = live_units(read_counter(member), member, flags);
    }
    flags = __reduce_or_sync(~0u, flags);
    __syncwarp();
    if (lane == 0) {
      set_starts(table, group.layout);
      group.space = space;
      group.alloc = plan_store(pool, space, group.layout.starts[table.count], flags);
      group.device_pages = group.alloc.device_pages;
      const bool ends = group.alloc.state == TE_STASH_STATE_LOST && pool.trap != 0;
      if (ends && blockIdx.x == 0) end_process(number, group.alloc.pages);
    }
    __syncwarp();
    cut(pool, table, group);
  }
  __syncthreads();
  const PageAlloc& alloc = group.alloc;
  if (alloc.state == TE_STASH_STATE_STORED) {
    write_beside([&](int first, int step) { write_map(pool, alloc, *entry, first, step); });
    copy_tiles<true>(pool, table, group, Share(device_blocks),
                     [&](int64_t page) { return page_id(pool, alloc, page); });
  }
  if (is_last(entry) && threadIdx.x == 0) {
    finish_store(pool, group.space, Totals::of(pool, loads), alloc, table, group.layout, number, *entry);
  }
}

template <class AnyTable>
__global__ void __launch_bounds__(kThreads, 1)
    load_kernel(const __grid_constant__ Pool pool, const __grid_constant__ AnyTable table, Entry* entry, bool keep,
                int64_t load, int device_blocks) {
  __shared__ Group<AnyTable> group;
  if (threadIdx.x == kWarp) group.freed = keep ? PageFree::nothing(pool, load) : plan_free(pool, *entry, load);
  find_group(pool, table, entry, group);
  const Share share(device_blocks);
  write_beside([&](int first, int step) { return_ids(pool, group.freed, *entry, first, step); });
  if (group.state == TE_STASH_STATE_STORED) {
    copy_tiles<false>(pool, table, group, share, [&](int64_t page) {
      return page < least(group.device_pages, kIds) ? group.ids[page] : entry->map()[page];
    });
  }
  fill_members(table, group, share);
  if (!is_last(entry)) return;
  free_pages(pool, group.freed, entry, load, group.state == TE_STASH_STATE_EMPTY ? TE_STASH_EMPTY : 0, keep);
}

__global__ void __launch_bounds__(kThreads) drop_kernel(const __grid_constant__ Pool pool, Entry* entry, int64_t load) {
  __shared__ PageFree freed;
  if (threadIdx.x == 0) freed = plan_free(pool, *entry, load);
  __syncthreads();
  return_ids(pool, freed, *entry, threadIdx.x, blockDim.x);
  free_pages(pool, freed, entry, load, 0, false);
}

// A tile of a page that moves to the host.
struct EvictedTile {
  int32_t from, to;
  int64_t in_page;
  uint32_t bytes;
};

__global__ void __launch_bounds__(kThreads, 1)
    evict_kernel(const __grid_constant__ Pool pool, Entry* entry, int64_t low_water, int64_t load) {
  extern __shared__ __align__(128) unsigned char stages[];
  __shared__ Eviction eviction;
  __shared__ Pipe pipes[kPipes];
  if (threadIdx.x == 0) eviction = plan_evict(pool, *entry, low_water, load);
  __syncthreads();
  if (threadIdx.x < kBulkThreads) {
    const int64_t cells = pool.grid.page_cells;
    const auto find = [&](int i) {
      const int64_t cell = int64_t(blockIdx.x) + int64_t(i) * gridDim.x;
      const int64_t page = pool.grid.page_of_cell(cell), in_page = (cell - page * cells) * kTile;
      const int64_t left = entry->head.stream_bytes - page * pool.grid.page_bytes - in_page;
      const int64_t bytes = least(least(kTile, pool.grid.page_bytes - in_page), left);
      if (bytes <= 0) return EvictedTile{};
      return EvictedTile{entry->map()[page], page_id(pool, eviction.to, page), in_page, uint32_t(bytes)};
    };
    copy_bulk(pipes, stages, Share(0).count(eviction.to.host_pages * cells), find, [&](const EvictedTile& piece) {
      return Job{pool.page(false, piece.from) + piece.in_page, pool.page(true, piece.to) + piece.in_page, piece.bytes};
    });
  }
  if (!is_last(entry)) return;
  poison(pool, entry, 0, eviction.freed.device_pages);
  __syncthreads();  // before the map changes, which poison() reads
  write_eviction(pool, eviction, *entry, threadIdx.x, blockDim.x);
  if (threadIdx.x == 0) finish_evict(pool, eviction, load, *entry);
}

__global__ void __launch_bounds__(kThreads) start_kernel(const __grid_constant__ Pool pool, bool first) {
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  init_ids(pool, thread, int64_t(gridDim.x) * blockDim.x);
  if (thread == 0) stash::start_step(pool, first);
  if (pool.debug == 0) return;  // with debug there is one block
  __syncthreads();
  if (restore_canaries(pool, first, thread, blockDim.x)) raise_flags(pool, TE_STASH_CANARY, -1);
}

// The host may read at any time: a report whose step is not -1 is complete.
__global__ void post_kernel(const __grid_constant__ Pool pool, volatile te_stash_report* mailbox) {
  constexpr int kWords = sizeof(te_stash_report) / sizeof(uint64_t);
  constexpr int kStep = offsetof(te_stash_report, step) / sizeof(uint64_t);
  const auto* report = reinterpret_cast<const uint64_t*>(&pool.control->report);
  auto* words = reinterpret_cast<volatile uint64_t*>(mailbox);
  const int word = int(threadIdx.x);
  if (word == 0) mailbox->step = -1;
  __threadfence_system();
  __syncthreads();
  if (word < kWords && word != kStep) words[word] = report[word];
  __threadfence_system();
  __syncthreads();
  if (word == 0) words[kStep] = report[kStep];
}

// ---- launches of debug mode ----

__device__ void add_sum(uint64_t* total, uint64_t sum) {
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), sum);
}

// at(tile): address of the bytes of a tile.
template <class AnyTable, class At>
__device__ void add_tiles(const Pool& pool, const AnyTable& table, const Group<AnyTable>& group, uint64_t* total,
                          At&& at) {
  uint64_t sum = 0;
  for (int tier = 0; tier < 2; ++tier) {
    for (int64_t i = blockIdx.x; i < group.tiles.before[tier][table.count]; i += gridDim.x) {
      const Tile tile = tile_at(table, group.layout, pool.grid, group.tiles, tier, i);
      sum +=
          checksum_of(at(tile), tile.bytes, in_stream(table, group.layout, pool.grid, tile), threadIdx.x, blockDim.x);
    }
  }
  add_sum(total, sum);
}

// After a store: computes the checksum of its members.
template <class AnyTable>
__global__ void __launch_bounds__(kThreads)
    sum_members_kernel(const __grid_constant__ Pool pool, const __grid_constant__ AnyTable table, Entry* entry) {
  __shared__ Group<AnyTable> group;
  find_group(pool, table, entry, group);
  if (group.state == TE_STASH_STATE_STORED && entry->fresh != 0) {
    add_tiles(pool, table, group, &entry->head.checksum, [&](const Tile& tile) { return member_at(table, tile); });
  }
  if (is_last(entry) && threadIdx.x == 0) entry->fresh = 0;
}

// Before a load: compares the checksum of the pages, and checks their canaries.
template <class AnyTable>
__global__ void __launch_bounds__(kThreads)
    check_pages_kernel(const __grid_constant__ Pool pool, const __grid_constant__ AnyTable table, Entry* entry) {
  __shared__ Group<AnyTable> group;
  find_group(pool, table, entry, group);
  if (group.state != TE_STASH_STATE_STORED) return;
  add_tiles(pool, table, group, &entry->checked,
            [&](const Tile& tile) { return page_of(pool, *entry, tile.page) + tile.in_page; });
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (!canaries_intact(pool, *entry, thread, int64_t(gridDim.x) * blockDim.x)) {
    raise_flags(pool, TE_STASH_CANARY, entry->head.number);
  }
  if (!is_last(entry) || threadIdx.x != 0) return;
  if (__ldcg(&entry->checked) != entry->head.checksum) {
    raise_flags(pool, TE_STASH_CHANGED, entry->head.number);
  }
  entry->checked = 0;
}

// ---- launches ----

// At most as many blocks as there can be tiles. Host pages have blocks of their own.
struct Blocks {
  int device, all;

  Blocks(const Pool& pool, const StridedTable& table, int32_t sm_budget) {
    int64_t tiles = 0;
    for (int m = 0; m < table.count; ++m) {
      tiles += (table.members[m].most * table.members[m].unit_bytes / kTile + 1) * table.repeats[m];
    }
    const int host = pool.host_pages == 0 ? 0 : int(std::min<int64_t>(kHostBlocks, tiles));
    device = pool.device_pages == 0 && host != 0 ? 0 : int(std::min<int64_t>(sm_budget, tiles));
    all = device + host;
  }
};

// launch(table), as a Table where each member is one buffer.
template <class Launch>
void with_table(const StridedTable& table, Launch&& launch) {
  const bool strided = std::any_of(table.repeats, table.repeats + table.count, [](int64_t n) { return n > 1; });
  strided ? launch(table) : launch(static_cast<const Table&>(table));
}

}  // namespace

void prepare() {
  const auto more_shared = [](auto kernel) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStageBytes),
               "te_stash_pool_create: cudaFuncSetAttribute");
  };
  more_shared(store_kernel<Table>);
  more_shared(load_kernel<Table>);
  more_shared(store_kernel<StridedTable>);
  more_shared(load_kernel<StridedTable>);
  more_shared(evict_kernel);
  // Loads the kernel now: the first call of a step may be captured, or run beside kernels that must not be delayed.
  cudaFuncAttributes unused;
  check_cuda(cudaFuncGetAttributes(&unused, drop_kernel), "te_stash_pool_create: cudaFuncGetAttributes");
}

void start_step(const Pool& pool, bool first, te_stream stream) {
  const int64_t blocks = (std::max(pool.device_pages, pool.host_pages) + kThreads - 1) / kThreads;
  const int64_t some = pool.debug != 0 ? 1 : std::clamp<int64_t>(blocks, 1, 32);
  start_kernel<<<dim3(unsigned(some)), kThreads, 0, cudaStream_t(stream)>>>(pool, first);
  check_launch("te_stash_reset");
}

void store(const Pool& pool, const StridedTable& members, Entry* entry, int64_t number, int64_t loads,
           int32_t sm_budget, te_stream stream) {
  const Blocks blocks(pool, members, sm_budget);
  with_table(members, [&](const auto& table) {
    store_kernel<<<dim3(unsigned(blocks.all)), kThreads, kStageBytes, cudaStream_t(stream)>>>(
        pool, table, entry, number, loads, blocks.device);
    check_launch("te_stash_store");
    if (pool.debug == 0) return;
    sum_members_kernel<<<kDebugBlocks, kThreads, 0, cudaStream_t(stream)>>>(pool, table, entry);
    check_launch("te_stash_store");
  });
}

void load(const Pool& pool, const StridedTable& members, Entry* entry, bool keep, int64_t loads, int32_t sm_budget,
          te_stream stream) {
  const Blocks blocks(pool, members, sm_budget);
  with_table(members, [&](const auto& table) {
    if (pool.debug != 0) {
      check_pages_kernel<<<kDebugBlocks, kThreads, 0, cudaStream_t(stream)>>>(pool, table, entry);
      check_launch("te_stash_load");
    }
    load_kernel<<<dim3(unsigned(blocks.all)), kThreads, kStageBytes, cudaStream_t(stream)>>>(pool, table, entry, keep,
                                                                                             loads, blocks.device);
    check_launch("te_stash_load");
  });
}

void drop(const Pool& pool, Entry* entry, int64_t loads, te_stream stream) {
  drop_kernel<<<1, kThreads, 0, cudaStream_t(stream)>>>(pool, entry, loads);
  check_launch("te_stash_drop");
}

void evict(const Pool& pool, Entry* entry, int64_t low_water, int64_t loads, te_stream stream) {
  evict_kernel<<<kHostBlocks, kThreads, kStageBytes, cudaStream_t(stream)>>>(pool, entry, low_water, loads);
  check_launch("te_stash_evict");
}

void post(const Pool& pool, te_stash_report* mailbox, te_stream stream) {
  post_kernel<<<1, 32, 0, cudaStream_t(stream)>>>(pool, mailbox);
  check_launch("te_stash_post");
}

void read(void* out, const void* from, size_t bytes, te_stream stream) {
  check_cuda(cudaMemcpyAsync(out, from, bytes, cudaMemcpyDeviceToHost, cudaStream_t(stream)), "te_stash_read");
}

void wait() { check_cuda(cudaDeviceSynchronize(), "te_stash_read_map"); }

uint64_t capture_of(te_stream stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  check_cuda(cudaStreamGetCaptureInfo(cudaStream_t(stream), &status, &number), "te_stash_capture");
  return status == cudaStreamCaptureStatusNone ? 0 : uint64_t(number);
}

}  // namespace te::stash::cuda
