/* grouped quantize: FP8 data with scales of rows that lie in groups, where only the device knows how the rows are
 * split: the operands that te_grouped_gemm reads. One launch for all groups (current scaling: two); no host
 * synchronisation, no workspace but amax_parts, capturable.
 *
 * Formula. For each group g with rows [offsets[g], offsets[g + 1]) of x [R, K], what te_quantize makes of these rows
 *   alone, byte for byte and scale for scale: its rowwise direction at the same rows of `rowwise`, its columnwise one
 *   as panels. One read of x makes both; each may be absent (data NULL).
 * Panels. A panel has up to 128 rows of one group; group g of n rows has ceil(n / 128) of them, one group's behind
 *   another's. Panel p is rows [p K, (p + 1) K) of `panels` [P K, 128]: for each column of x its values in the panel's
 *   rows side by side, 0 behind the group's last row. P >= (R - m) / 128 + m, m = min(groups, R), so that any split has
 *   room. Panels behind the last group's last one, and their scales, are not touched.
 * Scales, float32:
 *   BLOCK_1D  rowwise_scale_inv [ceil(K / 128), roundup(R, 4)]: 1 x 128, that of row r in column r
 *             panels_scale_inv [P, roundup(K, 4)]: 128 x 1, one a panel and column
 *             columns behind R, and behind K, become 0
 *   TENSOR    [1, groups] each, alike, and they may be the same memory; where one is absent, so is its direction. Every
 *             element is written: that of a group without rows is what te_quantize makes of a matrix without rows.
 * TENSOR takes group g's scale from scales[g] (delayed scaling), and then *amaxes[g] = max(*amaxes[g], max |x|); or,
 *   with amax_parts, makes it of the group's own max |x| (current scaling), and then *amaxes[g] is that. Just one of
 *   scales and amax_parts is there.
 * Dtypes. x float32, bfloat16 or float16; data float8_e4m3 or float8_e5m2, one for both.
 * Layouts. x, scales: any address, any pitch >= cols. rowwise: address and pitch on 16 bytes; bytes between a row's
 *   columns and the pitch become 0. panels: address on 16 bytes, pitch 128. Any K, R < 2^31, and up to
 *   TE_GROUPED_QUANTIZE_GROUPS groups of any sizes, 0 included.
 * Offsets. What te_grouped_offsets makes: 0 = offsets[0] <= ... <= offsets[groups] <= R, on x's device. On the CPU
 *   others are refused; on CUDA nobody looks, but nothing outside of the tensors is read or written whatever they are.
 * Tails. Rows from offsets[groups] on, and their rowwise scales, are neither read nor written.
 *   What rows of one group hold, NaN and Inf too, reaches the data and scales of no other.
 * Determinism. Bit-equal on the CPU and on CUDA, and the same whatever else the call holds.
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
/* amax_parts is [1, TE_GROUPED_QUANTIZE_PARTS + groups]; which of its elements are written is nobody's to read. */
#define TE_GROUPED_QUANTIZE_PARTS 1024

/* What is absent is NULL (a tensor: its data, with 0 rows and columns). */
typedef struct te_grouped_quantize_problem {
  te_tensor x;            /* [R, K] */
  int32_t groups;         /* 1 to TE_GROUPED_QUANTIZE_GROUPS */
  const int32_t* offsets; /* [groups + 1] on x's device */
  te_scaling scaling;     /* TE_SCALING_TENSOR or TE_SCALING_BLOCK_1D */
  te_tensor rowwise;      /* [R, K] */
  te_tensor rowwise_scale_inv;
  te_tensor panels; /* [P K, 128] */
  te_tensor panels_scale_inv;
  int pow_2_scales;   /* of scales that are made here */
  float amax_epsilon; /* >= 0 */
  /* TENSOR */
  te_tensor amax_parts;       /* float32 [1, TE_GROUPED_QUANTIZE_PARTS + groups]: current scaling; or absent */
  const float* const* scales; /* [groups] on the host, of one float each on x's device: delayed scaling; or NULL */
  float* const* amaxes;       /* [groups] on the host, of one float each on x's device, or of NULL; or NULL */
} te_grouped_quantize_problem;

TE_API te_status te_grouped_quantize(const te_grouped_quantize_problem* problem, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_GROUPED_QUANTIZE_H_ */
