// The grouped products between their contract and the two paths: extents, and how splits become offsets. Computes no
// product.
#pragma once

#include "core/dtype.h"
#include "core/tensor.h"
#include "transformer_engine/grouped_gemm.h"

namespace te::gemm::grouped {

struct Extents {
  int64_t rows;        // of all groups and the tail
  int64_t n;           // outputs of a weight
  int64_t k;           // its inputs
  int64_t panels = 0;  // of FP8 operands of WGRAD: as many as there is room for
};

constexpr int64_t kMostRows = INT32_MAX - 256;  // the last pair of tiles ends within 32 bits

// Throw the argument's error.
Extents check(const te_grouped_gemm_problem& problem);
Extents check_fp8(const te_grouped_gemm_problem& problem);  // what is FP8's own
void refuse_fp8_arguments(const te_grouped_gemm_problem& problem);

int32_t sms_of(int32_t there);  // of those that there are, what te_grouped_gemm_sms() leaves

constexpr int kPanelRows = 128;  // of one group at most, along each column
TE_HOST_DEVICE int64_t panels_of(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

struct Splits {
  const void* data;
  bool are_int64;
  int32_t groups;
  int64_t rows;
};

// Sums of splits stop here: far above what 31 bits of rows and 32 bits of cut rows can hold, so nothing that is written
// tells the difference, and two of them still add up in 64 bits.
constexpr int64_t kMostSum = int64_t(1) << 40;

TE_HOST_DEVICE int64_t split_at(const Splits& s, int32_t group) {
  return s.are_int64 ? static_cast<const int64_t*>(s.data)[group] : static_cast<const int32_t*>(s.data)[group];
}
TE_HOST_DEVICE int64_t at_most(int64_t value, int64_t most) { return value < most ? value : most; }
TE_HOST_DEVICE int64_t live_split(int64_t split) { return split < 0 ? 0 : at_most(split, kMostSum); }
TE_HOST_DEVICE int64_t add_splits(int64_t a, int64_t b) { return at_most(a + b, kMostSum); }

// Counters stay at their most.
TE_HOST_DEVICE uint32_t add_count(uint32_t count, int64_t more) {
  return uint32_t(at_most(int64_t(count) + more, 0xffffffffll));
}

namespace cpu {
void run(const te_grouped_gemm_problem& problem, const Extents& extents);
void run_fp8(const te_grouped_gemm_problem& problem, const Extents& extents);  // the groups' products
void offsets(const Splits& splits, int32_t* offsets, uint32_t* counters);
}  // namespace cpu

namespace cuda {
void run(const te_grouped_gemm_problem& problem, const Extents& extents, te_stream stream);
void offsets(const Splits& splits, int32_t* offsets, uint32_t* counters, te_stream stream);
void write_offsets(const int32_t* values, int32_t count, int32_t* offsets, te_stream stream);  // of the host
}  // namespace cuda

}  // namespace te::gemm::grouped
