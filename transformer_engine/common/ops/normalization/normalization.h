// normalization, what its files share: the tensors of a call and how many parts the rows are cut into for the gradients
// of gamma and beta. No formula is here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transformer_engine/normalization.h"

namespace te::normalization {

using Plan = te_normalization_plan;

struct ForwardTensors {
  te_tensor x, residual, gamma, beta, y, residual_out, mean, rstd;
};

// What makes y of statistics that are known.
struct KnownTensors {
  te_tensor h, mean, rstd, gamma, beta;
};

struct BackwardTensors {
  te_tensor dy, residual_grad, x, gamma, mean, rstd, dx, dgamma, dbeta, workspace;
};

constexpr int64_t kMaxHidden = 65536;

// The gradients of gamma and beta are summed within parts of the rows, then over the parts. Parts are blocks of the
// CUDA path, which wants 512 threads of 32 elements at work on each of 132 SMs (Hopper's count; a constant, so that the
// order of the sum does not follow the machine): fewer, bigger parts for wide rows.
constexpr int64_t kSms = 132;
constexpr int64_t kThreadsPerSm = 512;

inline int64_t max_parts(int64_t rows, int64_t hidden) {
  const int64_t parts = kSms * std::clamp<int64_t>(kThreadsPerSm * 32 / hidden, 1, 8);
  return std::min(rows, parts);
}

namespace cuda {
void forward(const Plan& plan, const ForwardTensors& t, te_stream stream);
void quantize(const Plan& plan, const KnownTensors& t, const te_quantize_plan& quantize, const te_quantized& out,
              te_stream stream);
void amax(const Plan& plan, const KnownTensors& t, const te_tensor& parts, const te_tensor& noop, te_stream stream);
void backward(const Plan& plan, const BackwardTensors& t, te_stream stream);
}  // namespace cuda

}  // namespace te::normalization
