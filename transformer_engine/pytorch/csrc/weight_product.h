// The third product of a linear layer, that of its weight gradient, as an object: computed now, added to a buffer, or
// kept for later.
#pragma once

#include "product.h"

namespace te_torch {

// A weight gradient that is computed now or later: dweight[N, K] = dy^T x, dbias[N] = the column sums of dy.
struct WeightProduct {
  Operand dy, x;
  Tensor dbias;  // summed already, where dy is FP8 and the bias wants a gradient
  at::ScalarType dtype = at::kFloat;
  bool split = true;

  template <class Route>
  std::tuple<Tensor, Tensor> compute(bool with_bias) const {
    if (dy.quantized() && x.quantized()) {
      const Tensor dweight =
          gemm_fp8<Route>(x.fp8, true, dy.fp8, true, dtype, {}, detail::may_be_fast(x.fp8, dy.fp8, split));
      return {dweight, dbias};
    }
    const auto [dweight, sums] = Route::template call<linear_wgrad>(
        "te::linear_wgrad", plain_of<Route>(dy, dtype), plain_of<Route>(x, dtype), with_bias && !dbias.defined());
    return {dweight, dbias.defined() ? dbias : sums};
  }

  // Rows [first, first + rows) of it into out, += or =. Returns these rows' part of the bias's gradient, or nothing.
  Tensor accumulate(Tensor& out, int64_t first, int64_t rows, bool with_bias, bool overwrite) const;
  Tensor column_sums(int64_t first, int64_t rows) const;
  // The plain tensors that it reads: whoever changes these in place changes the gradient.
  std::vector<Tensor> reads() const;
};

}  // namespace te_torch
