/* attention: what surrounds a kernel of attention that returns its result and the logarithm of each softmax's
 * denominator (lse): the places of packed sequences, the law of a sink, padding. It computes no scores.
 *
 * Rows. A tensor [rows, heads * head_dim] has a query or a key in each row. Packed: sequence i of n has the rows
 *   starts[i] .. starts[i] + lengths[i + 1] - lengths[i]; other rows are padding. Without lengths no row is padding,
 *   and the rows are `batch` sequences of equal length. With `seq` the rows are n sequences of `seq` rows each, of
 *   which the first lengths[i + 1] - lengths[i] are no padding (te_attention_zero_padding alone).
 * Formula. With a the score of a head's sink and L the lse of a row and head that has seen keys:
 *     forward   out' = out sigmoid(L - a),  L' = log(exp(L) + exp(a))
 *               A row without keys: out' = out, L' = a. Without a sink, or with a = -inf: out' = out, L' = L.
 *               Padding: out' = 0, L' = 0.
 *     backward  dsink = - sum over rows of exp(a - L') sum(dout * out'); padding is left out.
 *               The kernel's backward with out' and L' gives the other gradients.
 * Shapes. R rows, h heads, d >= 1 head_dim. lse [R, h], in the order of out's rows. sink, dsink [1, h].
 *   kernel_lse [batch * h, R / batch], as a kernel has it: a row for each sequence of the batch (packed: batch 1) and
 *   head; +inf or -inf where a row has seen no key (+inf is written), any value for padding (0 is written).
 * Dtypes. out, dout and gradients float32, float16 or bfloat16; lse, kernel_lse, sink and dsink float32; lengths,
 *   starts and pieces int32. Arithmetic in float32, one rounding at the store.
 * Aliasing. out is scaled in place; no tensors may overlap.
 * Determinism. Sums have a fixed order, which depends on the shape alone.
 * Errors. TE_INVALID_ARGUMENT for a wrong shape, dtype or device, and on the CPU for lengths or starts that do not
 *   fit. On CUDA, where the host does not read them, te_attention_sequences ends the kernel with a device assertion
 *   that names the argument; the other functions read lengths that it has accepted. */
#ifndef TRANSFORMER_ENGINE_ATTENTION_H_
#define TRANSFORMER_ENGINE_ATTENTION_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fields left out of a designated initialiser are 0, which means absent. */
typedef struct te_attention_rows {
  int64_t rows;
  te_tensor lengths; /* int32 [1, n + 1], on the device of the rows: 0, then each sequence's length added */
  te_tensor starts;  /* int32 [1, n + 1]: where sequences begin, and the end of the last; absent: as lengths */
  int64_t seq;       /* 0: packed or without lengths; a batch: its rows are [n, seq] with batch_first, else [seq, n] */
  int32_t batch_first;
} te_attention_rows;

typedef struct te_attention_plan {
  te_attention_rows queries;
  int64_t batch;       /* divides queries.rows; 1 with lengths */
  int32_t batch_first; /* rows are [batch, seq], else [seq, batch] */
  te_tensor sink;      /* absent: none */
} te_attention_plan;

/* Checks lengths and starts: they begin at 0 and do not decrease, every sequence has room before the next one begins
 * and within the rows, and none is longer than `longest` (-1: any length). keys may be NULL. The names in errors are
 * those of PyTorch's callers: cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q,
 * max_seqlen_kv.
 * pieces_q, pieces_kv: int32 [1, 3 n + 1], or absent together (then keys must be given). Cumulative rows that a kernel
 * reads in place of lengths and starts: each sequence, the padding after it of the queries without keys, and that of
 * the keys without queries. */
TE_API te_status te_attention_sequences(const te_attention_rows* queries, int64_t longest_q,
                                        const te_attention_rows* keys, int64_t longest_kv, te_tensor pieces_q,
                                        te_tensor pieces_kv, te_stream stream);

/* Writes every element of lse. Of out it writes the rows of padding, and with a sink all rows. */
TE_API te_status te_attention_forward(const te_attention_plan* plan, te_tensor kernel_lse, te_tensor out, te_tensor lse,
                                      te_stream stream);

/* Writes kernel_lse of lse. With dsink also the sink's gradient, for which dout and out are read; else these are
 * absent. workspace: float32 [1, >= te_attention_backward_workspace()], contents irrelevant before and after; read with
 * dsink on CUDA alone. */
TE_API te_status te_attention_backward(const te_attention_plan* plan, te_tensor lse, te_tensor dout, te_tensor out,
                                       te_tensor kernel_lse, te_tensor dsink, te_tensor workspace, te_stream stream);
TE_API int64_t te_attention_backward_workspace(int64_t rows, int64_t heads);

/* Writes zeros to the rows of padding of dq (of the queries), and of dk and dv (of the keys). Each may be absent. The
 * lengths of a batch are not checked. */
TE_API te_status te_attention_zero_padding(const te_attention_rows* queries, const te_attention_rows* keys,
                                           te_tensor dq, te_tensor dk, te_tensor dv, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_ATTENTION_H_ */
