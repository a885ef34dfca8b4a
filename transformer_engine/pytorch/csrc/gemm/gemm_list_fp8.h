// Decides whether grouped kernels may compute the FP8 GEMMs of a list of groups, to the bits of te_gemm of each group.
#pragma once

#include "gemm/product.h"

namespace te_torch {

// A layer with a weight [n, k] for each group of rows, whose sizes are on the host.
struct BlockList {
  at::Device device;
  at::ScalarType dtype;  // of rows and results
  int64_t n, k;
  bool bias, main_grads;
  const ProductQuantization& quantization;
  at::ArrayRef<int64_t> splits;
};

// at_once: grouped kernels compute all three GEMMs in blocks, since groups are small (list_refuses) and te_gemm sums
// the elements of all weight gradients in one pass. fprop, dgrad: mark the groups that are left to te_gemm.
struct ListGemms {
  bool at_once = false;
  std::vector<uint8_t> fprop, dgrad;
};
ListGemms blocks_by_list(const BlockList& list);

}  // namespace te_torch
