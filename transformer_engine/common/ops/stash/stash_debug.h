// Debug mode, for the CPU and CUDA: canaries between pages, and checksums of groups.
#pragma once

#include "ops/stash/stash_pages.h"

namespace te::stash {

// A sum of these changes with the bytes and with their positions, and does not depend on the order of addition.
TE_HOST_DEVICE uint64_t mix(uint64_t word, uint64_t position) {
  uint64_t z = word + (position + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93ull;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93ull;
  return z ^ (z >> 32);
}

// Sum over the words of a tile; the last word of a member is padded with 0.
TE_HOST_DEVICE uint64_t checksum_of(const unsigned char* bytes, int64_t count, int64_t in_stream, int64_t first,
                                    int64_t step) {
  uint64_t sum = 0;
  for (int64_t word = first; word * 8 < count; word += step) {
    uint64_t value = 0;
    for (int64_t b = 0; b < 8 && word * 8 + b < count; ++b) value |= uint64_t(bytes[word * 8 + b]) << (8 * b);
    sum += mix(value, uint64_t(in_stream / 8 + word));
  }
  return sum;
}

TE_HOST_DEVICE uint64_t* canary_of(const Pool& pool, unsigned char* page) {
  return reinterpret_cast<uint64_t*>(page + pool.grid.page_bytes);
}

TE_HOST_DEVICE bool is_canary_intact(const Pool& pool, unsigned char* page) {
  const uint64_t* words = canary_of(pool, page);
  bool intact = true;
  for (int i = 0; i < int(kCanary / 8); ++i) intact = intact && words[i] == kCanaryWord;
  return intact;
}

TE_HOST_DEVICE void write_canary(const Pool& pool, unsigned char* page) {
  for (int i = 0; i < int(kCanary / 8); ++i) canary_of(pool, page)[i] = kCanaryWord;
}

// Returns whether a canary of either tier is broken, and writes all of them again. first_time: writes them only.
TE_HOST_DEVICE bool restore_canaries(const Pool& pool, bool first_time, int64_t first, int64_t step) {
  bool broken = false;
  for (int64_t i = first; i < pool.device_pages + pool.host_pages; i += step) {
    const bool host = i >= pool.device_pages;
    unsigned char* page = pool.page(host, int32_t(host ? i - pool.device_pages : i));
    broken = broken || (!first_time && !is_canary_intact(pool, page));
    write_canary(pool, page);
  }
  return broken;
}

// Of the pages of a stored entry.
TE_HOST_DEVICE bool canaries_intact(const Pool& pool, const Entry& entry, int64_t first, int64_t step) {
  bool intact = true;
  for (int64_t i = first; i < entry.head.pages; i += step)
    intact = intact && is_canary_intact(pool, page_of(pool, entry, i));
  return intact;
}

}  // namespace te::stash
