/* permute: tokens in the order of their experts and back, chunks of rows in another order, and the maps of both.
 *
 * Maps. A token has pairs, each with an expert. Rows are ordered by expert, and within an expert by token, then by the
 *   number of the pair: a counting sort in fixed order.
 *   of a mask [T, E]: int32 [T, 2 E + 1]; of token t, with n routed experts: n rows, experts ascending; in columns E to
 *     E + n - 1 the experts; n in the last column; -1 in all others.
 *   of ids [T, k]: int32 [T, k], the row of each pair, -1 for a pair without a row. Its columns are a token's pairs, or
 *     (ascending) the same by their experts, ascending.
 * Formula. p = probs [T, E] (mask) or [T, k] (ids), 1 if absent; r(t, i) the row of pair i of token t:
 *   forward           out[r(t, i)] = inp[t]; rows without a pair are 0
 *   unpermute         out[t] = sum_i p(t, i) inp[r(t, i)], i ascending
 *   its backward      dinp[r(t, i)] = p(t, i) grad[t], other rows 0; dprobs(t, i) = sum_h grad[t, h] inp[r(t, i), h]
 *   gather            out[j] = inp[source[j]]; 0 where source[j] is not a row of inp
 *   With pad_offsets, r(t, i) = the map's row + pad_offsets[its expert]. Pairs whose row is not in the buffer are
 *   dropped: nothing is read or written for them.
 * Dtypes. forward and gather copy elements of 1, 2, 4 or 8 bytes. unpermute and its backward: float32, float16,
 *   bfloat16, p too; sums in float32 (fused multiply-add), one rounding. Maps are int32, pad_offsets int64.
 * Aliasing. No output overlaps an input or another output.
 * Determinism. The CPU and the CUDA path give the same bits; no float atomics. Every element of an output is written.
 * Errors. TE_INVALID_ARGUMENT for a wrong shape, dtype or device, on the CPU also for contents that no function here
 *   writes. On CUDA, where the host does not read them, such contents cause no access outside of the tensors. */
#ifndef TRANSFORMER_ENGINE_PERMUTE_H_
#define TRANSFORMER_ENGINE_PERMUTE_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TE_PERMUTE_MAX_EXPERTS 1024
#define TE_PERMUTE_CHUNK 128 /* tokens of a mask that are counted together */

/* mask [T, E], uint8 or int32, not 0: routed. map: of a mask. counts: workspace, int32 [ceil(T / TE_PERMUTE_CHUNK), E].
 * Two launches. */
TE_API te_status te_permute_mask_map(te_tensor mask, te_tensor map, te_tensor counts, te_stream stream);

/* Fields left out of a designated initialiser are 0, which means absent. Tensors are contiguous, but for probs, and
 * int32 where the field has no other type. */
typedef struct te_permute_row_map_plan {
  te_tensor ids;          /* [T, k] */
  te_tensor row_of_pair;  /* [T, k]: the map */
  te_tensor token_of_row; /* [1, rows], -1 beyond the last pair: the source of te_permute_gather */
  te_tensor offsets;      /* [1, experts + 1]: first rows, at most rows; absent: not written, like all below */
  te_tensor panels;       /* [1, 1]: the experts' ceil(rows / 128), summed */
  int64_t rows;           /* of the buffer; pairs beyond it have no row */
  int32_t first_expert;   /* experts [first, last) have rows, pairs of others have none; at most */
  int32_t last_expert;    /* TE_PERMUTE_MAX_EXPERTS of them */
  int32_t strict;         /* 1: on the CPU, an id outside of the range is an error */
  int32_t ascending;      /* 1: a token's columns of row_of_pair by their experts */
  te_tensor probs;     /* [T, E], E >= last_expert, as te_permute_forward's; absent: none. A pair whose probability is
                          0 keeps its place among the rows, but its row has no token, and it has no row */
  te_tensor row_probs; /* [1, rows], of the dtype of probs: of each row; 0 beyond the last pair */
  te_tensor tokens_per_expert; /* int64 [1, E], E to TE_PERMUTE_MAX_EXPERTS: pairs of every expert; absent: none */
  uint32_t* cut;               /* on the device, or NULL: += the range's pairs that rows does not hold, saturating */
  float* factor;               /* on the device, at least 0, or NULL: where rows does not hold the range's pairs, raised
                                  to their number over `even`, the number of an even choice */
  float even;                  /* above 0 with factor */
  uint32_t* outside;           /* on the device, or NULL: += pairs whose id is outside of the range, saturating */
  float* zero;                 /* on the device, or NULL: = 0, for a caller that needs one and saves a launch */
} te_permute_row_map_plan;

