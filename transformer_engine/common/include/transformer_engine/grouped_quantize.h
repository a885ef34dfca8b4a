/* grouped quantize: FP8 data with scales of rows in groups, whose sizes are on the device alone: the operands of
 * te_grouped_gemm. One launch for all groups (current scaling: two); no host synchronisation, no workspace but
 * amax_parts, capturable.
 *
 * Formula. For each group g with rows [offsets[g], offsets[g + 1]) of x [R, K], the result of te_quantize on these rows
 *   alone, in every byte and scale: its rowwise direction at the same rows of `rowwise`, its columnwise one as panels.
 *   Both come from one read of x; each may be absent (data NULL).
 * Row map. With row_map [1, R], x is [T, K] and row r is x[row_map[r]], 0 where row_map[r] is not a row of x: the bytes
 *   and scales of te_permute_gather and then this function, without the gathered rows in memory.
 * Panels. A panel has up to 128 rows of one group; group g of n rows has ceil(n / 128) of them, followed by those of
 *   the next group. Panel p is rows [p K, (p + 1) K) of `panels` [P K, 128]: for each column of x the adjacent values
 *   of the panel's rows, 0 after the group's last row. P >= (R - m) / 128 + m, m = min(groups, R), so that any split
 *   fits. Panels after the last group's last one, and their scales, are not written.
 * Scales, float32:
 *   BLOCK_1D  rowwise_scale_inv [ceil(K / 128), roundup(R, 4)]: 1 x 128, those of row r in column r
 *             panels_scale_inv [P, roundup(K, 4)]: 128 x 1, one for each panel and column
 *             columns from R, and from K, on become 0
 *   TENSOR    [1, groups] each, with the same values, and they may be the same memory; one is absent with its
 *   direction.
 *             Every element is written: that of a group without rows as te_quantize does for a matrix without rows.
 * TENSOR takes group g's scale from scales[g] (delayed scaling), and then *amaxes[g] = max(*amaxes[g], max |x|); or,
 *   with amax_parts, computes it from the group's max |x| (current scaling), which is stored in *amaxes[g]. Exactly one
 *   of scales and amax_parts is present.
 * Dtypes. x float32, bfloat16 or float16; data float8_e4m3 or float8_e5m2, one for both; row_map int32.
 * Layouts. x, scales: any address, any pitch >= cols. rowwise: address and pitch on 16 bytes; bytes between a row's
 *   columns and the pitch become 0. panels: address on 16 bytes, pitch 128. Any K, R and T < 2^31, and up to
 *   TE_GROUPED_QUANTIZE_GROUPS groups of any sizes, 0 included.
 * Offsets. Those of te_grouped_offsets: 0 = offsets[0] <= ... <= offsets[groups] <= R, on x's device. On the CPU others
 *   are refused; on CUDA they are not checked, but nothing outside of the tensors is read or written for any offsets.
 * Tails. Rows from offsets[groups] on, and their rowwise scales, are neither read nor written. Values of one group, NaN
 *   and Inf included, do not reach the data and scales of another.
 * Determinism. Bit-equal on the CPU and on CUDA; a group's bits do not depend on the other groups.
 * Aliasing. No output overlaps an input or another output, but for the scales of TENSOR.
 * Errors. TE_INVALID_ARGUMENT for shapes, dtypes, devices, pitches, addresses, other scalings, and arguments that the
 *   scaling does not have; nothing is written then. */
#ifndef TRANSFORMER_ENGINE_GROUPED_QUANTIZE_H_
#define TRANSFORMER_ENGINE_GROUPED_QUANTIZE_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TE_GROUPED_QUANTIZE_GROUPS 1024
/* amax_parts is [1, TE_GROUPED_QUANTIZE_PARTS + groups]; its contents are unspecified afterwards. */
#define TE_GROUPED_QUANTIZE_PARTS 1024

/* Absent arguments are NULL (a tensor: its data, with 0 rows and columns). */
typedef struct te_grouped_quantize_problem {
  te_tensor x;            /* [R, K]; with row_map [T, K] */
  te_tensor row_map;      /* int32 [1, R] on x's device; or absent */
  int32_t groups;         /* 1 to TE_GROUPED_QUANTIZE_GROUPS */
  const int32_t* offsets; /* [groups + 1] on x's device */
  te_scaling scaling;     /* TE_SCALING_TENSOR or TE_SCALING_BLOCK_1D */
  te_tensor rowwise;      /* [R, K] */
  te_tensor rowwise_scale_inv;
  te_tensor panels; /* [P K, 128] */
  te_tensor panels_scale_inv;
  int pow_2_scales;   /* for computed scales */
  float amax_epsilon; /* >= 0 */
  /* TENSOR */
  te_tensor amax_parts;       /* float32 [1, TE_GROUPED_QUANTIZE_PARTS + groups]: current scaling; or absent */
  const float* const* scales; /* [groups] on the host, of one float each on x's device: delayed scaling; or NULL */
  float* const* amaxes;       /* [groups] on the host, of one float each on x's device, or of NULL; or NULL */
} te_grouped_quantize_problem;

TE_API te_status te_grouped_quantize(const te_grouped_quantize_problem* problem, te_stream stream);

/* *panels = the number of panels of all groups, the sum of ceil(n_g / 128): how many te_grouped_quantize writes, for
 * callers that copy no others. offsets [groups + 1] as above, and panels [1], on `device` (TE_DEVICE_CPU or a CUDA
 * ordinal); any number of groups. One launch, capturable. Offsets that te_grouped_offsets does not make give an
 * unspecified number. Errors: TE_INVALID_ARGUMENT for groups < 1, NULL. */
TE_API te_status te_grouped_panels(const int32_t* offsets, int32_t groups, int32_t device, int32_t* panels,
                                   te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_GROUPED_QUANTIZE_H_ */
