// Kernel wrappers of gemm that other bindings call. gemm_path.h selects the implementation.
#pragma once

#include <transformer_engine/gemm.h>

#include "core/common.h"
#include "gemm/gemm_path.h"

namespace te_torch {

// (d, extra) of transformer_engine/gemm.h. epilogue: "none", "bias", "gelu" (extra = the pre-activation), "dgelu" (aux
// in), "bgrad" (extra = the bias gradient); extra is empty otherwise. Operands are 2-D, or folded to it. d is 2-D.
std::tuple<Tensor, Tensor> gemm(const Tensor& a, const Tensor& b, std::string_view layout, std::string_view epilogue,
                                const OptionalTensor& bias, const OptionalTensor& aux,
                                std::optional<at::ScalarType> out_dtype);

// The same into d, [rows, cols] of out_dtype, contiguous; the bits are those of a fresh one. Epilogues "none", "bias"
// and "bgrad"; returns the extra result, undefined where there is none.
Tensor gemm_into(const Tensor& a, const Tensor& b, std::string_view layout, std::string_view epilogue,
                 const OptionalTensor& bias, const Tensor& d);

// out += the product, or out = the product with overwrite, in out's dtype (float32 or the operands'). Returns the bias
// gradient of "bgrad", else empty.
Tensor gemm_accumulate(const Tensor& a, const Tensor& b, std::string_view layout, Tensor& out, bool bias_grad,
                       bool overwrite);

// While it lives, the GEMMs of this thread compute chunks of a GEMM over `rows` rows: they use its algorithm, so that
// an element has the same bits. runs_match_full: the tile of such an algorithm of cuBLASLt, with `rows` rows of b; none
// if it has none.
class RunsOf {
 public:
  explicit RunsOf(int64_t rows);
  ~RunsOf();
  RunsOf(const RunsOf&) = delete;
  RunsOf& operator=(const RunsOf&) = delete;

 private:
  int64_t outer_;
};
std::optional<te_gemm_tile> runs_match_full(const Tensor& a, const Tensor& b, std::string_view layout,
                                            const OptionalTensor& bias, int64_t rows);

// While it lives, the GEMMs of this thread on one stream share a workspace: hundreds of small ones would spend their
// time on allocation.
class OneWorkspace {
 public:
  OneWorkspace();
  ~OneWorkspace();
  OneWorkspace(const OneWorkspace&) = delete;
  OneWorkspace& operator=(const OneWorkspace&) = delete;

 private:
  friend void run_gemm(const GemmPath&, te_gemm_problem&, const Tensor&);
  const Tensor& at_least(size_t bytes, te_stream stream, const Tensor& like);

  OneWorkspace* outer_;
  Tensor memory_;
  te_stream stream_ = nullptr;
};

// The engine's product by path.by: te_gemm_by_loop, or te_gemm on CUDA, on `like`'s current stream, with a workspace
// from ATen.
void run_gemm(const GemmPath& path, te_gemm_problem& problem, const Tensor& like);

}  // namespace te_torch
