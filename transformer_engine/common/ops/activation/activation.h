// Functions that the files of the activation op call of each other.
#pragma once

#include "ops/activation/activation_math.h"

namespace te::activation {

bool is_gated(int kind);  // of a kind that check_kind has accepted
void check_kind(const char* op, int kind, const Params& params);

namespace cpu {
void forward(int kind, const Params& params, const te_tensor& x, const te_tensor& y);
void backward(int kind, const Params& params, const te_tensor& dy, const te_tensor& x, const te_tensor& dx,
              const te_tensor& y);
}  // namespace cpu

namespace cuda {
void forward(int kind, const Params& params, const te_tensor& x, const te_tensor& y, te_stream stream);
void backward(int kind, const Params& params, const te_tensor& dy, const te_tensor& x, const te_tensor& dx,
              const te_tensor& y, te_stream stream);
}  // namespace cuda

}  // namespace te::activation
