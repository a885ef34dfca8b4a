// Debug mode: what lies between pages and what is added up of a group's bytes, on the CPU and CUDA alike.
#pragma once

#include "ops/stash/stash_pages.h"

namespace te::stash {

// Sums of these tell changed bytes and bytes in another place; the order of adding does not matter.
TE_HOST_DEVICE uint64_t mixed(uint64_t word, uint64_t position) {
  uint64_t z = word + (position + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93ull;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93ull;
  return z ^ (z >> 32);
}

// Bytes of a tile in words of the stream; a member's last word is filled up with 0.
TE_HOST_DEVICE uint64_t sum_of(const unsigned char* bytes, int64_t count, int64_t in_stream, int64_t first,
                               int64_t step) {
  uint64_t sum = 0;
  for (int64_t word = first; word * 8 < count; word += step) {
    uint64_t value = 0;
    for (int64_t b = 0; b < 8 && word * 8 + b < count; ++b) value |= uint64_t(bytes[word * 8 + b]) << (8 * b);
    sum += mixed(value, uint64_t(in_stream / 8 + word));
  }
  return sum;
}

TE_HOST_DEVICE uint64_t* canary_of(const Pool& pool, unsigned char* page) {
  return reinterpret_cast<uint64_t*>(page + pool.grid.page_bytes);
}

TE_HOST_DEVICE bool is_canary(const Pool& pool, unsigned char* page) {
  const uint64_t* words = canary_of(pool, page);
  bool whole = true;
  for (int i = 0; i < int(kCanary / 8); ++i) whole = whole && words[i] == kCanaryWord;
  return whole;
}

TE_HOST_DEVICE void write_canary(const Pool& pool, unsigned char* page) {
  for (int i = 0; i < int(kCanary / 8); ++i) canary_of(pool, page)[i] = kCanaryWord;
}

// All pages of both tiers: whether one's canary is broken, which is mended (`first`: they are written for the first
// time).
TE_HOST_DEVICE bool mend_canaries(const Pool& pool, bool first_time, int64_t first, int64_t step) {
  bool broken = false;
  for (int64_t i = first; i < pool.device_pages + pool.host_pages; i += step) {
    const bool host = i >= pool.device_pages;
    unsigned char* page = pool.page(host, int32_t(host ? i - pool.device_pages : i));
    broken = broken || (!first_time && !is_canary(pool, page));
    write_canary(pool, page);
  }
  return broken;
}

// Of the pages of an entry that holds some.
TE_HOST_DEVICE bool canaries_hold(const Pool& pool, const Entry& entry, int64_t first, int64_t step) {
  bool whole = true;
  for (int64_t i = first; i < entry.head.pages; i += step) whole = whole && is_canary(pool, page_of(pool, entry, i));
  return whole;
}

}  // namespace te::stash
