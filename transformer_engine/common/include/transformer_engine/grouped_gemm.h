/* grouped gemm: products of rows in groups, one weight for each group, where the sizes of the groups are on the device
 * alone. One launch for each dtype of results and up to 238 groups; FP8: one for up to 224, WGRAD 200, or two where its
 * results differ in dtype, alignment or accumulate. No workspace, no host synchronisation, capturable.
 *
 * Formula, row-major, for each group g with rows [offsets[g], offsets[g + 1]) of x [R, K], y and dy [R, N]:
 *   FPROP  y[rows]  = x[rows] weights[g][N, K]^T + biases[g]
 *   DGRAD  dx[rows] = dy[rows] weights[g][N, K]
 *   WGRAD  results[g][N, K] = dy[rows]^T x[rows], or += where accumulate[g] is not 0
 * Sums in float32, in the order of the reduced dimension; the bias, or the old result, is added in float32 before the
 * one rounding. On CUDA, float32 results of WGRAD that accumulate products of two-byte operands are added by an atomic
 * in memory where a group has more than 960 rows: its subnormal operands and results count as 0. Groups of fewer rows,
 * and of FP8 operands with any number, keep them. (On the CPU the sums are those of te_gemm, one group after the
 * other.)
 *
 * Layouts. Any pitch >= cols, any K, N and R < 2^31, any group size, 0 included, no alignment of groups. On CUDA, TMA
 *   reads rows, depth_rows, weights and the scales of panels: addresses on 16 bytes and pitches of multiples of 16
 *   bytes (TE_INVALID_ARGUMENT otherwise: copy into such a pitch). Results, biases and other scales may have any
 *   address.
 * Dtypes. Operands bfloat16 or float16, on the CPU float32 too, the same for all. result, biases: the same; results:
 *   the same or float32, each independently. float32 operands on CUDA: TE_NOT_IMPLEMENTED. Or FP8:
 * FP8 operands, as from te_grouped_quantize: value = data * scale_inv, scales float32. rows float8_e4m3 or float8_e5m2,
 *   weights and depth_rows float8_e4m3. The reduced dimension is always along the data's rows:
 *     FPROP  rows: x [R, K] rowwise   weights[g]: rowwise [N, K]
 *     DGRAD  rows: dy [R, N] rowwise  weights[g]: columnwise, so [K, N]
 *     WGRAD  rows: panels of dy [P N, 128]  depth_rows: panels of x [P K, 128]
 *   Panels are the columnwise data of grouped rows: a panel has up to 128 rows of one group, group g has
 *   ceil(n_g / 128) of them, followed by those of the next group. Panel p of x is rows [p K, (p + 1) K): for each
 *   column 128 adjacent values of its rows, 0 after the group's last one; of dy likewise. P is the capacity; panels
 *   after the last group's last one are not read. N and K are those of the wanted results, which have one shape.
 *   Scales. TE_SCALING_TENSOR, one for each group: rows_scale_inv and depth_rows_scale_inv [1, groups],
 *     weights_scale_inv[g] [1, 1] or [1, 2] (the second is not read). TE_SCALING_BLOCK_1D:
 *     FPROP, DGRAD  rows_scale_inv [ceil(cols of rows / 128), C], C >= R: 1 x 128, that of row r in column r;
 *                   weights_scale_inv[g] of 128 x 128 (TE_SCALING_BLOCK_2D), with the shape of quantize.h
 *     WGRAD         rows_scale_inv [P, roundup(N, 4)], depth_rows_scale_inv [P, roundup(K, 4)], one for each panel and
 *                   column
 *   Dtypes of results. result and results float32, bfloat16 or float16, each of results independently; biases float16
 *     with a float16 result, bfloat16 otherwise.
 *   Sums. A partial sum of each 128 of the reduced dimension, in the tensor cores; then in float32, blocks in ascending
 *     order, sum += partial * (scale of rows * scale of the other), or with TENSOR sum += partial and one such factor
 *     at the end. A partial sum keeps fewer bits than float32 on Hopper. (On the CPU: te_gemm's sums of scaled values.)
 *   A group's values are those of its rows quantized alone, so that host splits and offsets agree.
 * Offsets. Those of te_grouped_offsets. On the CPU others are refused, and those of more panels than P; on CUDA they
 *   are not checked, but nothing outside of the tensors is read or written for any offsets.
 * Tails. Rows of result outside all groups are not written, but with zero_tail those from offsets[groups] on become 0.
 *   A group without rows: results[g] becomes 0, or does not change if it accumulates. An empty reduction (K = 0 in
 *   FPROP, N = 0 in DGRAD) gives the bias, or 0. Values of one group, NaN and Inf included, do not reach results of
 *   another.
 * Determinism. Each element has one accumulator and one writer: on CUDA its bits depend on its group's operands alone,
 *   not on the other groups, R, the group's position, or the number of SMs. On the CPU: that of te_gemm.
 * Aliasing. Outputs overlap neither inputs nor each other.
 * Errors. TE_INVALID_ARGUMENT for shapes, dtypes, devices, alignments, and arguments that the product does not have;
 *   TE_NOT_IMPLEMENTED for float32 on CUDA, float8_e5m2 weights and depth_rows, and GPUs other than Hopper;
 *   TE_RUNTIME_ERROR from CUDA or without a driver. Nothing is written then.
 * Source: the tensor map and wgmma chapters of the PTX ISA 8.x; the formulas are those of a linear layer. */
