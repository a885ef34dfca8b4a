// Laws over a kernel's out and lse (the log of the sum of exp of a row's scores), in the dtype of computation.
// - A sink a joins a row's softmax as a score without a value: out' = out * sigmoid(lse - a), lse' = log(exp(lse) +
//   exp(a)). The kernel's backward with (out', lse') gives dq, dk and dv of the attention with the sink.
// - A row without keys has out 0 and lse -inf; the sink makes lse' = a of it. A sink of -inf is none: lse' = lse.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/TensorOperators.h>

namespace te_torch {

// lse with 0 in place of -inf, so that exp(score - lse) of masked scores is 0 and not NaN.
inline at::Tensor finite_lse(const at::Tensor& lse) { return lse.masked_fill(lse.isneginf(), 0.0); }

// out [h, n, d_v], lse [h, n, 1], sink [h]: in place.
inline void apply_sink(at::Tensor& out, at::Tensor& lse, const at::Tensor& sink) {
  const at::Tensor a = sink.to(lse.scalar_type()).view({-1, 1, 1});
  out.mul_((lse - a).sigmoid_().masked_fill_(lse.isneginf(), 0.0));  // not -inf - -inf
  lse = lse.logaddexp(a);
}

// The sink's gradient [h] of rows with lse' and delta = rowsum(dout * out') - dlse', both [h, n, 1]. Rows of padding
// have delta 0 and any lse', of which exp must not overflow.
inline at::Tensor sink_gradient(const at::Tensor& delta, const at::Tensor& lse, const at::Tensor& sink) {
  const at::Tensor a = sink.to(lse.scalar_type()).view({-1, 1, 1});
  return (a - finite_lse(lse)).clamp_max_(0.0).exp_().mul_(delta).sum({1, 2}).neg_();
}

}  // namespace te_torch
