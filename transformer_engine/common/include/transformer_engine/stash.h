/* stash: packs the live parts of tensors that layers save for backward into pages of one pool.
 *
 * A group holds the tensors of one layer: up to 16 members, each a buffer of `most` units of unit_bytes, of which the
 * first `count` are live; the count is an integer on the device. A member may have `repeats` such buffers, `pitch`
 * bytes apart, with one count (columns of a matrix of scales). A store copies the live parts into pages, a load copies
 * them back, in one launch each; the host does not have the counts. The live parts are laid end to end, each aligned to
 * 128 bytes, and this stream of bytes is cut into ceil(stream / page_bytes) pages, for any dtypes.
 *
 *   pages of a group = ceil(sum of repeats * round_up(count * unit_bytes, 128) / page_bytes)
 *
 * Tiers. A store takes device pages first, and pinned host pages for the rest, the last pages of the stream. A group
 * that does not fit into both takes no page: its state is lost, it is flagged and counted in `demand`, and its load
 * writes 0xFF to every live byte, which is NaN in every floating dtype, FP8 included.
 *
 * Policies. The next page depends on the order of the calls alone.
 *   RING   takes pages at the head and frees them at the tail: FIFO. The reference.
 *   STACK  takes the page that was freed last.
 *   BUMP   has no list: a group takes consecutive pages after the last group's, and groups have to be loaded in the
 *          reverse order of their stores. Another order is flagged (TE_STASH_ORDER), and its pages are lost until the
 *          next reset. No eviction.
 *   Host pages are always a ring.
 *
 * Streams and order. Calls on one pool are numbered on the host in the order in which they are made. The stores of a
 * pool run one after another, and so do its loads (drops count as loads). The caller makes sure, by events, that
 *   a store   runs after the writes of its members, and after every load that was called before it
 *   a load    runs after the store of its group and the last use of its targets and, if te_stash_load_waits() returns
 * 1, after every store that was called before it an evict  runs after every store and load before it, and before every
 * later one A load that was called after a store may run before it: the store sees only pages freed by loads that were
 * called before it. So equal sequences of calls give equal maps, in any interleaving of the two streams, on the CPU and
 * CUDA.
 *
 * Capture. store, load, drop, evict, reset and read are one node each (debug adds more); they allocate nothing and do
 * not wait for the host. Captured calls must be replayed after a captured or eager reset, which sets the numbers of
 * calls to 0.
 *
 * Counts above `most` are cut (TE_STASH_OVER_CAPACITY), negative counts are taken as 0 (TE_STASH_NEGATIVE): both are
 * flagged. Every flag raises the gate until the next reset: a float that is 1 for a bad step (found_inf of fused
 * optimizers), in the report and in options.gate, which outlives the pool.
 *
 * Memory. The caller owns pages, control and entries: device memory (plain memory on the CPU) aligned to 128 bytes,
 * alive as long as the pool and its captured graphs. Host pages are pinned memory of the engine, counted as "stash".
 * Threads. A pool has a lock: calls of several threads run one after another.
 * Errors. TE_INVALID_ARGUMENT, naming the argument; TE_PINNED_MEMORY; TE_RUNTIME_ERROR from CUDA. A failed call changes
 * nothing.
 */
#ifndef TRANSFORMER_ENGINE_STASH_H_
#define TRANSFORMER_ENGINE_STASH_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TE_STASH_MOST_MEMBERS 16
#define TE_STASH_ALIGNMENT 128 /* bytes, of members in the stream, and of pages */

typedef struct te_stash_pool te_stash_pool;

typedef enum te_stash_policy { TE_STASH_RING = 0, TE_STASH_STACK = 1, TE_STASH_BUMP = 2 } te_stash_policy;

/* The writes of a load behind the live units of a member. */
typedef enum te_stash_tail {
  TE_STASH_TAIL_KEEP = 0, /* nothing */
  TE_STASH_TAIL_TILE = 1, /* zeros up to a multiple of tile_units */
  TE_STASH_TAIL_ZERO = 2  /* zeros up to `most` */
} te_stash_tail;

