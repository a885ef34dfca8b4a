/* grouped gemm: products of rows that lie in groups, one weight a group, where only the device knows how the rows are
 * split. One launch a dtype of results for up to 238 groups; no host synchronisation, no workspace, capturable.
 *
 * Formula, row-major, for each group g with rows [offsets[g], offsets[g + 1]) of x [R, K], y and dy [R, N]:
 *   FPROP  y[rows]  = x[rows] weights[g][N, K]^T + biases[g]
 *   DGRAD  dx[rows] = dy[rows] weights[g][N, K]
 *   WGRAD  results[g][N, K] = dy[rows]^T x[rows], or += where accumulate[g] is not 0
 * Sums in float32, in the order of the reduced dimension; the bias, or what is added to, is added in float32 before the
 * one rounding. (On the CPU the sums are te_gemm's, one group after the other: those of what te_set_cpu_gemm was lent,
 * else the plain loop's.)
 *
 * Layouts. Any pitch >= cols, any K, N and R < 2^31, any group size, 0 included, no group on a multiple of anything. On
 *   CUDA, rows, depth_rows and weights are read by TMA: addresses on 16 bytes and pitches of multiples of 16 bytes
 *   (TE_INVALID_ARGUMENT otherwise: copy into such a pitch). Results and biases lie anywhere.
 * Dtypes. Operands bfloat16 or float16, on the CPU float32 too, the same for all. result, biases: theirs; results:
 *   theirs or float32, each for itself. float32 operands on CUDA: TE_NOT_IMPLEMENTED.
 * Offsets. What te_grouped_offsets makes. On the CPU others are refused; on CUDA nobody looks, but nothing outside of
 *   the tensors is read or written whatever they are.
 * Tails. Rows of result outside all groups are not written, but for those from offsets[groups] on where zero_tail asks
 *   for zeros. A group without rows: results[g] becomes 0, or stays as it is where it accumulates. Nothing reduced
 *   (K = 0 in FPROP, N = 0 in DGRAD): the bias, or 0. What rows of one group hold, NaN and Inf too, reaches the
 *   results of no other.
 * Determinism. Each element is one accumulator's and has one writer: its bits depend on its group's operands alone, not
 *   on the other groups, R, where the group lies, or the number of SMs. On CUDA, that is; te_gemm's promise on the CPU.
 * Aliasing. What is written overlaps no input and nothing else that is written.
 * Errors. TE_INVALID_ARGUMENT for shapes, dtypes, devices, alignments, and arguments that the product does not have;
 *   TE_NOT_IMPLEMENTED for float32 on CUDA and for GPUs other than Hopper; TE_RUNTIME_ERROR from CUDA or without a
 *   driver. Nothing is written then.
 * Source: the tensor map and wgmma chapters of the PTX ISA 8.x; the formulas are those of a linear layer. */
#ifndef TRANSFORMER_ENGINE_GROUPED_GEMM_H_
#define TRANSFORMER_ENGINE_GROUPED_GEMM_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum te_grouped_product { TE_GROUPED_FPROP = 0, TE_GROUPED_DGRAD = 1, TE_GROUPED_WGRAD = 2 } te_grouped_product;

/* What a product does not have is NULL (a tensor: its data), and zero_tail 0. */
typedef struct te_grouped_gemm_problem {
  te_grouped_product product;
  int32_t groups;            /* E >= 1, any number */
  const int32_t* offsets;    /* [groups + 1] on the operands' device: 0 = offsets[0] <= ... <= offsets[groups] <= R */
  te_tensor rows;            /* FPROP: x [R, K]; DGRAD, WGRAD: dy [R, N] */
  te_tensor depth_rows;      /* WGRAD: x [R, K] */
  const te_tensor* weights;  /* FPROP, DGRAD: [groups] on the host, each [N, K] */
  const te_tensor* biases;   /* FPROP: [groups] on the host, each [1, N]; or NULL */
  te_tensor result;          /* FPROP: y [R, N]; DGRAD: dx [R, K] */
  const te_tensor* results;  /* WGRAD: [groups] on the host, each [N, K]; data NULL: that group's is not wanted */
  const uint8_t* accumulate; /* WGRAD: [groups] on the host, += where not 0; NULL: = everywhere */
  int zero_tail;             /* FPROP, DGRAD: rows of result from offsets[groups] on become 0; else they stay */
} te_grouped_gemm_problem;

TE_API te_status te_grouped_gemm(const te_grouped_gemm_problem* problem, te_stream stream);

/* offsets [groups + 1] from splits [groups], int32 or int64, both on `device` (TE_DEVICE_CPU or a CUDA ordinal):
 *   offsets[g] = min(sum of max(splits[i], 0) over i < g, rows)
 * A negative split counts as 0, and rows beyond `rows` are cut off. counters, uint32 [2] there or NULL, gets what had
 * to be mended, and keeps what it had: [0] += negative splits, [1] += rows that were cut, both staying at their most.
 * Right for any values, those whose sum overflows too. One launch, which reads each split once; the calls of several
 * streams may share counters. Errors: TE_INVALID_ARGUMENT for groups < 1, rows outside [0, 2^31), NULL. */
TE_API te_status te_grouped_offsets(const void* splits, int splits_are_int64, int32_t groups, int64_t rows,
                                    int32_t device, int32_t* offsets, uint32_t* counters, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_GROUPED_GEMM_H_ */
