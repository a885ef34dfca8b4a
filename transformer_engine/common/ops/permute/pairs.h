// The pairs of a token, read from either map (transformer_engine/permute.h), on host and device alike, and what both
// paths share of their sums.
#pragma once

#include "core/dtype.h"
#include "core/tensor.h"
#include "transformer_engine/permute.h"

namespace te::permute {

constexpr int kLanesOfSum = 32;  // partial sums of an element of dprobs: a warp's lanes, each with 16 bytes
template <class T>
constexpr int kVector = 16 / int(sizeof(T));

struct Pairs {
  const int32_t* map = nullptr;
  const int64_t* pad_offsets = nullptr;
  int64_t rows = 0;     // of the buffer
  int32_t width = 0;    // of the map
  int32_t experts = 0;  // of a mask; 0: a map of ids

  TE_HOST_DEVICE int count(int64_t token) const {
    if (experts == 0) return width;
    const int32_t n = map[token * width + width - 1];
    return n < 0 ? 0 : n < experts ? n : experts;
  }

  // The pair's column of the probabilities; for a mask its expert.
  TE_HOST_DEVICE int column(int64_t token, int pair) const {
    return experts == 0 ? pair : map[token * width + experts + pair];
  }

  // -1: it has none in the buffer. Contents of the map that are out of range give -1 too.
  TE_HOST_DEVICE int64_t row(int64_t token, int pair) const {
    int64_t row = map[token * width + pair];
    if (row < 0) return -1;
    if (experts > 0) {
      const int expert = column(token, pair);
      if (expert < 0 || expert >= experts) return -1;
      if (pad_offsets != nullptr) row += pad_offsets[expert];
    }
    return row >= 0 && row < rows ? row : -1;
  }
};

inline Pairs pairs_of(const te_permute_map& map, int64_t rows) {
  return {static_cast<const int32_t*>(map.rows.data), static_cast<const int64_t*>(map.pad_offsets.data), rows,
          int32_t(map.rows.cols), map.of_mask ? int32_t((map.rows.cols - 1) / 2) : 0};
}

// Of a float's bits, in an unsigned integer of its size.
template <class Bits>
TE_HOST_DEVICE bool is_zero(Bits bits) {
  return Bits(bits << 1) == 0;
}

// Whether a row takes part: not if it has a probability of 0. row_probs may be null.
TE_HOST_DEVICE bool takes_part(const void* row_probs, int bytes, int64_t row) {
  if (row_probs == nullptr) return true;
  if (bytes == 2) return !is_zero(static_cast<const uint16_t*>(row_probs)[row]);
  if (bytes == 4) return !is_zero(static_cast<const uint32_t*>(row_probs)[row]);
  return !is_zero(static_cast<const uint64_t*>(row_probs)[row]);
}

// Probabilities that move with their rows, as bytes.
struct RowProbs {
  const char* in;  // [tokens, columns]
  char* out;       // [rows]; null: none
  int64_t pitch;   // in elements
  int32_t bytes;   // of an element

  TE_HOST_DEVICE void copy(int64_t from, int64_t to) const {
    if (bytes == 2) reinterpret_cast<uint16_t*>(out)[to] = reinterpret_cast<const uint16_t*>(in)[from];
    if (bytes == 4) reinterpret_cast<uint32_t*>(out)[to] = reinterpret_cast<const uint32_t*>(in)[from];
    if (bytes == 8) reinterpret_cast<uint64_t*>(out)[to] = reinterpret_cast<const uint64_t*>(in)[from];
  }
  TE_HOST_DEVICE void clear(int64_t at) const {
    for (int i = 0; i < bytes; ++i) out[at * bytes + i] = 0;
  }
};

// Counters saturate.
TE_HOST_DEVICE uint32_t saturating_sum(uint32_t count, uint32_t more) {
  const uint32_t sum = count + more;
  return sum < count ? 0xffffffffu : sum;
}

// A pair's place among its token's by their experts: of one expert, in their order.
TE_HOST_DEVICE int place_by_expert(const int32_t* ids_of_token, int count, int pair) {
  int place = 0;
  for (int i = 0; i < count; ++i) {
    place += ids_of_token[i] < ids_of_token[pair] || (ids_of_token[i] == ids_of_token[pair] && i < pair);
  }
  return place;
}

// Calls f(uint8_t{}), f(uint16_t{}), ... for elements that are only copied.
template <class F>
void dispatch_bytes(te_dtype dtype, F&& f) {
  switch (te_dtype_bytes(dtype)) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      return f(uint64_t{});
  }
}

}  // namespace te::permute
