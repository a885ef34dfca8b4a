// The kernels of te::attention by name. Each computes forward out and lse, and its backward takes both.
#pragma once

#include <string_view>

#include "ops/attention_call.h"

namespace te_torch {

struct AttentionKernel {
  std::string_view name;
  bool has_max_logit;
  void (*check)(const AttentionCall& call);  // ValueError for a call that it does not take; reads no values
  AttentionResult (*forward)(const AttentionCall& call);  // checks the lengths too
  // The gradients that are wanted. dlse: of lse, or undefined.
  AttentionGradients (*backward)(const AttentionCall& call, const AttentionResult& result, const Tensor& dout,
                                 const Tensor& dlse, AttentionWanted wanted);
};

const AttentionKernel& attention_kernel(std::string_view name);

}  // namespace te_torch
