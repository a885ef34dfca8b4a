/* quantize list: FP8 data with scales of many matrices that are alike, as the weights of a layer of groups are. One
 * launch for all (current scaling: two), of up to TE_QUANTIZE_LIST_MATRICES each; no host synchronisation, no workspace
 * but amax_parts, capturable: the addresses travel by value as the kernel's parameters.
 *
 * Formula. For each i, what te_quantize makes of xs[i] alone, byte for byte and scale for scale, in outs[i]; TENSOR by
 *   scales[i] (delayed scaling), and then *amaxes[i] = max(*amaxes[i], max |xs[i]|); or, with amax_parts, by what
 *   te_quantize_amax finds of xs[i] (current scaling), and then *amaxes[i] is that. Just one of scales and amax_parts
 *   is there. Neither a value nor a scale of one matrix reaches another.
 * Alike. All xs have one shape, dtype, pitch and device; all outs one scaling, one dtype, the same directions, and in
 *   each direction one pitch of data and one shape and pitch of scales.
 * Shapes, layouts, scales, dtypes, determinism, aliasing: those of te_quantize (quantize.h). 0 rows, 0 columns and 0
 *   matrices are allowed. No two matrices' outputs overlap.
 * noop: where it holds anything but 0, nothing at all is written.
 * Errors. TE_INVALID_ARGUMENT for what te_quantize refuses, for matrices that are not alike, and for arguments that the
 *   scaling does not have; the matrix is named by its number; nothing is written then.
 * Source: te_quantize's own tiles (ops/quantize/tile.cuh, emit.cuh); written here, from the formula alone. */
#ifndef TRANSFORMER_ENGINE_QUANTIZE_LIST_H_
#define TRANSFORMER_ENGINE_QUANTIZE_LIST_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of one launch; a longer list takes several. */
#define TE_QUANTIZE_LIST_MATRICES 512
/* amax_parts is [count, TE_QUANTIZE_LIST_PARTS]; which of its elements are written is nobody's to read. */
#define TE_QUANTIZE_LIST_PARTS 256

struct te_quantized; /* quantize.h */

/* What is absent is NULL (a tensor: its data, with 0 rows and columns). */
typedef struct te_quantize_list_problem {
  int32_t count;
  const te_tensor* xs;             /* [count] */
  const struct te_quantized* outs; /* [count] */
  te_tensor noop;                  /* float32 [1, 1]; or absent */
  int pow_2_scales;                /* of scales that are made here */
  float amax_epsilon;              /* >= 0 */
  /* TENSOR */
  te_tensor amax_parts;       /* float32 [count, TE_QUANTIZE_LIST_PARTS]: current scaling; or absent */
  const float* const* scales; /* [count] on the host, of one float each on xs' device: delayed scaling; or NULL */
  float* const* amaxes;       /* [count] on the host, of one float each on xs' device, or of NULL; or NULL */
} te_quantize_list_problem;

TE_API te_status te_quantize_list(const te_quantize_list_problem* problem, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_QUANTIZE_LIST_H_ */
