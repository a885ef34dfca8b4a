// What a block of a launch knows: its group, its share of the tiles, whether it is the last. For stash.cu alone.
#pragma once

#include "ops/stash/stash_copy.cuh"

namespace te::stash::cuda {

namespace {

constexpr int kIds = 256;  // pages of a group whose ids a load reads while it reads counts

// What a block knows of its group, in shared memory.
struct Group {
  int32_t ids[kIds];  // of its first device pages
  Layout layout;
  Tiles tiles;
  int32_t state;
  int64_t device_pages;  // of the group
  Room room;
  Take take;
  Give give;
  Pipe pipes[kPipes];
};

// Blocks of one tier and this one's place among them.
struct Share {
  int tier, first, step;
  bool fills;  // the tails are the device tier's work where there is one

  __device__ explicit Share(int device_blocks) {
    const int block = int(blockIdx.x);
    tier = block >= device_blocks ? 1 : 0;
    first = block - (tier == 0 ? 0 : device_blocks);
    step = tier == 0 ? device_blocks : int(gridDim.x) - device_blocks;
    fills = tier == 0 || device_blocks == 0;
  }
  __device__ int count(int64_t tiles) const { return tiles > first ? int((tiles - first + step - 1) / step) : 0; }
};

// True in the block that is the last to come here, whose threads then see each other; the entry's word is 0 again.
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

// Tiles of a group whose counts and starts are known; by the first warp.
__device__ void cut(const Pool& pool, const Table& table, Group& group) {
  const int lane = int(threadIdx.x);
  if (lane < table.count) cut_member(table, group.layout, pool.grid, group.device_pages, lane, group.tiles);
  __syncwarp();
  if (lane == 0) sum_tiles(table.count, group.tiles);
}

// By the warps behind the first one: the ids of the first of `pages` pages.
template <class IdAt>
__device__ __forceinline__ void read_ids(Group& group, int64_t pages, IdAt&& id_at) {
  for (int64_t i = int64_t(threadIdx.x) - kWarp; i < least(pages, kIds); i += blockDim.x - kWarp) {
    group.ids[i] = id_at(i);
  }
}

// What a load finds; by all threads. All that the first warp asks of memory it asks at once.
__device__ void find_group(const Pool& pool, const Table& table, const Entry* entry, Group& group) {
  const int lane = int(threadIdx.x);
  if (lane < kWarp) {
    const int64_t count = lane < table.count ? entry->head.counts[lane] : 0;
    const Held held = Held::of(pool, *entry);
    if (lane < table.count) group.layout.counts[lane] = count;
    __syncwarp();
    if (lane == 0) {
      group.state = plan_load(held, table, group.layout);
      group.device_pages = held.pages - held.host_pages;
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