/* The map of ids, and what else a layer over its rows needs. One launch. */
TE_API te_status te_permute_row_map(const te_permute_row_map_plan* plan, te_stream stream);

/* The gradient of its probs: dprobs [T, E] has the element of drow_probs [1, R] of each pair's row, else 0. ids: the
 * plan's. row_of_pair: its result with ascending. */
TE_API te_status te_permute_row_probs_backward(te_tensor ids, te_tensor row_of_pair, te_tensor drow_probs,
                                               te_tensor dprobs, te_stream stream);

/* Chunks of rows in the order of `order`, a permutation of [0, n): sizes, order int64 [1, n]; source, destination int32
 * [1, rows]: out[j] = inp[source[j]], inp[i] goes to out[destination[i]]. Rows past the sum of sizes stay. starts:
 * workspace, int64 [3, n + 1]. On the CPU, sizes below 0 or with a sum above rows and an order that is not a
 * permutation are errors; on CUDA such sizes are cut, and other orders give rows of 0. counters, uint32 [2] on a CUDA
 * device or NULL: [0] += sizes below 0, [1] += rows that are cut or of a chunk that the order leaves out, and entries
 * of the order that name no chunk or one of another entry, both saturating. Two launches. */
TE_API te_status te_permute_chunk_map(te_tensor sizes, te_tensor order, te_tensor source, te_tensor destination,
                                      te_tensor starts, uint32_t* counters, te_stream stream);

typedef struct te_permute_map {
  te_tensor rows;        /* of a mask, or of ids */
  te_tensor pad_offsets; /* [1, E], of a mask alone; absent: 0 */
  int32_t of_mask;
} te_permute_map;

typedef struct te_permute_forward_plan {
  te_permute_map map;
  te_tensor inp;        /* [T, H] */
  te_tensor out;        /* [R, H] */
  te_tensor probs;      /* [T, E], of a mask alone; int64 has the bits of float64. A pair with a probability of 0 gets a
                           row of 0 */
  te_tensor out_probs;  /* [1, R], in the dtype of probs; absent: probs is not read */
  te_tensor scales;     /* float32 [B, >= T]: columns move with their tokens; absent: none */
  te_tensor out_scales; /* [B, >= R]: 1 for rows of 0, 0 beyond R */
  te_tensor covered;    /* workspace, uint8 [1, R] */
} te_permute_forward_plan;

TE_API te_status te_permute_forward(const te_permute_forward_plan* plan, te_stream stream);

/* inp [rows, H], source int32 [1, R], out [R, H]. */
TE_API te_status te_permute_gather(te_tensor inp, te_tensor source, te_tensor out, te_stream stream);

typedef struct te_permute_unpermute_plan {
  te_permute_map map;
  te_tensor inp;       /* [R, H] */
  te_tensor probs;     /* [T, E] or [T, k]; absent: 1 */
  te_tensor row_probs; /* [1, R], float32, float16, bfloat16 or int64 for float64: rows with 0 are left out; absent: no
                          row is */
  te_tensor out;       /* [T, H] */
} te_permute_unpermute_plan;

TE_API te_status te_permute_unpermute(const te_permute_unpermute_plan* plan, te_stream stream);

typedef struct te_permute_unpermute_backward_plan {
  te_permute_map map;
  te_tensor grad;    /* [T, H] */
  te_tensor inp;     /* [R, H], for dprobs */
  te_tensor probs;   /* absent: 1 */
  te_tensor dinp;    /* [R, H]; absent: not computed */
  te_tensor dprobs;  /* in the shape and dtype of probs, 0 where nothing is routed; absent: not computed */
  te_tensor covered; /* workspace, uint8 [1, R], for dinp */
} te_permute_unpermute_backward_plan;

TE_API te_status te_permute_unpermute_backward(const te_permute_unpermute_backward_plan* plan, te_stream stream);

/* The gradient of te_permute_forward's probs: dprobs [T, E] has each pair's element of drow_probs [1, R], else 0. */
TE_API te_status te_permute_probs_backward(const te_permute_map* map, te_tensor drow_probs, te_tensor dprobs,
                                           te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_PERMUTE_H_ */
