/* activation: elementwise and gated activations (GLU family), forward and backward, for MLP blocks.
 *
 * Formula. Plain kinds: y = act(x). Gated kinds read x as [a | b], two halves of each row, a first: y = act(a) * b.
 * TE_ACTIVATION_TABLE (ops/activation/activation_math.h) is the list of all kinds with their formulas; among them are:
 *   sigmoid(t) = 1 / (1 + exp(-t))
 *   gelu(t)  = t * sigmoid(2 u), u = sqrt(2/pi) * (t + 0.044715 t^3)     (the tanh approximation)
 *   qgelu(t) = t * sigmoid(1.702 t)     silu(t) = t * sigmoid(t)
 *   relu(t)  = max(t, 0), NaN kept      srelu(t) = relu(t)^2
 *   gated, in the order of these formulas: glu (act = sigmoid), geglu, qgeglu, swiglu, reglu, sreglu
 *   clamped_swiglu: p = min(a, limit), q = clamp(b, -limit, limit) + glu_linear_offset, y = p * sigmoid(alpha p) * q
 *     (limit > 0, defaults 7, 1.702, 1; a gradient is 0 where its operand is clamped).
 * Shapes. x [rows, cols] for plain kinds, [rows, 2 cols] for gated ones; y [rows, cols].
 * Dtypes. float32, float16, bfloat16, one for all arguments; arithmetic in float32, one rounding at the store.
 * Aliasing. y may be x's memory only for plain kinds with equal pitch, and in te_activation_backward dy's with equal
 *   pitch; other overlaps give wrong results.
 * Errors. TE_INVALID_ARGUMENT for an unknown kind, a wrong shape, dtype or device. */
#ifndef TRANSFORMER_ENGINE_ACTIVATION_H_
#define TRANSFORMER_ENGINE_ACTIVATION_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kinds are numbered from 0 to te_activation_count() - 1; numbers may change between builds, names do not. */
TE_API int te_activation_count(void);
TE_API const char* te_activation_name(int kind); /* NULL when out of range */
TE_API int te_activation_kind(const char* name); /* -1 when unknown */
TE_API int te_activation_is_gated(int kind);     /* 0 when out of range */

/* The parameters of clamped_swiglu; the other kinds do not read them. */
typedef struct te_activation_params {
  float limit;
  float alpha;
  float glu_linear_offset;
} te_activation_params;

/* Writes every element of y. */
TE_API te_status te_activation_forward(int kind, te_activation_params params, te_tensor x, te_tensor y,
                                       te_stream stream);

/* dx, shaped like x (for gated kinds the merged [da | db]), from dy and the saved x. If `y` is present (data not NULL),
 * the forward's output is recomputed into it with the same bits, so that it need not be saved. */
TE_API te_status te_activation_backward(int kind, te_activation_params params, te_tensor dy, te_tensor x, te_tensor dx,
                                        te_tensor y, te_stream stream);

/* ---- with a scale for each row ----
 * y[r] = act(x[r]) * scale[r] for the live rows r < n: the activation is rounded to x's dtype, as te_activation_forward
 * stores it, then multiplied in float32 and rounded again. n is the int32 in `live`, cut to x's rows, or all rows if
 * `live` is absent (data NULL). Other rows of every tensor are neither read nor written.
 * Shapes. x, y, dy, dx as above; scale and dscale [1, rows]; live [1, 1], on x's device.
 * Dtypes. scale: float32 or x's dtype; dscale: that of scale.
 * FP8 results: quantize y and dx, by groups with te_grouped_quantize. */
TE_API te_status te_activation_scaled_forward(int kind, te_activation_params params, te_tensor x, te_tensor scale,
                                              te_tensor live, te_tensor y, te_stream stream);

/* dx is te_activation_backward of round(dy[r] * scale[r]) in x's dtype. dscale[r], unless absent: the sum over the row
 * of dy * act(x) (as rounded) in float32 in a fixed order, rounded once. y, unless absent: the forward's output with
 * the same bits. */
TE_API te_status te_activation_scaled_backward(int kind, te_activation_params params, te_tensor dy, te_tensor x,
                                               te_tensor scale, te_tensor live, te_tensor dx, te_tensor dscale,
                                               te_tensor y, te_stream stream);

/* ---- fused quantization to FP8 (plans and scales: transformer_engine/quantize.h) ----
 * Values are rounded to x's dtype first: the bytes, scales and amaxes are those of te_activation_forward or _backward
 * followed by te_quantize, without the intermediate tensor. */
struct te_quantize_plan;
struct te_quantized;

/* y in FP8. One launch. */
TE_API te_status te_activation_forward_quantize(int kind, te_activation_params params, te_tensor x,
                                                const struct te_quantize_plan* plan, const struct te_quantized* out,
                                                te_stream stream);

/* dx in FP8 (for gated kinds the merged [da | db]) and, if `y` is not NULL, y too, with its own plan. One launch; two
 * for a gated kind whose columns are not a multiple of 128. */
TE_API te_status te_activation_backward_quantize(int kind, te_activation_params params, te_tensor dy, te_tensor x,
                                                 const struct te_quantize_plan* dx_plan, const struct te_quantized* dx,
                                                 const struct te_quantize_plan* y_plan, const struct te_quantized* y,
                                                 te_stream stream);

/* Partial amaxes of y and of dx, as from te_quantize_amax: the first launch of current scaling. */
TE_API te_status te_activation_forward_amax(int kind, te_activation_params params, te_tensor x, te_tensor parts,
                                            te_tensor noop, te_stream stream);
TE_API te_status te_activation_backward_amax(int kind, te_activation_params params, te_tensor dy, te_tensor x,
                                             te_tensor parts, te_tensor noop, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_ACTIVATION_H_ */
