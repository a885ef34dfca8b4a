// normalization, declarations that its files share: the tensors of a call, and the number of parts of the rows for the
// gradients of gamma and beta.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transformer_engine/normalization.h"

namespace te::normalization {

using Plan = te_normalization_plan;

struct ForwardTensors {
  te_tensor x, residual, gamma, beta, y, residual_out, mean, rstd;
};

// The inputs of y with known statistics.
struct KnownTensors {
  te_tensor h, mean, rstd, gamma, beta;

  KnownTensors(te_tensor h, te_tensor mean, te_tensor rstd, te_tensor gamma, te_tensor beta)
      : h(h), mean(mean), rstd(rstd), gamma(gamma), beta(beta) {}
  explicit KnownTensors(const ForwardTensors& t)
      : KnownTensors(t.residual.data != nullptr ? t.residual_out : t.x, t.mean, t.rstd, t.gamma, t.beta) {}
};

struct BackwardTensors {
  te_tensor dy, residual_grad, x, gamma, mean, rstd, dx, dgamma, dbeta, workspace;
};

constexpr int64_t kMaxHidden = 65536;

// The gradients of gamma and beta are summed within parts of the rows, then over the parts. A part is a block of the
// CUDA path, which needs 512 threads of 32 elements on each of 132 SMs (the number of Hopper; a constant, so that the
// order of the sum does not depend on the machine): fewer, larger parts for wide rows.
constexpr int64_t kSms = 132;
constexpr int64_t kThreadsPerSm = 512;

inline int64_t max_parts(int64_t rows, int64_t hidden) {
  const int64_t parts = kSms * std::clamp<int64_t>(kThreadsPerSm * 32 / hidden, 1, 8);
  return std::min(rows, parts);
}

// Throw for a bad argument.
void check_forward(const char* op, const Plan& plan, const ForwardTensors& t);
void check_known(const char* op, Plan plan, const KnownTensors& t);
void check_bytes(const char* op, const te_tensor& workspace, const te_tensor& x, int64_t bytes);

namespace cpu {
void forward(const Plan& plan, const ForwardTensors& t);
void forward_known(const Plan& plan, const KnownTensors& t, const te_tensor& y);
}  // namespace cpu

// The rows of a block of scales, within which the fused forward proceeds from statistics to FP8.
constexpr int64_t kBand = 128;

inline int64_t bands_of(int64_t rows) { return (rows + kBand - 1) / kBand; }

namespace cuda {
// Without y: the largest |y| of parts of the rows, into amax_parts if present.
void forward(const Plan& plan, const ForwardTensors& t, const te_tensor& amax_parts, te_stream stream);
void quantize(const Plan& plan, const KnownTensors& t, const te_quantize_plan& quantize, const te_quantized& out,
              te_stream stream);
void forward_quantize(const Plan& plan, const ForwardTensors& t, const te_quantize_plan& quantize,
                      const te_quantized& out, const te_tensor& workspace, te_stream stream);
void backward(const Plan& plan, const BackwardTensors& t, te_stream stream);
}  // namespace cuda

}  // namespace te::normalization
