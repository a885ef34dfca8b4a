/* optimizer: steps of Adam and SGD over lists of tensors, scaling, norms, FP8 scales from amaxes: many tensors a
 * launch, each element read and written once. It owns no state; parameter groups and schedules are left to the caller.
 *
 * Lists. A te_optimizer_tensor holds one tensor's memory in each list of an op, contiguous, numel elements each, at any
 * address their type allows. One call has one dtype a list.
 *
 * Adam, float32, with g the gradient, p the weight (its master, where it has one), c = 1 - beta^step or 1:
 *   g = g inv_scale, written back where inv_scale is given; g = g clip
 *   L2 mode: g = g + weight_decay p
 *   m = beta1 m + (1 - beta1) g
 *   v = beta2 v + (1 - beta2) g g
 *   u = (m / c1) / (sqrt(v / c2) + eps)
 *   decoupled mode: u = u + weight_decay p
 *   p = p - lr u
 *
 * SGD, float32:
 *   g = g scale
 *   unless decay_after_momentum: g = g + weight_decay p
 *   b = g in the first run, else momentum b + (1 - dampening) g
 *   g = nesterov ? g + momentum b : b (without momentum: g)
 *   with decay_after_momentum: g = g + weight_decay p
 *   p = p - lr g
 *
 * Bits. Every multiply-add is one fma, division and square root are rounded as in IEEE 754, and the two constants of
 * the bias correction come from double: an element's bits depend on its own values and the options alone, not on its
 * position, on how tensors are divided or grouped, on threads, on whether lr and step are on the device, or on that
 * device (but for the payload of a NaN). Scaled states and FP8 weights depend on their whole tensor, through its scale.
 *
 * Moments: float32; bfloat16; float16 and float8_e4m3 as value / scale, scale = amax / 32752 and amax / 448, 1 if amax
 * is 0, Inf or NaN, at least FLT_MIN. A scaled second moment that is not 0 never becomes 0: it is at least the format's
 * smallest value, amax 2^-39 or amax 2^-17.8.
 *
 * Masters: te_master. With TE_MASTER_REMAINDER the weight is bfloat16 and the master an int16: the low half of the
 * float32 master's bits. The weight is the high half, plus one if the low one is negative.
 *
 * Flags. noop, int32 or float32 [1]: if it is not 0, nothing is written. Without it Infs and NaNs are not intercepted.
 *
 * Aliasing. The memory of two tensors does not overlap; `in` and `out` of te_optimizer_scale may be the same.
 *
 * Errors. TE_INVALID_ARGUMENT for dtypes, sizes, devices, options; nothing is written then. */
#ifndef TRANSFORMER_ENGINE_OPTIMIZER_H_
#define TRANSFORMER_ENGINE_OPTIMIZER_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TE_OPTIMIZER_LISTS 5

/* data: in the order of the op's lists; NULL if numel is 0, or for an absent list. */
typedef struct te_optimizer_tensor {
  int64_t numel;
  void* data[TE_OPTIMIZER_LISTS];
} te_optimizer_tensor;

typedef enum te_master {
  TE_MASTER_NONE = 0,     /* the weight is updated itself */
  TE_MASTER_FLOAT32 = 1,  /* the weight is written, never read */
  TE_MASTER_FLOAT16 = 2,  /* the same; value / scale, scale = amax / 32752 */
  TE_MASTER_REMAINDER = 3 /* int16 */
} te_master;

/* Further memory of a tensor with scaled states or FP8 weights, float32. A pair is the scale and scratch for maxima,
 * 0 before and after each call. Fields that the plan does not use are not read. */
typedef struct te_adam_scales {
  float* exp_avg;         /* pair */
  float* exp_avg_sq;      /* pair */
  float* master;          /* pair */
  const float* fp8_scale; /* weight = fp8(clamp(rounded * scale)) */
  float* fp8_amax;        /* amax = max(amax, |rounded|), ignoring NaN */
  float* fp8_scale_inv;   /* 1 / scale */
  int64_t fp8_cols;       /* columns of the weight's data, and its row pitch, in bytes */
  int64_t fp8_row_pitch;
} te_adam_scales;