typedef enum te_stash_flag {
  TE_STASH_LOST = 1,          /* the group does not fit into the free pages */
  TE_STASH_OVER_CAPACITY = 2, /* a count above `most` */
  TE_STASH_NEGATIVE = 4,      /* a count below 0 */
  TE_STASH_ORDER = 8,         /* bump: a load of a group that was not the last one stored */
  TE_STASH_EMPTY = 16,   /* a load of an empty entry, or with other sizes than its store: every byte of `most` units
                          * becomes 0xFF. Or a store into an entry that holds a group, which stays; the store does
                          * nothing */
  TE_STASH_CHANGED = 32, /* debug: the bytes of a group are not those that were stored */
  TE_STASH_CANARY = 64,  /* debug: a write between two pages */
  TE_STASH_LEAKED = 128  /* debug, at reset: pages were still taken. A flag of the step that starts */
} te_stash_flag;

typedef enum te_stash_state {
  TE_STASH_STATE_EMPTY = 0,
  TE_STASH_STATE_STORED = 1,
  TE_STASH_STATE_LOST = 2
} te_stash_state;

typedef struct te_stash_options {
  int32_t device;       /* TE_DEVICE_CPU, or a CUDA ordinal */
  int32_t policy;       /* te_stash_policy */
  size_t page_bytes;    /* a multiple of 128, not 0 */
  int64_t device_pages; /* may be 0: all pages on the host */
  int64_t host_pages;   /* may be 0 */
  int32_t sm_budget;    /* blocks of a copy, at least 1; 4 more with host pages */
  int32_t trap;         /* 1: a lost group ends the process with a message (a CUDA trap; abort() on the CPU) */
  int32_t debug;        /* 1: canaries, checksums, 0xFF in freed pages, leaks at reset */
  void* pages;          /* te_stash_pages_bytes(); NULL for 0 */
  void* control;        /* te_stash_control_bytes() */
  float* gate;          /* a copy of the report's gate, on the device; may be NULL */
} te_stash_options;

typedef struct te_stash_member {
  void* data;            /* `most` units, contiguous. Any alignment; fastest on 16 bytes, as is the pitch */
  const void* counter;   /* a store: one integer on the device. A load: not read */
  int32_t counter_bytes; /* 1 (unsigned), 4 or 8 (signed) */
  int32_t tail;          /* te_stash_tail, for the load */
  int64_t unit_bytes;    /* not 0 */
  int64_t most;          /* units */
  int64_t tile_units;    /* of TE_STASH_TAIL_TILE: 128 rows / rows of a unit, at least 1 */
  int64_t behind;        /* a store: units behind the live ones that count as live, if there is a live one */
  int64_t repeats;       /* buffers; 0 and 1: one */
  int64_t pitch;         /* bytes from one buffer to the next, most * unit_bytes or more; not read for one buffer */
} te_stash_member;

/* The head of an entry, as read by te_stash_read_entry(): the stored group. */
typedef struct te_stash_entry {
  int32_t state; /* te_stash_state */
  int32_t members;
  int64_t number;       /* an argument of the store */
  int64_t stream_bytes; /* of the live parts, with padding */
  int64_t live_bytes;   /* without padding */
  int64_t pages;        /* needed; taken if state is stored */
  int64_t host_pages;   /* of these on the host: the last ones */
  int64_t counts[TE_STASH_MOST_MEMBERS];
  uint64_t checksum; /* debug */
  uint32_t words[4]; /* used by kernels; 0 between calls */
  /* Private fields follow, up to byte 256; then the page map of int32 ids. */
} te_stash_entry;

/* The head of control. All numbers but `step` count from the last reset. */
typedef struct te_stash_report {
  float gate;            /* 1: there is a flag */
  uint32_t flags;        /* te_stash_flag bits */
  int64_t step;          /* resets so far */
  int64_t flagged_entry; /* number of the first flagged group; -1: none, or a flag of no group */
  int64_t groups;        /* stored, lost ones included */
  int64_t lost_groups;
  int64_t live_bytes;    /* of all groups that fit */
  int64_t stream_bytes;  /* of these, with padding: the bytes in pages */
  int64_t taken_bytes;   /* of these, in whole pages; taken - live is waste */
  int64_t spilled_bytes; /* of the stream, into host pages */
  int64_t evicted_pages;
  int64_t device_in_use, device_peak; /* pages: now, and the maximum in the order of the calls */
  int64_t host_in_use, host_peak;
  int64_t demand; /* most pages needed at once; lost groups count until they are loaded */
} te_stash_report;

