// The memory of one group: storages of saved tensors (segments) and the counted rows in them (regions).
// Nothing is copied here.
#pragma once

#include <c10/core/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "core/common.h"

namespace te_torch {

uint32_t version_of(const Tensor& t);  // 0 in inference mode, where torch tracks no versions

// Rows of row_bytes, stored one after the other from `offset` on, in bytes of a segment's memory; `repeats` times, each
// `pitch` bytes after the one before.
struct StashRegion {
  // Remembers the counter's version.
  StashRegion(int64_t start, int64_t row_count, int64_t bytes, int64_t unit, const Tensor& live_counter);

  int64_t end() const { return offset + (repeats - 1) * pitch + rows * row_bytes; }
  bool is_counted_by(const Tensor& other) const;
  // The same rows are counted by `other` too: those of the larger count are live, which the device computes.
  void count_also(const Tensor& other);
  bool counter_changed() const;  // written in place since the region was made
  int64_t trailing_units() const;

  int64_t offset, rows, row_bytes, unit_rows;
  int64_t trailing_rows = 0;  // rows behind the live ones that are copied too (autograd/trailing_rows.h)
  int64_t repeats = 1, pitch = 0;
  bool panels = false;  // a unit is a panel of 128 rows of tokens
  Tensor counter;
  int64_t counter_version;
  std::vector<Tensor> counters = {};  // of which `counter` is the largest, where there are several
};

// Memory with stashed regions: the original until it is freed, after a reload the new memory.
struct StashSegment {
  StashSegment(c10::Storage memory, int64_t first, int64_t count)
      : storage(std::move(memory)), start(first), bytes(count) {}

  char* data() const { return static_cast<char*>(storage.mutable_data()) + start; }

  c10::Storage storage;  // null between the freeing of the original and the reload
  int64_t start, bytes;  // offset into the storage, and size
  std::vector<StashRegion> regions;
};
using StashSegments = std::vector<std::shared_ptr<StashSegment>>;

}  // namespace te_torch
