// Decides whether grouped kernels may compute the FP8 GEMMs of a list of groups: in blocks to the bits of te_gemm of
// each group; with a scale for each group to those of sizes on the device, whose sums te_gemm does not repeat.
#pragma once

#include "gemm/product.h"

namespace te_torch {

// A layer with a weight [n, k] for each group of rows, whose sizes are on the host.
struct Fp8List {
  at::Device device;
  at::ScalarType dtype;  // of rows and results
  int64_t n, k;
  bool bias, main_grads;
  const ProductQuantization& quantization;
  at::ArrayRef<int64_t> splits;
};

// at_once: grouped kernels compute all three GEMMs, since groups are small (list_refuses) and, in blocks, te_gemm sums
// the elements of all weight gradients in one pass. bits_of_loop: in blocks. fprop, dgrad: mark the groups that are
// left to te_gemm.
struct ListGemms {
  bool at_once = false;
  bool bits_of_loop = false;
  std::vector<uint8_t> fprop, dgrad;
};
ListGemms fp8_by_list(const Fp8List& list);

}  // namespace te_torch