/* Lists: gradient, weight, exp_avg, exp_avg_sq, master. */
typedef struct te_adam_plan {
  double lr;
  double beta1; /* in [0, 1) */
  double beta2; /* in [0, 1) */
  double eps;   /* >= 0 */
  double weight_decay;
  int64_t step; /* of this step, the first is 1 */
  int decoupled;
  int bias_correction;
  te_dtype grad;       /* float32, float16, bfloat16 */
  te_dtype param;      /* these, or float8_e4m3 and float8_e5m2 with a float master */
  te_dtype rounding;   /* FP8 weights: the dtype that the master is rounded to first */
  te_dtype exp_avg;    /* float32, bfloat16, float16, float8_e4m3 */
  te_dtype exp_avg_sq; /* likewise */
  te_master master;
  te_tensor noop;        /* [1]; it and the following may be absent */
  te_tensor lr_device;   /* float32 [1], in place of lr */
  te_tensor step_device; /* int32 [1], in place of step */
  te_tensor inv_scale;   /* float32 [1] */
  te_tensor clip;        /* float32 [1] */
} te_adam_plan;

/* One launch for a few hundred tensors; three with scaled states. scales: one for each tensor, or NULL if the plan has
 * neither scaled states nor FP8 weights. */
TE_API te_status te_optimizer_adam(const te_adam_plan* plan, const te_optimizer_tensor* tensors,
                                   const te_adam_scales* scales, int64_t count, int32_t device, te_stream stream);

/* step = step + 1, unless noop is set: int32 [1]. */
TE_API te_status te_optimizer_count_step(te_tensor step, te_tensor noop, te_stream stream);

/* Lists: gradient, weight, momentum (absent if momentum is 0), copy (with has_copy: the weight in another dtype). */
typedef struct te_sgd_plan {
  double lr;
  double weight_decay;
  double momentum;
  double dampening;
  double scale;
  int nesterov;
  int first_run;
  int decay_after_momentum;
  int has_copy;
  te_dtype grad; /* float32, float16, bfloat16, as the three below */
  te_dtype param;
  te_dtype momentum_buffer;
  te_dtype copy;
  te_tensor noop; /* may be absent */
} te_sgd_plan;

TE_API te_status te_optimizer_sgd(const te_sgd_plan* plan, const te_optimizer_tensor* tensors, int64_t count,
                                  int32_t device, te_stream stream);

/* Lists: in, out. out = in * scale, rounded once more to out's dtype. */
typedef struct te_scale_plan {
  double scale;
  te_tensor scale_device; /* float32 [1], in place of scale; may be absent */
  te_dtype in;            /* float32, float16, bfloat16 */
  te_dtype out;
  te_tensor noop; /* set to 1 if a product is Inf or NaN, and not read; may be absent */
} te_scale_plan;

TE_API te_status te_optimizer_scale(const te_scale_plan* plan, const te_optimizer_tensor* tensors, int64_t count,
                                    int32_t device, te_stream stream);

/* Norms, in two calls. A chunk is TE_OPTIMIZER_NORM_CHUNK elements of a tensor, from its start on, the last one
 * shorter; its sum of squares is a double, added in an order that depends on its size alone. */
#define TE_OPTIMIZER_NORM_CHUNK 32768

/* List: x. partials[k] = sum of (x inv_scale)^2 over chunk k of all tensors, in order; inv_scale: float32 [1], may be
 * absent. */
TE_API te_status te_optimizer_square_sums(const te_optimizer_tensor* tensors, int64_t count, te_dtype dtype,
                                          te_tensor inv_scale, double* partials, int32_t device, te_stream stream);

/* norm [1, 1] = the root of the sum of all partials. per_tensor: absent, or [1, count], the root of the sum of tensor
 * i's chunks[i] partials; both float32. noop: set to 1 if norm is Inf or NaN, and not read; may be absent. */
TE_API te_status te_optimizer_norm(const double* partials, const int64_t* chunks, int64_t count, te_tensor norm,
                                   te_tensor per_tensor, te_tensor noop, te_stream stream);

/* Lists, float32: amax, scale, scale_inv. scale = max_fp8 / max(amax, epsilon), by the rules of quantize.h;
 * scale_inv = 1 / scale. */
TE_API te_status te_optimizer_compute_scales(const te_optimizer_tensor* tensors, int64_t count, float max_fp8,
                                             int pow_2_scales, float epsilon, int32_t device, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_OPTIMIZER_H_ */
