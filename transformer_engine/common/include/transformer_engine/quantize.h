/* quantize: float matrices to FP8 data with scales, in both directions that matrix products read, and back.
 *
 * Formula. data = fp8(clamp(x * scale, -fp8_max, fp8_max)), to nearest even, in float32; NaN stays NaN. fp8_max is 448
 *   for E4M3 (no Inf), 57344 for E5M2. scale_inv = 1 / scale; value = data * scale_inv.
 *   scale from an amax: fp8_max / max(amax, amax_epsilon); 1 where that amax is 0, Inf or NaN; FLT_MAX where the
 *   quotient overflows; then, with pow_2_scales, its mantissa is dropped (2^floor(log2 scale)).
 *   amax = max |x|, ignoring NaN.
 * Directions. rowwise: data in the order of x, [rows, cols]; columnwise: its transpose, [cols, rows]. Either may be
 *   absent. Both come from one read of x. With BLOCK_1D the columnwise blocks are along x's columns (128 x 1), so the
 *   two directions hold different values; with TENSOR and BLOCK_2D they hold the same.
 * Pitch. A row of data starts on 16 bytes; bytes between its columns and the pitch are written as 0.
 * Scales, float32, every element written, padding as 0:
 *   TENSOR    [1, 1] or [1, 2]: scale_inv, then (with two elements) the scale. One for both directions; the columnwise
 *             one, if present and other memory, gets the same values.
 *   BLOCK_1D  rowwise [ceil(cols / 128), roundup(rows, 4)]; columnwise [ceil(rows / 128), roundup(cols, 4)]
 *   BLOCK_2D  rowwise [ceil(rows / 128), roundup(ceil(cols / 128), 4)]; columnwise [ceil(cols / 128),
 *             roundup(ceil(rows / 128), 4)]; pitch equal to width everywhere
 * Dtypes. x: float32, float16, bfloat16. data: float8_e4m3 or float8_e5m2, one for both directions.
 * Determinism. Bit-equal on the CPU and on CUDA: maxima do not depend on order, and sums over rows have a fixed one.
 * Aliasing. No output overlaps an input or another output, but for the scales of TENSOR.
 * Errors. TE_INVALID_ARGUMENT for shapes, dtypes, devices, pitches; nothing is written then. */
#ifndef TRANSFORMER_ENGINE_QUANTIZE_H_
#define TRANSFORMER_ENGINE_QUANTIZE_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Absent directions and scales have data NULL; a present direction has its scales. */
typedef struct te_quantized {
  te_scaling scaling;
  te_tensor rowwise;
  te_tensor columnwise;
  te_tensor rowwise_scale_inv;
  te_tensor columnwise_scale_inv;
} te_quantized;

/* The source of the scale, and outputs other than the data. All tensors are float32 and may be absent (data NULL), but
 * TENSOR needs exactly one of scale and amax_parts. With neither direction in `out` (and block scaling) the column sums
 * are still computed. */
typedef struct te_quantize_plan {
  te_tensor scale;       /* [1, 1], TENSOR: the scale */
  te_tensor amax_parts;  /* [1, n], TENSOR: the scale is computed from the largest of these */
  te_tensor amax;        /* [1, 1], TENSOR: with scale, amax = max(amax, max |x|); with amax_parts, amax = their max */
  te_tensor column_sums; /* [ceil(rows / 128), cols]: sums of x over each 128 rows, for a bias gradient: of 4 rows in
                            order, of neighbours, of neighbours of these, then of the 8 results in order */
  te_tensor noop;        /* [1, 1]: if it is not 0, nothing is written */
  int pow_2_scales;      /* for computed scales */
  float amax_epsilon;    /* >= 0 */
} te_quantize_plan;

/* Writes the present tensors of `out`. One launch. */
TE_API te_status te_quantize(const te_quantize_plan* plan, te_tensor x, const te_quantized* out, te_stream stream);

/* The largest number of parts of a launch; amax_parts [1, TE_QUANTIZE_PARTS] is always enough and always filled. */
#define TE_QUANTIZE_PARTS 1024

/* parts [1, TE_QUANTIZE_PARTS]: maxima of |x| over parts of x, 0 for empty ones. One launch. noop as in the plan. */
TE_API te_status te_quantize_amax(te_tensor x, te_tensor parts, te_tensor noop, te_stream stream);

/* dbias [1, cols], in a float dtype: the sums of column_sums' rows, in their order. */
TE_API te_status te_quantize_sum_columns(te_tensor column_sums, te_tensor dbias, te_stream stream);

/* y [rows, cols] = data * scale_inv, from the rowwise direction if present, else from the columnwise one. */
TE_API te_status te_dequantize(const te_quantized* x, te_tensor y, te_stream stream);

/* columnwise [cols, rows] = the transpose of rowwise [rows, cols] with the same bytes; pitch and tail as above. */
TE_API te_status te_quantize_transpose(te_tensor rowwise, te_tensor columnwise, te_stream stream);

/* Lists of matrices of any sizes on one device: a launch takes so many, a longer list several launches. The addresses
 * are kernel parameters, so that a captured launch repeats. All items are checked before anything is written; no output
 * overlaps another one. */
