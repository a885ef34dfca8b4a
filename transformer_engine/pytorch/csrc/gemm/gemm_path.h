// gemm_path selects the implementation of each GEMM, and gives the reason why none is faster, which te.explain shows.
// - Every GEMM of the extension uses it. It computes nothing.
// - A new implementation is a value of GemmBy, its rule in gemm_path() and its case in run_gemm().
#pragma once

#include <ATen/core/Tensor.h>
#include <transformer_engine/gemm.h>

#include <vector>

namespace te_torch {

enum class GemmBy : uint8_t {
  kZeros,     // nothing to multiply: the result is zeros
  kLibTorch,  // the CPU's usual one; fast, with bits that depend on threads and on how many rows there are
  kCpuLoop,   // te_gemm_by_loop
  kCublasLt,  // te_gemm on CUDA, which chooses the algorithm and reports it
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
  // LibTorch adds the bias, computes its gradient or copies the result into the caller's memory, beside the GEMM.
  bool apart;
  const char* name;  // nullptr: the implementation reports more than its name
  const char* why_not_faster;

  void note() const {
    if (name != nullptr) te_note_path(name, why_not_faster);
  }
};

GemmPath gemm_path(const GemmCall& call);

// The inputs of the decision about a list of groups whose sizes are on the host.
struct GemmList {
  int32_t device;  // TE_DEVICE_CPU, or a CUDA ordinal
  bool readable;   // the grouped kernels can read and write its matrices, and te_gemm is not being tuned
  int64_t groups;  // that have rows
  int64_t tiles;   // of results, of all of them together
};
inline int64_t result_tiles(int64_t rows, int64_t cols) { return (rows + 127) / 128 * ((cols + 255) / 256); }

// Null: the grouped kernel may compute the list at once. Else the reason for one GEMM a group.
const char* list_refuses(const GemmList& list);

// The reason that te.explain shows for such launches.
inline constexpr const char* kListAtOnce = "a list of small groups: one launch for all";
inline constexpr const char* kListAsDevice =
    "a list of small groups: one launch for all, with the sums of sizes on the device";

// Marks groups that a list's grouped kernel leaves to products of their own, as set_list_products() selects.
void leave_groups(const std::vector<int64_t>& counts, std::vector<uint8_t>& each);

bool cpu_products_by_loop();  // whether set_cpu_products("loop") is in force

}  // namespace te_torch
