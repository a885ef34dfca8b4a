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
 * Plan. What one rank does in a gather followed by a product (gather_product), or in a product whose partials are
 *   scattered and summed (product_scatter), as a list of steps: pure arithmetic on its arguments, so that every rank
 *   knows every other's. Both products are [rows, depth] x [depth, cols]; rows are the tokens of all ranks, depth and
 *   cols the rank's own. t ranks have rows / t each, rank r those from r * rows / t on.
 *     push  own rows (gather; to itself too: a copy into the slot) or the peer's partials (scatter) go to `peer`; the
 *           step-th push of a rank goes to rank + step, so no two ranks push to one peer in the same step
 *     wait  what `peer` pushes to this rank has to be there
 *     gemm  rows of the product; each row once
 *     sum   own rows of all ranks' partials
 *   A gemm of a gather reads own rows where they lie, as long as it reads no others. Serial: one gemm. Chunked: runs of
 *   rows, own ones first (scatter: last), others as they arrive (scatter: as they are wanted), cut so that the
 * predicted time is least; runs of rows that do not lie together are several gemms. Where t is 1 there is a gemm alone.
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

typedef enum te_comm_op { TE_COMM_GATHER_PRODUCT = 0, TE_COMM_PRODUCT_SCATTER = 1 } te_comm_op;

/* AUTO: chunked where that is predicted to be faster, else serial. */
typedef enum te_comm_schedule { TE_COMM_AUTO = 0, TE_COMM_SERIAL = 1, TE_COMM_CHUNKED = 2 } te_comm_schedule;

/* Constants of a kind of device. Never measured by a rank: plans must agree. */
typedef struct te_comm_costs {
  double flops_per_us;      /* of the device's products */
  double link_bytes_per_us; /* of one rank's pushes */
  double memory_bytes_per_us;
  double launch_us;  /* of a gemm more */
  double hop_us;     /* from the end of a push to the start of what waited for it */
  int32_t units;     /* multiprocessors: tiles that are computed at once */
  int32_t tile_rows; /* of a product's tiles */
  int32_t tile_cols;
} te_comm_costs;

TE_API te_comm_costs te_comm_costs_h200(void);

typedef struct te_comm_problem {
  te_comm_op op;
  te_comm_schedule schedule;
  int64_t rows; /* of all ranks: a multiple of ranks */
  int64_t depth;
  int64_t cols;
  int32_t ranks; /* 1 to TE_COMM_MOST_RANKS */
  int32_t rank;
  te_dtype dtype; /* of what is pushed */
  te_comm_costs costs;
} te_comm_problem;

typedef enum te_comm_step_kind {
  TE_COMM_STEP_PUSH = 0,
  TE_COMM_STEP_WAIT = 1,
  TE_COMM_STEP_GEMM = 2,
  TE_COMM_STEP_SUM = 3
} te_comm_step_kind;

/* Rows [first, last) of the whole: of a push what goes, of a wait what comes. peer: -1 for gemm and sum. */
typedef struct te_comm_step {
  te_comm_step_kind kind;
  int32_t peer;
  int64_t first;
  int64_t last;
} te_comm_step;

typedef struct te_comm_prediction {
  te_comm_schedule schedule; /* TE_COMM_SERIAL or TE_COMM_CHUNKED */
  int32_t runs;
  double us;
  double serial_us;
} te_comm_prediction;

/* The first `capacity` steps; *count: how many there are. prediction may be NULL. */
TE_API te_status te_comm_plan(const te_comm_problem* problem, te_comm_step* steps, int64_t capacity, int64_t* count,
                              te_comm_prediction* prediction);

/* The plan in words, a line for what it is and one for each step: the first capacity - 1 bytes and a 0; *length: how
 * many bytes there are, without the 0. */
TE_API te_status te_comm_plan_print(const te_comm_problem* problem, char* text, size_t capacity, size_t* length);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_COMM_H_ */