#define TE_QUANTIZE_ITEMS 64

/* Each array has `count` elements. */
typedef struct te_quantize_transpose_list_problem {
  int32_t count;
  const te_tensor* rowwise;
  const te_tensor* columnwise;
  const te_tensor* scales;        /* float32 [ceil(rows / 128), ceil(cols / 128)], any pitch; or absent */
  const te_tensor* column_scales; /* float32 [ceil(cols / 128), ceil(rows / 128)], any pitch; absent with scales */
} te_quantize_transpose_list_problem;

/* te_quantize_transpose of each, and column_scales = the transpose of scales, where present. One launch. */
TE_API te_status te_quantize_transpose_list(const te_quantize_transpose_list_problem* list, te_stream stream);

/* A range of a matrix, quantized like a part of the full matrix: the shard of a weight on one rank.
 *
 * Elements [start, start + length) of a matrix [rows, cols], counted row after row; a range may begin and end anywhere
 * in rows and blocks. The matrix's amaxes are the maxima of its ranges' amaxes, and with these the bytes of each range
 * and all scales are, bit for bit, those of te_quantize of the full matrix. TENSOR and BLOCK_2D alone: with BLOCK_1D
 * the two directions have different blocks, and one cannot be computed from the bytes of the other. */
typedef struct te_quantize_range {
  int64_t rows; /* of the full matrix, as are cols */
  int64_t cols;
  int64_t start;
  te_tensor x;         /* [1, length]: float32, float16 or bfloat16 */
  te_dtype rounded_to; /* a float dtype, to which each value is rounded first */
} te_quantize_range;

/* amaxes, float32: TENSOR [1, 1], BLOCK_2D [ceil(rows / 128), ceil(cols / 128)], dense rows. The largest |x| of the
 * range's elements in each block, 0 for blocks outside of the range. One launch; for TENSOR a memory set before it. */
TE_API te_status te_quantize_range_amax(const te_quantize_range* range, te_scaling scaling, te_tensor amaxes,
                                        te_stream stream);

/* All tensors float32. */
typedef struct te_quantize_range_plan {
  te_scaling scaling;
  te_tensor scale;    /* [1, 1], TENSOR: the scale; or absent */
  te_tensor amaxes;   /* of the full matrix, shaped as for te_quantize_range_amax; may be absent if scale is given */
  te_tensor amax;     /* [1, 1], TENSOR, may be absent: with scale, the larger of itself and amaxes; without, amaxes */
  int pow_2_scales;   /* for computed scales */
  float amax_epsilon; /* >= 0 */
} te_quantize_range_plan;

/* data: [rows, cols] bytes, of which only those of the range are written; or [1, length], those of the range alone. Any
 * address, any pitch. scale_inv: of the full matrix, like the rowwise one of te_quantize ([1, 1] or [1, 2];
 * [ceil(rows / 128), roundup(ceil(cols / 128), 4)]); every element is written, for any range. One launch. */
TE_API te_status te_quantize_range_cast(const te_quantize_range* range, const te_quantize_range_plan* plan,
                                        te_tensor data, te_tensor scale_inv, te_stream stream);

/* Ranges of many matrices, as of te_quantize_transpose_list. Each array has `count` elements. */
typedef struct te_quantize_range_list_problem {
  int32_t count;
  const te_quantize_range* ranges;
  const te_quantize_range_plan* plans;
  const te_tensor* data;       /* for the cast alone */
  const te_tensor* scale_invs; /* for the cast alone */
} te_quantize_range_list_problem;

/* Each of plans[i].amaxes, where present, becomes the larger of itself and what te_quantize_range_amax finds for
 * ranges[i]; of the plans only scaling and amaxes are read. The caller sets them to 0 before. One launch for each dtype
 * of x. */
TE_API te_status te_quantize_range_list_amaxes(const te_quantize_range_list_problem* list, te_stream stream);

/* te_quantize_range_cast of each. One launch for each pair of dtypes of x and data. */
TE_API te_status te_quantize_range_list_cast(const te_quantize_range_list_problem* list, te_stream stream);

/* Delayed scaling, between steps. For each of n tensors, history [len, n] holding amaxes, newest in row 0:
 *   amax = the largest of the column (ignoring NaN), or its row 0 with most_recent;
 *   scale = (fp8_max / amax) / 2^margin, by the rules above, no less than FLT_MIN; unchanged if amax is 0, Inf or NaN;
 *   then the history rolls by one: row i takes row i + 1, the last takes row 0, and row 0 becomes 0. A column whose row
 *   0 is 0 does not change: its tensor was not quantized since the last step (or was all zeros). */
typedef struct te_scale_update {
  te_tensor history; /* float32 [len, n] */
  te_tensor scale;   /* float32 [1, n] */
  float fp8_max;
  int margin; /* >= 0 */
  int most_recent;
  int pow_2_scales;
} te_scale_update;

/* All of `updates`, on one device, in one launch for up to 32 of them. */
TE_API te_status te_quantize_update_scales(const te_scale_update* updates, int32_t count, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_QUANTIZE_H_ */
