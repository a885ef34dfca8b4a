/* comm: the computations of tensor parallelism on one rank beside its matrix products, and plans that overlap products
 * with transfers. Nothing here communicates: the binding's transports move bytes.
 *
 * Ordered sum. Partial results of the same rows from t ranks, added in the order of the ranks: bits depend neither on
 *   the order of arrival nor on how the rows are divided.
 *     out[r, c] = round((..((p_0[r, c] + p_1[r, c]) + p_2[r, c]) ..) + bias[c])
 *   in float32, rounded once, to nearest even. One partial without a bias is copied, bit for bit.
 * Interleave. Matrices side by side: out[k, r * m + c] = shard_r[k, c]. It turns the gathered shards of t ranks, m rows
 *   quantized on each, into the quantized form of all rows. Concatenation along rows is enough where a row of the data
 *   is a token (rowwise data, scales of 128x128 blocks) or a row of scales is a block of tokens (columnwise scales of
 *   1x128 blocks); columnwise data, rowwise scales of 1x128 blocks and columnwise scales of 128x128 blocks are
 *   interleaved. No block may span two shards: m is a multiple of 128.
 * Plan. The steps of one rank in a gather followed by a product (gather_product), or in a product whose partials are
 *   scattered and summed (product_scatter). A plan depends on its arguments alone, so that each rank can compute those
 *   of the others. Both products are [rows, depth] x [depth, cols]; rows are the tokens of all ranks, depth and cols
 *   are local to the rank. t ranks have rows / t each, rank r those from r * rows / t on.
 *     push  own rows (gather; also to itself: a copy into the buffer, for those who read all rows there) or the peer's
 *           partials (scatter) go to `peer`; the step-th push of a rank goes to rank + step, so no two ranks push to
 *           one peer in the same step
 *     wait  waits for the push of `peer` to this rank
 *     gemm  rows of the product; each row once
 *     sum   own rows of all ranks' partials
 *   A gemm of a gather that reads own rows alone reads them from the source. Serial: one gemm. Chunked: runs of rows,
 *   own rows first (scatter: last), others as they arrive (scatter: before they are pushed), divided so that the
 *   predicted time is least; runs of rows that are not adjacent are several gemms. With t = 1 there is one gemm and
 *   no other step.
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

/* *captured: 1 while `stream`, a CUDA stream, is being captured, else 0. Collectives then write memory that belongs to
 * the graph alone. Errors: TE_INVALID_ARGUMENT if `captured` is NULL, TE_NOT_IMPLEMENTED in a CPU build. */
TE_API te_status te_comm_is_captured(te_stream stream, int32_t* captured);

typedef enum te_comm_op { TE_COMM_GATHER_PRODUCT = 0, TE_COMM_PRODUCT_SCATTER = 1 } te_comm_op;

/* AUTO: chunked if the prediction is faster, else serial. */
typedef enum te_comm_schedule { TE_COMM_AUTO = 0, TE_COMM_SERIAL = 1, TE_COMM_CHUNKED = 2 } te_comm_schedule;

/* Constants of a kind of device. Ranks never measure them, since their plans must agree. */
typedef struct te_comm_costs {
  double flops_per_us;        /* of the device's products */
  double link_bytes_per_us;   /* of one rank's pushes during a product */
  double serial_bytes_per_us; /* of one rank's pushes without other work */
  double memory_bytes_per_us;
  double launch_us;  /* of each further gemm */
  double hop_us;     /* from the end of a push to the start of the step that waited for it */
  double beside;     /* a product's time during pushes divided by its time alone */
  int32_t units;     /* multiprocessors: tiles that are computed at once */
  int32_t tile_rows; /* of a tile of most products: clusters of two lie along the rows */
  int32_t tile_cols;
  /* Rows of all ranks; with fewer, a collective of the group is faster. Plans do not read them. */
  int32_t least_gathered;
  int32_t least_scattered;
} te_comm_costs;

/* Costs for explicitly requested plans on devices without measurements. */
TE_API te_comm_costs te_comm_costs_h200(void);

/* *known: 1 and the measured costs of a kind of device, by its name; 0 if there are none. */
TE_API te_status te_comm_costs_of(const char* kind, te_comm_costs* costs, int32_t* known);
/* For tests: replaces the costs of a kind; NULL restores the measured ones. */
TE_API te_status te_comm_lend_costs(const char* kind, const te_comm_costs* costs);

/* Elements of a result that an algorithm computes at once on a cluster of `units` multiprocessors, as
 * te_gemm_takes_runs returns them; all 0: unknown. */
typedef struct te_comm_tile {
  int32_t rows;
  int32_t cols;
  int32_t units;
} te_comm_tile;

typedef struct te_comm_problem {
  te_comm_op op;
  te_comm_schedule schedule;
  int64_t rows; /* of all ranks: a multiple of ranks */
  int64_t depth;
  int64_t cols;
  int32_t ranks; /* 1 to TE_COMM_MOST_RANKS */
  int32_t rank;
  te_dtype dtype; /* of the pushed rows */
  te_comm_costs costs;
  te_comm_tile tile; /* of the product's algorithm; if it is unknown, plans are good for usual ones */
} te_comm_problem;

typedef enum te_comm_step_kind {
  TE_COMM_STEP_PUSH = 0,
  TE_COMM_STEP_WAIT = 1,
  TE_COMM_STEP_GEMM = 2,
  TE_COMM_STEP_SUM = 3
} te_comm_step_kind;

/* Rows [first, last) of all rows: those that a push sends or a wait receives. peer: -1 for gemm and sum. */
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

/* The first `capacity` steps; *count: the number of all. prediction may be NULL. */
TE_API te_status te_comm_plan(const te_comm_problem* problem, te_comm_step* steps, int64_t capacity, int64_t* count,
                              te_comm_prediction* prediction);

/* The plan as text, a line of summary and one for each step: the first capacity - 1 bytes and a 0; *length: the number
 * of all bytes, without the 0. */
TE_API te_status te_comm_plan_print(const te_comm_problem* problem, char* text, size_t capacity, size_t* length);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_COMM_H_ */
