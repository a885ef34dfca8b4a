// Declarations that the files of the optimizer op share: the two paths of each entry point, with checked arguments, and
// properties of a plan.
#pragma once

#include "core/tensor.h"
#include "transformer_engine/optimizer.h"

namespace te::optimizer {

using Tensors = const te_optimizer_tensor*;

inline bool is_scaled(te_dtype dtype) { return dtype == TE_FLOAT16 || dtype == TE_FLOAT8_E4M3; }
inline bool has_scaled_states(const te_adam_plan& plan) {
  return is_scaled(plan.exp_avg) || is_scaled(plan.exp_avg_sq) || plan.master == TE_MASTER_FLOAT16;
}

namespace cpu {
void adam(const te_adam_plan& plan, Tensors tensors, const te_adam_scales* scales, int64_t count);
void count_step(const te_tensor& step, const te_tensor& noop);
void sgd(const te_sgd_plan& plan, Tensors tensors, int64_t count);
void scale(const te_scale_plan& plan, Tensors tensors, int64_t count);
void square_sums(Tensors tensors, int64_t count, te_dtype dtype, const te_tensor& inv_scale, double* partials);
void norm(const double* partials, const int64_t* chunks, int64_t count, const te_tensor& norm,
          const te_tensor& per_tensor, const te_tensor& noop);
void compute_scales(Tensors tensors, int64_t count, float max_fp8, bool pow_2, float epsilon);
}  // namespace cpu

namespace cuda {
void adam(const te_adam_plan& plan, Tensors tensors, const te_adam_scales* scales, int64_t count, te_stream stream);
void count_step(const te_tensor& step, const te_tensor& noop, te_stream stream);
void sgd(const te_sgd_plan& plan, Tensors tensors, int64_t count, te_stream stream);
void scale(const te_scale_plan& plan, Tensors tensors, int64_t count, te_stream stream);
void square_sums(Tensors tensors, int64_t count, te_dtype dtype, const te_tensor& inv_scale, double* partials,
                 te_stream stream);
void norm(const double* partials, const int64_t* chunks, int64_t count, const te_tensor& norm,
          const te_tensor& per_tensor, const te_tensor& noop, te_stream stream);
void compute_scales(Tensors tensors, int64_t count, float max_fp8, bool pow_2, float epsilon, te_stream stream);
}  // namespace cuda

}  // namespace te::optimizer
