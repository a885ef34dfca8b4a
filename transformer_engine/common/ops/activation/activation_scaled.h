// Declarations that the CPU and the CUDA path of the activation with a scale for each row share.
#pragma once

#include "ops/activation/activation.h"

namespace te::activation {

// The tensors of te_activation_scaled_forward that are read.
struct ScaledRows {
  te_tensor x, scale, live;
};

// The results of te_activation_scaled_backward; dscale and y may be absent.
struct ScaledResults {
  te_tensor dx, dscale, y;
};

namespace cuda {
void scaled_forward(int kind, const Params& params, const ScaledRows& in, const te_tensor& y, te_stream stream);
void scaled_backward(int kind, const Params& params, const te_tensor& dy, const ScaledRows& in,
                     const ScaledResults& out, te_stream stream);
}  // namespace cuda

}  // namespace te::activation