#ifndef TRANSFORMER_ENGINE_GROUPED_GEMM_H_
#define TRANSFORMER_ENGINE_GROUPED_GEMM_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum te_grouped_product { TE_GROUPED_FPROP = 0, TE_GROUPED_DGRAD = 1, TE_GROUPED_WGRAD = 2 } te_grouped_product;

/* Arguments that a product does not have are NULL (a tensor: its data), and zero_tail 0. */
typedef struct te_grouped_gemm_problem {
  te_grouped_product product;
  int32_t groups;            /* E >= 1, any number */
  const int32_t* offsets;    /* [groups + 1] on the operands' device: 0 = offsets[0] <= ... <= offsets[groups] <= R */
  te_tensor rows;            /* FPROP: x [R, K]; DGRAD, WGRAD: dy [R, N] */
  te_tensor depth_rows;      /* WGRAD: x [R, K] */
  const te_tensor* weights;  /* FPROP, DGRAD: [groups] on the host, each [N, K] */
  const te_tensor* biases;   /* FPROP: [groups] on the host, each [1, N]; or NULL */
  te_tensor result;          /* FPROP: y [R, N]; DGRAD: dx [R, K] */
  const te_tensor* results;  /* WGRAD: [groups] on the host, each [N, K]; data NULL: not computed */
  const uint8_t* accumulate; /* WGRAD: [groups] on the host, += where not 0; NULL: = everywhere */
  int zero_tail;             /* FPROP, DGRAD: 1: rows of result from offsets[groups] on become 0; 0: not written */
  /* For FP8 operands; data NULL, NULL and 0 with others. */
  te_scaling scaling; /* TE_SCALING_TENSOR or TE_SCALING_BLOCK_1D */
  te_tensor rows_scale_inv;
  te_tensor depth_rows_scale_inv;     /* WGRAD */
  const te_tensor* weights_scale_inv; /* FPROP, DGRAD: [groups] on the host */
} te_grouped_gemm_problem;

TE_API te_status te_grouped_gemm(const te_grouped_gemm_problem* problem, te_stream stream);

/* From now on, in the whole process, te_grouped_gemm uses at most this many SMs of a GPU (at least two); 0: all. For C
 * callers that run other kernels concurrently, and for tests; the bits do not change. The PyTorch extension never calls
 * it. A captured call keeps the limit of its capture. Errors: TE_INVALID_ARGUMENT for a negative number. */
TE_API te_status te_grouped_gemm_sms(int32_t most);

/* offsets [groups + 1] from splits [groups], int32 or int64, both on `device` (TE_DEVICE_CPU or a CUDA ordinal):
 *   offsets[g] = min(sum of max(splits[i], 0) over i < g, rows)
 * A negative split counts as 0, and rows beyond `rows` are cut off. counters, uint32 [2] on `device` or NULL, count
 * such splits: [0] += negative splits, [1] += rows that were cut off, both saturating. Correct for any values, even if
 * their sum overflows. One launch, which reads each split once; calls on several streams may share counters. Errors:
 * TE_INVALID_ARGUMENT for groups < 1, rows outside [0, 2^31), NULL. */
TE_API te_status te_grouped_offsets(const void* splits, int splits_are_int64, int32_t groups, int64_t rows,
                                    int32_t device, int32_t* offsets, uint32_t* counters, te_stream stream);

/* The same on `device` from splits on the host, none of them negative, which are kernel parameters: there is no copy,
 * the list may be freed at once, and a captured call keeps its splits. One launch for each 1,000 groups. Errors:
 * TE_INVALID_ARGUMENT for groups < 1, a negative split, a sum of 2^31 or more, NULL. */
TE_API te_status te_grouped_offsets_of(const int64_t* splits, int32_t groups, int32_t device, int32_t* offsets,
                                       te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_GROUPED_GEMM_H_ */
