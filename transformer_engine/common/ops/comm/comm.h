// Declarations that the CPU and CUDA paths of comm share: checked arguments, and the CUDA entries.
#pragma once

#include "transformer_engine/comm.h"

namespace te::comm {

// Tensors of the ranks as a table in a kernel's argument.
struct Ranks {
  const void* data[TE_COMM_MOST_RANKS];
  int64_t row_pitch[TE_COMM_MOST_RANKS];
  int32_t count;
};

namespace cuda {
void ordered_sum(const te_tensor* partials, int32_t count, const te_tensor& bias, const te_tensor& out,
                 te_stream stream);
void interleave(const te_tensor* shards, int32_t count, const te_tensor& out, te_stream stream);
bool is_captured(te_stream stream);
}  // namespace cuda

}  // namespace te::comm
