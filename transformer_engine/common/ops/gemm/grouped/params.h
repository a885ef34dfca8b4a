// Parameters of the grouped kernels, passed by value: tensor maps and addresses of each group, so that a call needs no
// device memory. Shared by the .cu file of each kernel and by grouped_gemm.cu.
#pragma once

#if !defined(TE_EMULATED_GPU)  // the emulation of tests/cpp defines its own CUtensorMap
#include <cuda.h>
#endif

#include "ops/gemm/sm90/scheduler.h"
#include "transformer_engine/transformer_engine.h"

namespace te::gemm::grouped {

using namespace sm90;

struct Common {
  const int32_t* offsets;  // [groups + 1], of this launch's groups
  int32_t groups;
  int32_t rows;  // of the row operands; offsets are cut to it
};

// FPROP and DGRAD. n and k are those of the product: K and N of the weights in DGRAD.
struct RowParams {
  CUtensorMap left;
  CUtensorMap weights[kLaunchGroups];
  const void* biases[kLaunchGroups];  // NULL each where there are none
  void* result;
  int64_t pitch;
  Common common;
  int32_t n, k;
  bool wide, zero_tail;
};

// WGRAD. n and k are those of the weights.
struct WgradParams {
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
static_assert(sizeof(RowParams) <= 32764 && sizeof(WgradParams) <= 32764, "kernel parameters hold 32,764 bytes");

// The kernels of 2-byte operands (traits.cuh), by which a launch names them.
template <class T, Major kWeights>
struct RowKernelTraits;
template <class T, class R>
struct WgradKernelTraits;

}  // namespace te::gemm::grouped
