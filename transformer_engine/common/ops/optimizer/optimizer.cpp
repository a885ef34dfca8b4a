// optimizer, contract and entry points. The CPU path is optimizer_cpu.cpp, the formulas optimizer_math.h.
#include "transformer_engine/optimizer.h"

#include <cmath>

#include "core/device.h"
#include "core/fp8.h"
#include "ops/optimizer/paths.h"

namespace te::optimizer {

namespace {

void check_float_dtype(const char* op, const char* argument, te_dtype dtype) {
  dispatch_float(dtype, op, argument, [](auto) {});
}

// A tensor of one element, or none.
void check_one(const char* op, const char* argument, const te_tensor& t, te_dtype dtype, int32_t device) {
  if (t.data == nullptr) return;
  te_tensor like{};
  like.dtype = dtype;
  like.device = device;
  check_as(op, argument, t, 1, 1, like);
}

void check_flag(const char* op, const te_tensor& noop, int32_t device) {
  check_one(op, "noop", noop, noop.dtype == TE_FLOAT32 ? TE_FLOAT32 : TE_INT32, device);
}

struct List {
  const char* name;
  bool present;
};

void check_lists(const char* op, Tensors tensors, int64_t count, int32_t device, std::initializer_list<List> lists) {
  if (count < 0) bad_argument(op, "count", count, "a number >= 0");
  if (count > 0 && tensors == nullptr) bad_argument(op, "tensors", "NULL", "an array");
  if (device < TE_DEVICE_CPU) bad_argument(op, "device", device, "TE_DEVICE_CPU or a CUDA ordinal");
  for (int64_t i = 0; i < count; ++i) {
    const te_optimizer_tensor& t = tensors[i];
    if (t.numel < 0) bad_argument(op, "numel", concat(t.numel, " in tensor ", i), "a number >= 0");
    int list = 0;
    for (const List& wanted : lists) {
      if (wanted.present && t.numel > 0 && t.data[list] == nullptr) {
        bad_argument(op, wanted.name, concat("NULL in tensor ", i), "its address");
      }
      ++list;
    }
  }
}

void check_fraction(const char* op, const char* argument, double value) {
  if (!(value >= 0.0 && value < 1.0)) bad_argument(op, argument, value, "a number in [0, 1)");
}

void check_moment(const char* op, const char* argument, te_dtype dtype) {
  if (dtype == TE_FLOAT32 || dtype == TE_BFLOAT16 || is_scaled(dtype)) return;
  const char* name = te_dtype_name(dtype);
  bad_argument(op, argument, concat("of dtype ", name ? name : "unknown"), "float32, bfloat16, float16 or float8_e4m3");
}

void check_adam_dtypes(const char* op, const te_adam_plan& plan) {
  check_float_dtype(op, "plan.grad", plan.grad);
  check_moment(op, "plan.exp_avg", plan.exp_avg);
  check_moment(op, "plan.exp_avg_sq", plan.exp_avg_sq);
  if (plan.master < TE_MASTER_NONE || plan.master > TE_MASTER_REMAINDER) {
    bad_argument(op, "plan.master", int(plan.master), "a te_master");
  }
  if (plan.master == TE_MASTER_REMAINDER && plan.param != TE_BFLOAT16) {
    const char* name = te_dtype_name(plan.param);
    bad_argument(op, "plan.param", concat("of dtype ", name ? name : "unknown"), "bfloat16: its master is a remainder");
  }
  if (!is_fp8(plan.param)) return check_float_dtype(op, "plan.param", plan.param);
  check_float_dtype(op, "plan.rounding", plan.rounding);
  if (plan.master != TE_MASTER_FLOAT32 && plan.master != TE_MASTER_FLOAT16) {
    bad_argument(op, "plan.master", "none", "a float master: FP8 weights lose what is smaller than their steps");
  }
}

void check_scales(const char* op, const te_adam_plan& plan, const te_optimizer_tensor& t, const te_adam_scales& s) {
  const auto wanted = [&](bool needed, const void* p, const char* name) {
    if (needed && p == nullptr && t.numel > 0) bad_argument(op, name, "NULL", "its memory");
  };
  wanted(is_scaled(plan.exp_avg), s.exp_avg, "scales.exp_avg");
  wanted(is_scaled(plan.exp_avg_sq), s.exp_avg_sq, "scales.exp_avg_sq");
  wanted(plan.master == TE_MASTER_FLOAT16, s.master, "scales.master");
  if (!is_fp8(plan.param)) return;
  wanted(true, s.fp8_scale, "scales.fp8_scale");
  wanted(true, s.fp8_amax, "scales.fp8_amax");
  wanted(true, s.fp8_scale_inv, "scales.fp8_scale_inv");
  if (t.numel > 0 && (s.fp8_cols < 1 || t.numel % s.fp8_cols != 0)) {
    bad_argument(op, "scales.fp8_cols", s.fp8_cols, concat("a divisor of the ", t.numel, " elements"));
  }
  if (s.fp8_row_pitch < s.fp8_cols) {
    bad_argument(op, "scales.fp8_row_pitch", s.fp8_row_pitch, concat(">= ", s.fp8_cols));
  }
}

void check_adam(const char* op, const te_adam_plan& plan, Tensors tensors, const te_adam_scales* scales, int64_t count,
                int32_t device) {
  check_adam_dtypes(op, plan);
  check_fraction(op, "plan.beta1", plan.beta1);
  check_fraction(op, "plan.beta2", plan.beta2);
  if (!(plan.eps >= 0.0)) bad_argument(op, "plan.eps", plan.eps, "a number >= 0");
  if (plan.step_device.data == nullptr && plan.step < 1) bad_argument(op, "plan.step", plan.step, "a number >= 1");
  check_one(op, "plan.step_device", plan.step_device, TE_INT32, device);
  check_one(op, "plan.lr_device", plan.lr_device, TE_FLOAT32, device);
  check_one(op, "plan.inv_scale", plan.inv_scale, TE_FLOAT32, device);
  check_one(op, "plan.clip", plan.clip, TE_FLOAT32, device);
  check_flag(op, plan.noop, device);
  const bool master = plan.master != TE_MASTER_NONE;
  check_lists(op, tensors, count, device,
              {{"grad", true}, {"param", true}, {"exp_avg", true}, {"exp_avg_sq", true}, {"master", master}});
  if (!has_scaled_states(plan) && !is_fp8(plan.param)) return;
  if (scales == nullptr && count > 0) bad_argument(op, "scales", "NULL", "an array: states or weights are scaled");
  for (int64_t i = 0; i < count; ++i) check_scales(op, plan, tensors[i], scales[i]);
}

}  // namespace

}  // namespace te::optimizer

