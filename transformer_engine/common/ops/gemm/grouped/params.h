// What grouped kernels are told, by value: tensor maps and addresses of each group, so that nothing of a call lives in
// device memory. And how the host starts them. Shared by the sources that hold a kernel each and by grouped_gemm.cu.
#pragma once

#if !defined(TE_EMULATED_GPU)  // else a test's own CUtensorMap is in scope
#include <cuda.h>
#endif

#include "ops/gemm/sm90/scheduler.h"
#include "transformer_engine/transformer_engine.h"

namespace te::gemm::grouped {

struct Common {
  const int32_t* offsets;  // of this launch's groups, one more than they are
  int32_t groups;
  int32_t rows;  // of the row operands: no offset leads beyond
};

// FPROP and DGRAD.
struct RowParams {
  CUtensorMap left;
  CUtensorMap weights[kLaunchGroups];
  const void* biases[kLaunchGroups];  // NULL each where there are none
  void* result;
  int64_t pitch;
  Common common;
  int32_t cols, depth;
  bool wide, zero_tail;
};

// WGRAD.
struct WeightParams {
  struct Result {
    void* data;  // NULL: not wanted
    int64_t pitch;
    bool wide, add;
  };
  CUtensorMap left, right;
  Result results[kLaunchGroups];
  Common common;
  int32_t n, k;
};
static_assert(sizeof(RowParams) <= 32764 && sizeof(WeightParams) <= 32764, "kernel parameters hold 32,764 bytes");

namespace cuda {

struct Launch {
  int32_t blocks;
  int32_t device;
  te_stream stream;
};
void launch_fprop(te_dtype operands, const RowParams& params, const Launch& launch);
void launch_dgrad(te_dtype operands, const RowParams& params, const Launch& launch);
void launch_wgrad(te_dtype operands, bool float_results, const WeightParams& params, const Launch& launch);

}  // namespace cuda

}  // namespace te::gemm::grouped
