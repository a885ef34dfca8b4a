// Declarations that the contract and the two paths of grouped products share: the problem's shape, and the arithmetic
// that turns splits into offsets.
#pragma once

#include "core/dtype.h"
#include "core/tensor.h"
#include "transformer_engine/grouped_gemm.h"

namespace te::gemm::grouped {

struct ProblemShape {
  int64_t rows;        // of all groups and the tail
  int64_t n;           // output features of a weight
  int64_t k;           // its input features
  int64_t panels = 0;  // capacity of the FP8 operands of WGRAD
};

constexpr int64_t kMostRows = INT32_MAX - 256;  // the last pair of tiles ends within 32 bits

// Throw for a bad argument.
ProblemShape check(const te_grouped_gemm_problem& problem);
ProblemShape check_fp8(const te_grouped_gemm_problem& problem);
void refuse_fp8_arguments(const te_grouped_gemm_problem& problem);

int32_t sms_of(int32_t available);  // limited by te_grouped_gemm_sms()

constexpr int kPanelRows = 128;
TE_HOST_DEVICE int64_t panels_of(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

struct Splits {
  const void* data;
  bool are_int64;
  int32_t groups;
  int64_t rows;
};

// Sums of splits saturate at a value that neither 31 bits of rows nor 32 bits of cut rows can hold, so that no result
// changes, and two of them add up in 64 bits.
constexpr int64_t kMostSum = int64_t(1) << 40;

TE_HOST_DEVICE int64_t split_at(const Splits& s, int32_t group) {
  return s.are_int64 ? static_cast<const int64_t*>(s.data)[group] : static_cast<const int32_t*>(s.data)[group];
}
TE_HOST_DEVICE int64_t at_most(int64_t value, int64_t most) { return value < most ? value : most; }
TE_HOST_DEVICE int64_t live_split(int64_t split) { return split < 0 ? 0 : at_most(split, kMostSum); }
TE_HOST_DEVICE int64_t add_splits(int64_t a, int64_t b) { return at_most(a + b, kMostSum); }

// Counters saturate.
TE_HOST_DEVICE uint32_t add_count(uint32_t count, int64_t more) {
  return uint32_t(at_most(int64_t(count) + more, 0xffffffffll));
}

namespace cpu {
void run(const te_grouped_gemm_problem& problem, const ProblemShape& shape);
void run_fp8(const te_grouped_gemm_problem& problem, const ProblemShape& shape);  // the groups' products
void offsets(const Splits& splits, int32_t* offsets, uint32_t* counters);
}  // namespace cpu

namespace cuda {
void run(const te_grouped_gemm_problem& problem, const ProblemShape& shape, te_stream stream);
void offsets(const Splits& splits, int32_t* offsets, uint32_t* counters, te_stream stream);
void write_offsets(const int32_t* values, int32_t count, int32_t* offsets, te_stream stream);  // values on the host
}  // namespace cuda

}  // namespace te::gemm::grouped