// The tensor for TE_ON_DEVICE_OF.
#define TE_ON_DEVICE(op, ordinal, cpu_call, cuda_call)   \
  do {                                                   \
    te_tensor on_device{};                               \
    on_device.device = ordinal;                          \
    TE_ON_DEVICE_OF(op, on_device, cpu_call, cuda_call); \
  } while (0)

extern "C" {

te_status te_optimizer_adam(const te_adam_plan* plan, const te_optimizer_tensor* tensors, const te_adam_scales* scales,
                            int64_t count, int32_t device, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_optimizer_adam";
    optimizer::check_adam(op, *plan, tensors, scales, count, device);
    TE_ON_DEVICE(op, device, optimizer::cpu::adam(*plan, tensors, scales, count),
                 optimizer::cuda::adam(*plan, tensors, scales, count, stream));
  });
}

te_status te_optimizer_count_step(te_tensor step, te_tensor noop, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_optimizer_count_step";
    check_shape(op, "step", step, 1, 1);
    optimizer::check_one(op, "step", step, TE_INT32, step.device);
    optimizer::check_flag(op, noop, step.device);
    TE_ON_DEVICE_OF(op, step, optimizer::cpu::count_step(step, noop), optimizer::cuda::count_step(step, noop, stream));
  });
}

te_status te_optimizer_sgd(const te_sgd_plan* plan, const te_optimizer_tensor* tensors, int64_t count, int32_t device,
                           te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_optimizer_sgd";
    const bool momentum = plan->momentum != 0.0, copy = plan->has_copy != 0;
    optimizer::check_float_dtype(op, "plan.grad", plan->grad);
    optimizer::check_float_dtype(op, "plan.param", plan->param);
    if (momentum) optimizer::check_float_dtype(op, "plan.momentum_buffer", plan->momentum_buffer);
    if (copy) optimizer::check_float_dtype(op, "plan.copy", plan->copy);
    if (!(plan->momentum >= 0.0)) bad_argument(op, "plan.momentum", plan->momentum, "a number >= 0");
    if (plan->nesterov && (!momentum || plan->dampening != 0.0)) {
      bad_argument(op, "plan.nesterov", "1", "0, or a momentum and a dampening of 0");
    }
    optimizer::check_flag(op, plan->noop, device);
    optimizer::check_lists(op, tensors, count, device,
                           {{"grad", true}, {"param", true}, {"momentum", momentum}, {"copy", copy}});
    TE_ON_DEVICE(op, device, optimizer::cpu::sgd(*plan, tensors, count),
                 optimizer::cuda::sgd(*plan, tensors, count, stream));
  });
}

