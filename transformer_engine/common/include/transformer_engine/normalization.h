/* normalization: LayerNorm and RMSNorm over each row, with an optional fused residual add (forward) and residual
 * gradient add (backward).
 *
 * Formula. h = x, or x + residual rounded to its dtype (the norm reads the rounded h, so a backward that reads the
 * saved h sees the same values); g = gamma, or gamma + 1 when zero_centered_gamma.
 *   LayerNorm: mean = sum(h) / hidden, var = sum((h - mean)^2) / hidden, y = (h - mean) * rstd * g + beta
 *   RMSNorm:   mean = 0,               var = sum(h^2) / hidden,          y = h * rstd * g
 *   rstd = 1 / sqrt(var + eps). The variance is biased and taken in a second pass over the row, after the mean.
 * Shapes. x, residual, y, residual_out, dy, residual_grad, dx [rows, hidden]; gamma, beta, dgamma, dbeta [1, hidden];
 *   mean, rstd [1, rows]. hidden from 1 to 65536.
 * Dtypes. x in float32, float16 or bfloat16, and every [rows, hidden] tensor like it; gamma in x's dtype or float32,
 *   and beta, dgamma, dbeta like gamma; mean, rstd float32. Arithmetic in float32, one rounding at each store.
 * Optional tensors are absent when their data is NULL.
 * Aliasing. An output [rows, hidden] may be the memory of an input [rows, hidden] of the same pitch; no other overlap.
 * Determinism. The same bits in every call: rows are divided into parts by shape alone, and parts are summed in order.
 * Errors. TE_INVALID_ARGUMENT for a wrong shape, dtype, device or missing tensor; TE_NOT_IMPLEMENTED for
 *   hidden > 65536. NaN and Inf in a row spread over that row by the formula. */
#ifndef TRANSFORMER_ENGINE_NORMALIZATION_H_
#define TRANSFORMER_ENGINE_NORMALIZATION_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

struct te_quantize_plan; /* transformer_engine/quantize.h */
struct te_quantized;

typedef struct te_normalization_plan {
  int rms;                 /* 1: RMSNorm, 0: LayerNorm */
  int zero_centered_gamma; /* 1: gamma is stored less one */
  float eps;               /* >= 0, finite */
} te_normalization_plan;

/* Writes every element of y if it is present, of residual_out (required with residual, refused without), and of mean
 * and rstd if they are present. Without y it computes the statistics for a later te_normalization_quantize. beta may be
 * absent; beta and mean must be absent for RMSNorm. */
TE_API te_status te_normalization_forward(te_normalization_plan plan, te_tensor x, te_tensor residual, te_tensor gamma,
                                          te_tensor beta, te_tensor y, te_tensor residual_out, te_tensor mean,
                                          te_tensor rstd, te_stream stream);

/* y in FP8 from the statistics of a forward: y is rounded to h's dtype, then quantized, so that the bytes are those of
 * te_normalization_forward followed by te_quantize, on each device. h [rows, hidden]: the norm input (residual_out
 * after a forward with residual). mean is absent for RMSNorm. `quantize` and `out`: transformer_engine/quantize.h. One
 * launch. plan.eps is not read. */
TE_API te_status te_normalization_quantize(te_normalization_plan plan, te_tensor h, te_tensor mean, te_tensor rstd,
                                           te_tensor gamma, te_tensor beta, const struct te_quantize_plan* quantize,
                                           const struct te_quantized* out, te_stream stream);

/* The forward with y in FP8: te_normalization_forward without y, then te_normalization_quantize. The first writes
 * quantize->amax_parts, if present, and the second reads it. One launch for rows of a 16-bit dtype with 1025 to 8192
 * elements on 16 bytes that need no amax first, else two. mean (for LayerNorm) and rstd must be present. workspace:
 * uint8 [1, >= te_normalization_forward_quantize_workspace()] on 16 bytes, contents irrelevant before and after; not
 * read, and may be absent, on the CPU. */
TE_API te_status te_normalization_forward_quantize(te_normalization_plan plan, te_tensor x, te_tensor residual,
                                                   te_tensor gamma, te_tensor beta, te_tensor residual_out,
                                                   te_tensor mean, te_tensor rstd,
                                                   const struct te_quantize_plan* quantize,
                                                   const struct te_quantized* out, te_tensor workspace,
                                                   te_stream stream);
TE_API size_t te_normalization_forward_quantize_workspace(int64_t rows);

/* Bytes that te_normalization_backward needs in `workspace` on CUDA; 0 without rows. */
TE_API size_t te_normalization_backward_workspace(te_normalization_plan plan, int64_t rows, int64_t hidden);

/* With h = x the saved norm input, n = (h - mean) * rstd, w = dy * g and means taken over the row:
 *   dx = (w - mean(w) - n * mean(w * n)) * rstd + residual_grad      (RMSNorm: without mean(w))
 *   dgamma = sum over rows of dy * n, dbeta = sum over rows of dy
 * dx, dgamma and dbeta are written (`=`) if present; residual_grad (optional) needs dx. Without rows dgamma and dbeta
 * are zeros. mean must be present for LayerNorm; mean and dbeta must be absent for RMSNorm. workspace: uint8 [1,
 * >= te_normalization_backward_workspace()] on 16 bytes, contents irrelevant before and after; not read, and may be
 * absent, on the CPU and if dgamma and dbeta are both absent. */
TE_API te_status te_normalization_backward(te_normalization_plan plan, te_tensor dy, te_tensor residual_grad,
                                           te_tensor x, te_tensor gamma, te_tensor mean, te_tensor rstd, te_tensor dx,
                                           te_tensor dgamma, te_tensor dbeta, te_tensor workspace, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_NORMALIZATION_H_ */