/* Sizes of the caller's memory; the pointers in options are not read. 0 for bad options (a pool without device pages
 * also has 0 bytes of pages, but never of control). */
TE_API size_t te_stash_pages_bytes(te_stash_options options);
TE_API size_t te_stash_control_bytes(te_stash_options options);
/* Bytes of an entry for a group of up to most_pages; the caller fills it with 0 before the first store. */
TE_API size_t te_stash_entry_bytes(int64_t most_pages);
/* The pages of members with all units live. */
TE_API te_status te_stash_most_pages(const te_stash_member* members, int32_t count, size_t page_bytes, int64_t* pages);

/* Allocates the host pages, and starts the first step on `stream`. */
TE_API te_status te_stash_pool_create(te_stash_options options, te_stream stream, te_stash_pool** out);
/* Frees the host pages; the device must not use them any more. */
TE_API te_status te_stash_pool_destroy(te_stash_pool* pool);

/* Starts the next step: frees all pages in the initial order, clears flags, gate and statistics, and empties all
 * entries (te_stash_read_entry still returns the old head). Runs after all other calls on the pool. */
TE_API te_status te_stash_reset(te_stash_pool* pool, te_stream stream);

/* entry: te_stash_entry_bytes(most pages of the members) on the pool's device, empty. number: of the group in the
 * report.
 */
TE_API te_status te_stash_store(te_stash_pool* pool, const te_stash_member* members, int32_t count, void* entry,
                                int64_t number, te_stream stream);
/* Writes the live units of each member and its tail; later units stay. The members have the sizes of the store and may
 * have other data. keep: the entry keeps the pages for another load. */
TE_API te_status te_stash_load(te_stash_pool* pool, const te_stash_member* members, int32_t count, void* entry,
                               int32_t keep, te_stream stream);
/* Frees the pages of an entry unread. Does nothing for an empty entry. */
TE_API te_status te_stash_drop(te_stash_pool* pool, void* entry, te_stream stream);
/* Moves the entry's device pages to host pages if fewer than low_water device pages are free: all of them or, if there
 * are not enough host pages, none. Does nothing for an empty entry. */
TE_API te_status te_stash_evict(te_stash_pool* pool, void* entry, int64_t low_water, te_stream stream);

/* Whether the next load or drop has to run after every store so far. Always for STACK and BUMP; for RING after an
 * evict, and once in 128 loads, drops and evicts, starting with the first one of a step. Call it before each load and
 * drop. */
TE_API int32_t te_stash_load_waits(const te_stash_pool* pool);

/* Enqueues a copy of the report to host memory (pinned, or the call waits). */
TE_API te_status te_stash_read(te_stash_pool* pool, te_stash_report* out, te_stream stream);
/* Writes the report to a mailbox, pinned memory aligned to 8 bytes that the host may read at any time: a kernel writes
 * `step` last, and -1 to it before. */
TE_API te_status te_stash_post(te_stash_pool* pool, te_stash_report* mailbox, te_stream stream);
/* Reads the report of te_stash_post() without waiting: 1, or 0 if the mailbox has no complete report now (filled with
 * 0xFF before the first post, or being written). */
TE_API int32_t te_stash_report_in(const void* mailbox, te_stash_report* out);
/* Reads an entry's head. Waits for the device. */
TE_API te_status te_stash_read_entry(te_stash_pool* pool, const void* entry, te_stash_entry* out, te_stream stream);
/* For tests: the number of ids in an entry's page map and, if ids is not NULL, the ids: of the device tier first, then
 * of the host tier. Waits for the device. */
TE_API te_status te_stash_read_map(te_stash_pool* pool, const void* entry, int32_t* ids, int64_t most, int64_t* count);

/* *number: of the capture that `stream`, a CUDA stream, is part of, 0: of none. A process uses no number again.
 * Errors: TE_INVALID_ARGUMENT if `number` is NULL, TE_NOT_IMPLEMENTED in a CPU build. */
TE_API te_status te_stash_capture(te_stream stream, uint64_t* number);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_STASH_H_ */
