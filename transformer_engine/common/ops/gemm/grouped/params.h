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

// Weights and biases, each somewhere.
struct EachWeight {
  CUtensorMap maps[kLaunchGroups];
  const void* biases[kLaunchGroups];  // NULL each where there are none

  TE_HOST_DEVICE const CUtensorMap* map(int32_t group) const { return &maps[group]; }
  TE_HOST_DEVICE int32_t first_row(int32_t) const { return 0; }  // of a group's weight in its map
  TE_HOST_DEVICE const void* bias(int32_t group) const { return biases[group]; }
};

// Weights that are one matrix [groups * N, K] together, and biases one distance apart. A launch copies its parameters,
// and here they are few.
struct StackedWeights {
  CUtensorMap maps;
  int32_t rows;        // of a weight
  const void* biases;  // NULL: none
  int64_t to_next_bias;

  TE_HOST_DEVICE const CUtensorMap* map(int32_t) const { return &maps; }
  TE_HOST_DEVICE int32_t first_row(int32_t group) const { return group * rows; }
  TE_HOST_DEVICE const void* bias(int32_t group) const {
    return biases == nullptr ? nullptr : static_cast<const char*>(biases) + group * to_next_bias;
  }
};

// FPROP and DGRAD. n and k are those of the product: K and N of the weights in DGRAD.
template <class Weights>
struct RowParams {
  CUtensorMap left;
  Weights weights;
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
static_assert(sizeof(RowParams<EachWeight>) <= 32764 && sizeof(WgradParams) <= 32764,
              "kernel parameters hold 32,764 bytes");

// The kernels of 2-byte operands (traits.cuh), by which a launch names them.
template <class T, Major kMajor, class Weights>
struct RowKernelTraits;
template <class T, class R>
struct WgradKernelTraits;

}  // namespace te::gemm::grouped
