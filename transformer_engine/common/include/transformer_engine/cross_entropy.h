/* cross_entropy: the loss of each row of logits against one class, and its gradient, which overwrites the logits.
 *
 * Formula. V = ranks * cols classes, of which this rank has those from rank * cols on; t the row's target; e =
 * label_smoothing; p = softmax over all V:
 *   loss = log(sum_j exp(x_j)) - (1 - e) x_t - e / V sum_j x_j
 *   dx_j = scale (p_j - e / V - (1 - e) [j = t])
 *   Both are 0 if t = ignore_idx, for any row (it is not read).
 * Shapes. logits [rows, cols]; target, loss [1, rows]; statistics [ranks * rows, 4]; scale [1, 1] or [1, rows];
 *   inverse_count, mean [1, 1]; dloss [1, 1] or [1, rows].
 * Dtypes. logits float32, float16 or bfloat16; target int64; all others float32. Arithmetic in float32; a gradient is
 *   rounded once, at its store.
 * Aliasing. The gradient overwrites the logits by contract; no other tensors may overlap.
 * Determinism. A row's bits depend on its values, its length and dtype alone, not on the number of rows or on
 *   alignment.
 * NaN and Inf. A row with NaN or +Inf, or of -Inf alone, has a loss and a gradient of NaN; single -Inf are classes of
 *   probability 0 (the loss of a target there, or of any with label smoothing, is +Inf).
 * Errors. TE_INVALID_ARGUMENT for a wrong shape, dtype or device. A target that is neither ignore_idx nor in [0, V) is
 *   an error on the CPU, before anything is written; on CUDA, where the host does not read targets, its loss and
 *   gradient are NaN. */
#ifndef TRANSFORMER_ENGINE_CROSS_ENTROPY_H_
#define TRANSFORMER_ENGINE_CROSS_ENTROPY_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fields left out of a designated initialiser are 0, which means absent. */
typedef struct te_cross_entropy_plan {
  te_tensor logits;
  te_tensor target;
  te_tensor loss;
  te_tensor scale;      /* absent: 1 */
  te_tensor statistics; /* of every rank, in their order; absent: of this one alone, computed in the same pass */
  int64_t ignore_idx;
  int32_t ranks; /* >= 1; statistics must be present unless it is 1 */
  int32_t rank;
  int32_t gradient; /* 1: overwrites logits; 0: logits do not change, and scale is not read */
  float label_smoothing;
} te_cross_entropy_plan;

/* inverse_count = 1 / the number of targets that are not ignore_idx; +Inf for none. On the CPU also the check of every
 * target against `classes`. */
TE_API te_status te_cross_entropy_count(te_tensor target, int64_t classes, int64_t ignore_idx, te_tensor inverse_count,
                                        te_stream stream);

/* The statistics of this rank's logits that the other ranks need, [rows, 4]: max, sum exp(x - max), x_t (NaN if another
 * rank has that class), sum (x - max). Reads logits and target alone of the plan's tensors. */
TE_API te_status te_cross_entropy_statistics(const te_cross_entropy_plan* plan, te_tensor statistics, te_stream stream);

/* Writes every element of loss, and of logits with plan.gradient. */
TE_API te_status te_cross_entropy_forward(const te_cross_entropy_plan* plan, te_stream stream);

/* mean = sum of loss * inverse_count; NaN for no targets. */
TE_API te_status te_cross_entropy_mean(te_tensor loss, te_tensor inverse_count, te_tensor mean, te_stream stream);

/* grad *= dloss * scale, row by row (scale: [1, 1], absent: 1). Rows whose factor is 1 are neither read nor written;
 * the factor is read on the device, without host synchronisation. A 0 stays 0 for any factor, as the gradient of an
 * ignored token must. grad [rows, cols] of any of the logits' dtypes. */
TE_API te_status te_cross_entropy_backward(te_tensor grad, te_tensor dloss, te_tensor scale, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_CROSS_ENTROPY_H_ */
