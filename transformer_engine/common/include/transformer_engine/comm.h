/* comm: what tensor parallelism computes on one rank beside its products. Nothing here talks to another rank: bytes are
 * moved by the binding's transports, and how they came is of no concern.
 *
 * Ordered sum. What t ranks computed of the same rows, added in the order of the ranks: bits depend neither on who
 *   arrived first nor on how the sum is cut.
 *     out[r, c] = round((..((p_0[r, c] + p_1[r, c]) + p_2[r, c]) ..) + bias[c])
 *   in float32, rounded once, to nearest even. One partial without a bias is copied, bit for bit.
 * Interleave. Matrices side by side: out[k, r * m + c] = shard_r[k, c]. So what t ranks quantized of m rows each and
 *   gathered behind each other becomes as of the whole. Behind each other is right where a direction's own rows are
 *   tokens (rowwise data, scales of 128x128 blocks) or its rows of scales are blocks of tokens (columnwise scales of
 *   1x128 blocks); side by side lie columnwise data, rowwise scales of 1x128 blocks and columnwise ones of 128x128.
 *   Blocks have to be whole ones of a shard: m a multiple of 128.
 * Errors. TE_INVALID_ARGUMENT for shapes, dtypes, devices, pitches; nothing is written then. */
#ifndef TRANSFORMER_ENGINE_COMM_H_
#define TRANSFORMER_ENGINE_COMM_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most ranks that one call takes. */
#define TE_COMM_MOST_RANKS 128

/* partials: `count` of them, 1 to TE_COMM_MOST_RANKS, in the order of the ranks, [rows, cols] like out, each with its
 * own address and pitch (an inbox is cut into them). bias: [1, cols], or absent (data NULL, 0 x 0). All float32,
 * float16 or bfloat16, the same, on one device. out may be one of the partials (its address and its pitch); otherwise
 * it overlaps no input. One launch. */
TE_API te_status te_comm_ordered_sum(const te_tensor* partials, int32_t count, te_tensor bias, te_tensor out,
                                     te_stream stream);

/* shards: `count` of them, 1 to TE_COMM_MOST_RANKS, [rows, m] each, with own addresses and pitches; out: [rows, count *
 * m]. uint8, float8 or float32, the same, on one device. Bytes between out's columns and its pitch are written as 0. No
 * overlaps. One launch. */
TE_API te_status te_comm_interleave(const te_tensor* shards, int32_t count, te_tensor out, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_COMM_H_ */
