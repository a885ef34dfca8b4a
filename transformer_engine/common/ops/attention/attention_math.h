// Functions that the CPU and the CUDA path of attention share: the places of packed sequences, the pieces of a kernel,
// and the law of a sink.
#pragma once

#include <cmath>

#include "core/dtype.h"
#include "core/search.h"
#include "transformer_engine/attention.h"

namespace te::attention {

constexpr int kTileRows = 8;         // of a block at a time
constexpr int64_t kMostParts = 512;  // of a sink's gradient: each sums every kMostParts-th tile

TE_HOST_DEVICE int64_t tiles_of(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }
TE_HOST_DEVICE int64_t parts_of(int64_t rows) { return tiles_of(rows) < kMostParts ? tiles_of(rows) : kMostParts; }

// Why the lengths of a side do not fit; the order in which they are checked.
enum class Fault : int32_t { kNone, kLengths, kStarts, kLongest };

// The rows of a side, with plain pointers.
struct Places {
  const int32_t* lengths;  // nullptr: no padding
  const int32_t* starts;   // nullptr: as lengths
  int64_t rows;
  int32_t sequences;
  bool batch_first;
  int64_t seq;  // 0: packed

  TE_HOST_DEVICE static Places of(const te_attention_rows& t) {
    return {static_cast<const int32_t*>(t.lengths.data),
            static_cast<const int32_t*>(t.starts.data),
            t.rows,
            t.lengths.data == nullptr ? 0 : int32_t(t.lengths.cols) - 1,
            t.batch_first != 0,
            t.seq};
  }

  TE_HOST_DEVICE int64_t begin(int32_t i) const { return starts != nullptr ? starts[i] : lengths[i]; }
  TE_HOST_DEVICE int64_t length(int32_t i) const { return int64_t(lengths[i + 1]) - lengths[i]; }

  // Of rows below 2^31.
  TE_HOST_DEVICE bool is_padding(int64_t row) const {
    if (lengths == nullptr) return false;
    if (seq > 0) {
      const int32_t i = int32_t(batch_first ? row / seq : row % sequences);
      return (batch_first ? row % seq : row / sequences) >= length(i);
    }
    if (starts == nullptr || sequences == 0) return row >= lengths[sequences];
    const int32_t i = run_of(starts, sequences, int32_t(row));
    return row < starts[i] || row - starts[i] >= length(i);
  }

  // Whether number i of the sequences, or the end after the last one, fits.
  TE_HOST_DEVICE Fault fault(int32_t i, int64_t longest) const {
    if (i == 0 && lengths[0] != 0) return Fault::kLengths;
    if (i == sequences) {
      if (starts == nullptr) return lengths[i] > rows ? Fault::kLengths : Fault::kNone;
      return starts[i] > rows || (i == 0 && starts[i] < 0) ? Fault::kStarts : Fault::kNone;
    }
    const int64_t n = length(i);
    if (n < 0) return Fault::kLengths;
    if (starts != nullptr && ((i == 0 && starts[i] < 0) || starts[i] + n > starts[i + 1])) return Fault::kStarts;
    return longest >= 0 && n > longest ? Fault::kLongest : Fault::kNone;
  }

  // Pieces 3 i + 1 .. 3 i + 3 end here; the first begins at begin(0).
  TE_HOST_DEVICE void pieces(int32_t i, bool keys, int32_t (&ends)[3]) const {
    const int32_t next = int32_t(begin(i + 1)), end = int32_t(begin(i) + length(i));
    ends[0] = end, ends[1] = keys ? end : next, ends[2] = next;
  }
};

// The place in kernel_lse of a row and head.
struct LseOrder {
  int64_t batch, seq, heads;
  bool batch_first;

  TE_HOST_DEVICE static LseOrder of(const te_attention_plan& plan, int64_t heads) {
    return {plan.batch, plan.queries.rows / plan.batch, heads, plan.batch_first != 0};
  }
  TE_HOST_DEVICE int64_t place(int64_t row, int64_t head) const {
    const int64_t b = batch_first ? row / seq : row % batch, s = batch_first ? row % seq : row / batch;
    return (b * heads + head) * seq + s;
  }
};

// Kernels write +inf or -inf.
TE_HOST_DEVICE bool sees_no_key(float lse) { return fabsf(lse) == INFINITY; }

// A row's lse with a sink, and the factor of out; 1: out stays as it is.
struct Sunk {
  float lse, factor;

  TE_HOST_DEVICE static Sunk of(float lse, float a) {
    if (sees_no_key(lse)) return {a, 1.f};
    if (a == -INFINITY) return {lse, 1.f};
    const float above = a - lse;
    const float most = above > 0.f ? a : lse;
    return {most + log1pf(expf(-fabsf(above))), 1.f / (1.f + expf(above))};
  }
};

// The sink's share of a row's softmax; lse is that of a row with the sink.
TE_HOST_DEVICE float sink_share(float a, float lse) { return a == -INFINITY ? 0.f : expf(fminf(a - lse, 0.f)); }

TE_HOST_DEVICE float lse_of_kernel(float lse) { return sees_no_key(lse) ? -INFINITY : lse; }
TE_HOST_DEVICE float lse_for_kernel(float lse) { return sees_no_key(lse) ? INFINITY : lse; }

}  // namespace te::attention
