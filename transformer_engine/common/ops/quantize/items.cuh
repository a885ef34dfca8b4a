// Matrices of different sizes in one launch: each is an item with blocks of its own, kernel parameters have all items,
// and a block looks up which one is its own. A list of one costs no look-up.
#pragma once

#include "ops/quantize/tile.cuh"

namespace te::quantize {

constexpr int kMostItems = TE_QUANTIZE_ITEMS;
constexpr int kItemBytes = 32764;  // limit of kernel arguments since CUDA 12.1

template <class Item, int kMost>
struct Items {
  int32_t count;
  uint32_t first[kMost];  // the number of each item's first block
  Item of[kMost];

  // The item of block `number`, which becomes its number within the item.
  __device__ __forceinline__ const Item& find(uint32_t& number) const {
    if constexpr (kMost == 1) return of[0];
    int low = 0;
    for (int end = count; end - low > 1;) {
      const int middle = (low + end) / 2;
      if (first[middle] <= number) {
        low = middle;
      } else {
        end = middle;
      }
    }
    number -= first[low];
    return of[low];
  }
};

// Collects items, and calls run(items, blocks) whenever a launch is full; the last time by flush().
template <class Item, int kMost, class Run>
class Batches {
 public:
  static_assert(sizeof(Items<Item, kMost>) + 16 <= kItemBytes);

  Batches(const char* op, Run& run) : op_(op), run_(run) { items_.count = 0; }

  // tiles: of the item; without any it still gets a block.
  void add(const Item& item, int64_t tiles) {
    const uint32_t blocks = grid_of(op_, tiles);
    if (items_.count == kMost || blocks > uint32_t(INT32_MAX) - blocks_) flush();
    items_.first[items_.count] = blocks_;
    items_.of[items_.count++] = item;
    blocks_ += blocks;
  }

  void flush() {
    if (items_.count > 0) run_(items_, blocks_);
    items_.count = 0;
    blocks_ = 0;
  }

 private:
  const char* op_;
  Run& run_;
  uint32_t blocks_ = 0;
  Items<Item, kMost> items_;
};

}  // namespace te::quantize
