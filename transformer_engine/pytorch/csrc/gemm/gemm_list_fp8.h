// gemm_list_fp8: whether the FP8 products of a list of groups may be those of grouped kernels, to the bits of te_gemm's
// of each group.
#pragma once

#include "gemm/product.h"

namespace te_torch {

// A layer with a weight [n, k] for each group of rows, whose sizes the host knows.
struct BlockList {
  at::Device device;
  at::ScalarType dtype;  // of rows and results
  int64_t n, k;
  bool bias, main_grads;
  const ProductQuantization& quantization;
  at::ArrayRef<int64_t> splits;
};

// at_once: all three products of it, in blocks: groups are small (list_refuses), and te_gemm adds up the elements of
// all weight gradients in one pass. Of the others, which groups it does not: these are left to it.
struct BlockPlan {
  bool at_once = false;
  std::vector<uint8_t> fprop, dgrad;
};
BlockPlan blocks_by_list(const BlockList& list);

}  // namespace te_torch
