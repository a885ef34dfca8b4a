// gemm_path: who computes a product, and why nobody faster: the one place where that is decided. Every product of the
// extension asks here and obeys, te.explain shows the word. It computes nothing. A new member is a value of GemmBy, its
// rule in gemm_path() and its case in run_gemm().
#pragma once

#include <ATen/core/Tensor.h>
#include <transformer_engine/gemm.h>

#include <vector>

namespace te_torch {

enum class GemmBy : uint8_t {
  kNobody,    // there is nothing to multiply, and zeros are all that is wanted
  kLibTorch,  // the CPU's usual one; fast, with bits that depend on threads and on how many rows there are
  kCpuLoop,   // te_gemm_by_loop
  kCublasLt,  // te_gemm on CUDA, which chooses the algorithm and says which
};

// All that the decision depends on.
struct GemmCall {
  bool on_cpu;
  at::ScalarType operands;  // Byte: FP8 matrices with scales
  at::ScalarType out;
  bool empty;  // no rows, no columns, or nothing to reduce
  te_gemm_epilogue epilogue = TE_GEMM_NONE;
  at::ScalarType bias = at::kFloat;  // of the epilogue that adds one
  bool into = false;                 // written to, or added to, memory of the caller's
  bool wide = true;                  // that memory takes an FP8 product: multiples of 16, on 16 bytes
};

struct GemmPath {
  GemmBy by;
  // Bias, bias gradient, or what brings the product into the caller's memory: done by LibTorch beside the product.
  bool apart;
  const char* name;  // nullptr where the member says more than who it is
  const char* why_not_faster;

  void note() const {
    if (name != nullptr) te_note_path(name, why_not_faster);
  }
};

GemmPath gemm_path(const GemmCall& call);

// All that the decision about the products of a list of groups of rows depends on, whose sizes the host knows.
struct GemmList {
  int32_t device;  // TE_DEVICE_CPU, or a CUDA ordinal
  bool readable;   // the grouped kernels read and write its matrices, and te_gemm's choices are not being looked at
  int64_t groups;  // that have rows
  int64_t tiles;   // of results, of all of them together
};
inline int64_t result_tiles(int64_t rows, int64_t cols) { return (rows + 127) / 128 * ((cols + 255) / 256); }

// Null: the grouped kernel may compute the list at once. Else why each group's product is computed for itself.
const char* list_refuses(const GemmList& list);

// Said by te.explain of the launches that do.
inline constexpr const char* kListAtOnce = "a list of small groups: one launch for all";

// Marks groups that a list's grouped kernel leaves to products of their own, as set_list_products() asks for.
void leave_groups(const std::vector<int64_t>& counts, std::vector<uint8_t>& each);

bool cpu_products_by_loop();  // whether set_cpu_products("loop") is in force

}  // namespace te_torch
