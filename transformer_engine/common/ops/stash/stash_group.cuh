// The state of a block: its group, its part of the tiles, and whether it is the last block. Used by stash.cu alone.
#pragma once

#include "ops/stash/stash_copy.cuh"

namespace te::stash::cuda {

namespace {

constexpr int kIds = 256;  // page ids that a load reads together with the counts

// A group in shared memory.
template <class AnyTable>
struct Group {
  int32_t ids[kIds];  // of its first device pages
  Layout layout;
  TilesOf<AnyTable> tiles;
  int32_t state;
  int64_t device_pages;  // of the group
  FreeSpace space;
  PageAlloc alloc;
  PageFree freed;
  Pipe pipes[kPipes];
};

// The blocks of one tier, and the position of this block among them.
struct Share {
  int tier, first, step;
  bool fills;  // writes tails: the device tier's blocks where there are any

  __device__ explicit Share(int device_blocks) {
    const int block = int(blockIdx.x);
    tier = block >= device_blocks ? 1 : 0;
    first = block - (tier == 0 ? 0 : device_blocks);
    step = tier == 0 ? device_blocks : int(gridDim.x) - device_blocks;
    fills = tier == 0 || device_blocks == 0;
  }
  __device__ int count(int64_t tiles) const { return tiles > first ? int((tiles - first + step - 1) / step) : 0; }
};

// Returns true in the last block that calls it, to which the writes of all other blocks are visible then. Sets words[0]
// of the entry back to 0.
__device__ bool is_last(Entry* entry) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&entry->head.words[0], 1u) == gridDim.x - 1;
    if (last) entry->head.words[0] = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Computes the tiles from counts and starts. Called by the first warp.
template <class AnyTable>
__device__ void cut(const Pool& pool, const AnyTable& table, Group<AnyTable>& group) {
  const int lane = int(threadIdx.x);
  if (lane < table.count) cut_member(table, group.layout, pool.grid, group.device_pages, lane, group.tiles);
  __syncwarp();
  if (lane == 0) sum_tiles(table.count, group.tiles);
}

// Reads the ids of the first pages. Called by the warps after the first one.
template <class Group, class IdAt>
__device__ __forceinline__ void read_ids(Group& group, int64_t pages, IdAt&& id_at) {
  for (int64_t i = int64_t(threadIdx.x) - kWarp; i < least(pages, kIds); i += blockDim.x - kWarp) {
    group.ids[i] = id_at(i);
  }
}

// Finds the group of a load. Called by all threads. The first warp starts all its reads before it uses one.
template <class AnyTable>
__device__ void find_group(const Pool& pool, const AnyTable& table, const Entry* entry, Group<AnyTable>& group) {
  const int lane = int(threadIdx.x);
  if (lane < kWarp) {
    const int64_t count = lane < table.count ? entry->head.counts[lane] : 0;
    const StoredEntry stored = StoredEntry::of(pool, *entry);
    if (lane < table.count) group.layout.counts[lane] = count;
    __syncwarp();
    if (lane == 0) {
      group.state = plan_load(stored, table, group.layout);
      group.device_pages = stored.pages - stored.host_pages;
    }
    __syncwarp();
    if (group.state == TE_STASH_STATE_STORED) cut(pool, table, group);
  } else {
    read_ids(group, entry->head.pages - entry->head.host_pages, [&](int64_t i) { return entry->map()[i]; });
  }
  __syncthreads();
}

}  // namespace

}  // namespace te::stash::cuda
