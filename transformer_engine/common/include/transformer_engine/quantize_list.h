/* quantize list: FP8 data with scales of many uniform matrices, such as the weights of a grouped layer. One launch for
 * all (current scaling: two), of up to TE_QUANTIZE_LIST_MATRICES each; no host synchronisation, no workspace but
 * amax_parts, capturable: the addresses are kernel parameters.
 *
 * Formula. For each i, outs[i] is the result of te_quantize on xs[i] alone, in every byte and scale; TENSOR by
 *   scales[i] (delayed scaling), and then *amaxes[i] = max(*amaxes[i], max |xs[i]|); or, with amax_parts, by the amax
 *   of xs[i] (current scaling), which is stored in *amaxes[i]. Exactly one of scales and amax_parts is present. Values
 *   and scales of one matrix do not depend on another.
 * Uniform. All xs have one shape, dtype, pitch and device; all outs one scaling, one dtype, the same directions, and in
 *   each direction one pitch of data and one shape and pitch of scales.
 * Shapes, layouts, scales, dtypes, determinism, aliasing: those of te_quantize (quantize.h). 0 rows, 0 columns and 0
 *   matrices are allowed. No two matrices' outputs overlap.
 * noop: if it is not 0, nothing is written.
 * Errors. TE_INVALID_ARGUMENT for the same reasons as te_quantize, for matrices that are not uniform, and for arguments
 *   that the scaling does not have; the message has the number of the matrix; nothing is written then. */
#ifndef TRANSFORMER_ENGINE_QUANTIZE_LIST_H_
#define TRANSFORMER_ENGINE_QUANTIZE_LIST_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In one launch; a longer list takes several. */
#define TE_QUANTIZE_LIST_MATRICES 512
/* amax_parts is [count, TE_QUANTIZE_LIST_PARTS]; its contents are unspecified afterwards. */
#define TE_QUANTIZE_LIST_PARTS 256

struct te_quantized; /* quantize.h */

/* Absent arguments are NULL (a tensor: its data, with 0 rows and columns). */
typedef struct te_quantize_list_problem {
  int32_t count;
  const te_tensor* xs;             /* [count] */
  const struct te_quantized* outs; /* [count] */
  te_tensor noop;                  /* float32 [1, 1]; or absent */
  int pow_2_scales;                /* for computed scales */
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
