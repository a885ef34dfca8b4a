// What the CPU and CUDA paths of the comm room share: arguments after their checks, and the CUDA entries.
#pragma once

#include "transformer_engine/comm.h"

namespace te::comm {

// What ranks gave, as a kernel takes it: a table in its argument.
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
