// Lists of tensors on the CPU path: chunks of floats, division of work by sizes, flags, maxima. Host only.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/cpu_chunk.h"
#include "core/fp8.h"
#include "core/parallel_for.h"
#include "ops/optimizer/paths.h"
#include "ops/quantize/fp8.h"

namespace te::optimizer::cpu {

using namespace te::cpu;

// ---- lists as chunks of floats ----

inline char* at(void* data, te_dtype dtype, int64_t offset) {
  return static_cast<char*>(data) + offset * int64_t(te_dtype_bytes(dtype));
}

inline void widen_fp8(const void* source, float* out, int64_t n) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  for (int64_t i = 0; i < n; ++i) out[i] = to_float(e4m3{bytes[i]});
}

template <bool kE5m2>
void narrow_fp8(uint8_t* target, const float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) target[i] = uint8_t(quantize::to_fp8<kE5m2>(values[i]));
}

// The n floats of a list, to read and write: fp32 in place, others widened into `buffer`.
inline float* open(void* data, te_dtype dtype, int64_t offset, float* buffer, int64_t n) {
  char* source = at(data, dtype, offset);
  if (dtype == TE_FLOAT32) return reinterpret_cast<float*>(source);
  if (dtype == TE_FLOAT16) {
    te::cpu::detail::widen(reinterpret_cast<const fp16*>(source), buffer, n);
  } else if (dtype == TE_BFLOAT16) {
    te::cpu::detail::widen(reinterpret_cast<const bf16*>(source), buffer, n);
  } else {
    widen_fp8(source, buffer, n);
  }
  return buffer;
}

// Rounds them back.
inline void close(void* data, te_dtype dtype, int64_t offset, const float* values, int64_t n) {
  char* target = at(data, dtype, offset);
  if (dtype == TE_FLOAT32) {
    store_chunk(reinterpret_cast<float*>(target), values, n);
  } else if (dtype == TE_FLOAT16) {
    store_chunk(reinterpret_cast<fp16*>(target), values, n);
  } else if (dtype == TE_BFLOAT16) {
    store_chunk(reinterpret_cast<bf16*>(target), values, n);
  } else if (dtype == TE_FLOAT8_E4M3) {
    narrow_fp8<false>(reinterpret_cast<uint8_t*>(target), values, n);
  } else {
    narrow_fp8<true>(reinterpret_cast<uint8_t*>(target), values, n);
  }
}

inline void round_to(te_dtype dtype, float* values, int64_t n) {
  if (dtype == TE_BFLOAT16) {
    for (int64_t i = 0; i < n; ++i) values[i] = to_float(from_float<bf16>(values[i]));
  } else if (dtype == TE_FLOAT16) {
    for (int64_t i = 0; i < n; ++i) values[i] = to_float(from_float<fp16>(values[i]));
  }
}

// ---- maxima, which do not depend on order ----

// Compared as integers, which is vectorised; NaN as 0.
inline float amax_of(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = te::detail::bits_of(x[i]) & 0x7fffffffu;
    largest = std::max(largest, bits > 0x7f800000u ? 0u : bits);
  }
  return te::detail::float_of(largest);
}

inline void raise(float* place, float amax) {
  std::atomic_ref<float> shared(*place);
  float held = shared.load(std::memory_order_relaxed);
  while (!(held >= amax) && !shared.compare_exchange_weak(held, amax, std::memory_order_relaxed)) {
  }
}

// ---- division of lists: by their sizes, never by threads ----

constexpr int64_t kBlockElements = 16384;

// Calls body(tensor, first, n) for pieces of at most kBlockElements; small tensors share a block.
template <class Body>
void for_pieces(Tensors tensors, int64_t count, Body&& body) {
  struct Start {
    int64_t tensor, first;
  };
  std::vector<Start> starts;
  int64_t filled = 0;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t first = 0; first < tensors[t].numel; first += kBlockElements) {
      const int64_t n = std::min(kBlockElements, tensors[t].numel - first);
      if (starts.empty() || filled + n > kBlockElements) {
        starts.push_back({t, first});
        filled = 0;
      }
      filled += n;
    }
  }
  const auto blocks = int64_t(starts.size());
  starts.push_back({count, 0});
  parallel_for(blocks, [&](int64_t block) {
    const Start end = starts[size_t(block) + 1];
    for (Start s = starts[size_t(block)]; s.tensor < end.tensor || (s.tensor == end.tensor && s.first < end.first);) {
      const int64_t n = std::min(kBlockElements, tensors[s.tensor].numel - s.first);
      if (n > 0) body(s.tensor, s.first, n);
      s.first += kBlockElements;
      if (s.first >= tensors[s.tensor].numel) s = {s.tensor + 1, 0};
    }
  });
}

template <class T>
T value_or(const te_tensor& t, T otherwise) {
  return t.data == nullptr ? otherwise : *static_cast<const T*>(t.data);
}

inline bool is_set(const te_tensor& noop) {
  if (noop.data == nullptr) return false;
  return noop.dtype == TE_FLOAT32 ? *static_cast<const float*>(noop.data) != 0.f
                                  : *static_cast<const int32_t*>(noop.data) != 0;
}

inline void set(const te_tensor& noop) {
  if (noop.data == nullptr) return;
  if (noop.dtype == TE_FLOAT32) {
    *static_cast<float*>(noop.data) = 1.f;
  } else {
    *static_cast<int32_t*>(noop.data) = 1;
  }
}

}  // namespace te::optimizer::cpu
