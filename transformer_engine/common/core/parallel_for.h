// The deterministic parallel loop of the CPU paths. Work is divided by shape, never by the number of threads, so that
// the same input gives the same bits on any machine; the binding installs PyTorch's thread pool by te_set_parallel_for.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transformer_engine/transformer_engine.h"

namespace te {

void run_blocks(int64_t n_blocks, void (*body)(void*, int64_t), void* context);

// body(block) for block in [0, n_blocks). body must not throw.
template <class Body>
void parallel_for(int64_t n_blocks, Body&& body) {
  using Fn = std::remove_reference_t<Body>;
  run_blocks(
      n_blocks, [](void* context, int64_t block) { (*static_cast<Fn*>(context))(block); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Rows in blocks of about 16 Ki elements: body(first_row, last_row).
template <class Body>
void parallel_rows(int64_t rows, int64_t cols, Body&& body) {
  constexpr int64_t kBlockElements = 16384;  // 64 KiB of fp32: tens of microseconds, well above the cost of a hand-over
  const int64_t step = std::max<int64_t>(1, kBlockElements / std::max<int64_t>(1, cols));
  parallel_for((rows + step - 1) / step,
               [&](int64_t block) { body(block * step, std::min(rows, (block + 1) * step)); });
}

}  // namespace te
