/* rope: rotary position embedding of q and k in one launch, forward and backward; v may be copied along, so that a
 * packed qkv projection is split in the same pass. The angles are an input; there is no variable-length layout.
 *
 * Formula. For each position and head, with the angles a[0, rot_dim) of that position's row of freqs:
 *   y[i] = x[i] cos(a[i]) + r[i] sin(a[i]) for i < rot_dim, y[i] = x[i] beyond (copied, bit for bit);
 *   r = [-x2, x1], the halves of x[0, rot_dim); interleaved: r[2i] = -x[2i+1], r[2i+1] = x[2i].
 *   Each element uses its own angle: nothing is assumed of the two angles of a pair.
 *   backward: the transpose of that map (where a pair's angles are equal, the rotation by the negative angle).
 *   The row of freqs is s + start_positions[b], s alone without start_positions.
 * Shapes. q [seq, batch, q_heads, head_dim], k and v with their own number of heads; strides express any order in
 *   memory (sbhd, bshd, views of a packed projection). freqs [>= seq + start, rot_dim], start_positions [1, batch].
 * Dtypes. float32, float16, bfloat16 for q, k, v and outputs; freqs float32, start_positions int32. Arithmetic in
 *   float32, one rounding at the store; sin and cos within 2^-23 of the exact values up to angles of 2^30; larger ones,
 *   whose neighbours in float32 are twenty turns away, give NaN. The CPU and the CUDA path give the same bits.
 * Aliasing. An output may be its input's memory with equal strides; other overlaps give wrong results. Inputs may have
 *   strides of 0.
 * Errors. TE_INVALID_ARGUMENT for a wrong shape, stride, dtype or device. On the CPU a start position outside of freqs
 *   is an error; on CUDA, where the host does not read start_positions, the elements that it would rotate become
 *   NaN. */
#ifndef TRANSFORMER_ENGINE_ROPE_H_
#define TRANSFORMER_ENGINE_ROPE_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Element (s, b, h, d) is at data + s * seq_stride + b * batch_stride + (h / g) * group_stride + (h % g) *
 * head_stride + d, in elements, with g = heads_per_group; heads_per_group = 0 means one group, and no group_stride.
 * (q has groups in a packed projection [seq, batch, groups, (g + 2) * head_dim].) */
typedef struct te_rope_tensor {
  void* data; /* may be NULL when the tensor has no elements */
  int64_t seq_stride;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t group_stride;
  int64_t heads_per_group;
} te_rope_tensor;

/* Fields left out of a designated initialiser are 0, which means absent. */
typedef struct te_rope_plan {
  int64_t seq;
  int64_t batch;
  int64_t q_heads;
  int64_t k_heads;
  int64_t v_heads;
  int64_t head_dim;
  int64_t rot_dim; /* even, <= head_dim */
  int32_t interleaved;
  int32_t backward;
  te_dtype dtype;
  int32_t device;
  te_rope_tensor q;
  te_rope_tensor k;
  te_rope_tensor v;
  te_rope_tensor q_out;
  te_rope_tensor k_out;
  te_rope_tensor v_out;
  te_tensor q_freqs;
  te_tensor k_freqs;         /* absent: k uses q_freqs */
  te_tensor start_positions; /* absent: 0 */
} te_rope_plan;

/* Writes every element of q_out, k_out and v_out. */
TE_API te_status te_rope_apply(const te_rope_plan* plan, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_ROPE_H_ */