te_status te_optimizer_scale(const te_scale_plan* plan, const te_optimizer_tensor* tensors, int64_t count,
                             int32_t device, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_optimizer_scale";
    optimizer::check_float_dtype(op, "plan.in", plan->in);
    optimizer::check_float_dtype(op, "plan.out", plan->out);
    optimizer::check_one(op, "plan.scale_device", plan->scale_device, TE_FLOAT32, device);
    optimizer::check_flag(op, plan->noop, device);
    optimizer::check_lists(op, tensors, count, device, {{"in", true}, {"out", true}});
    TE_ON_DEVICE(op, device, optimizer::cpu::scale(*plan, tensors, count),
                 optimizer::cuda::scale(*plan, tensors, count, stream));
  });
}

te_status te_optimizer_square_sums(const te_optimizer_tensor* tensors, int64_t count, te_dtype dtype,
                                   te_tensor inv_scale, double* partials, int32_t device, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_optimizer_square_sums";
    optimizer::check_float_dtype(op, "dtype", dtype);
    optimizer::check_one(op, "inv_scale", inv_scale, TE_FLOAT32, device);
    optimizer::check_lists(op, tensors, count, device, {{"x", true}});
    if (count > 0 && partials == nullptr) bad_argument(op, "partials", "NULL", "a double for each chunk");
    TE_ON_DEVICE(op, device, optimizer::cpu::square_sums(tensors, count, dtype, inv_scale, partials),
                 optimizer::cuda::square_sums(tensors, count, dtype, inv_scale, partials, stream));
  });
}

te_status te_optimizer_norm(const double* partials, const int64_t* chunks, int64_t count, te_tensor norm,
                            te_tensor per_tensor, te_tensor noop, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_optimizer_norm";
    if (count < 0) bad_argument(op, "count", count, "a number >= 0");
    check_shape(op, "norm", norm, 1, 1);
    optimizer::check_one(op, "norm", norm, TE_FLOAT32, norm.device);
    if (per_tensor.data != nullptr) check_as(op, "per_tensor", per_tensor, 1, count, norm);
    optimizer::check_flag(op, noop, norm.device);
    for (int64_t i = 0; i < count; ++i) {
      if (chunks[i] < 0) bad_argument(op, "chunks", concat(chunks[i], " in tensor ", i), "a number >= 0");
    }
    TE_ON_DEVICE_OF(op, norm, optimizer::cpu::norm(partials, chunks, count, norm, per_tensor, noop),
                    optimizer::cuda::norm(partials, chunks, count, norm, per_tensor, noop, stream));
  });
}

te_status te_optimizer_compute_scales(const te_optimizer_tensor* tensors, int64_t count, float max_fp8,
                                      int pow_2_scales, float epsilon, int32_t device, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_optimizer_compute_scales";
    if (!(max_fp8 > 0.f && std::isfinite(max_fp8))) bad_argument(op, "max_fp8", max_fp8, "a finite number > 0");
    if (!(epsilon >= 0.f && std::isfinite(epsilon))) bad_argument(op, "epsilon", epsilon, "a finite number >= 0");
    optimizer::check_lists(op, tensors, count, device, {{"amax", true}, {"scale", true}, {"scale_inv", true}});
    TE_ON_DEVICE(op, device, optimizer::cpu::compute_scales(tensors, count, max_fp8, pow_2_scales != 0, epsilon),
                 optimizer::cuda::compute_scales(tensors, count, max_fp8, pow_2_scales != 0, epsilon, stream));
  });
}

}  // extern "C"
