/* stash: the live parts of what layers keep for backward, packed into pages of one pool that all of them share.
 *
 * A group is what one layer keeps: up to 16 members, each a buffer of `most` units of unit_bytes, of which the first
 * `count` are alive; the count is an integer on the device. A store copies the live parts into pages, a load copies
 * them back, one launch each and without the host knowing a count. Live parts are laid end to end, each on a multiple
 * of 128 bytes, and that stream of bytes is cut into pages: ceil(stream / page_bytes) of them, whatever the dtypes.
 *
 *   pages of a group = ceil(sum of round_up(count * unit_bytes, 128) / page_bytes)
 *
 * Tiers. Device pages are taken first, what they lack is taken of pinned host pages (the last pages of the stream lie
 * there). A group that finds no room in both takes none: its state is lost, it is flagged, counted in `demand`, and its
 * load writes 0xFF to every live byte, which is NaN in every floating dtype, those of FP8 included.
 *
 * Policies. Which page is next depends on the order of the calls alone.
 *   RING   taken at the head, given back at the tail: FIFO. The reference.
 *   STACK  the last that was given back is taken first.
 *   BUMP   no list: a group lies in one piece above the last one, and groups come back in the reverse order. Another
 *          order is flagged (TE_STASH_ORDER) and its pages are gone until the next reset. No eviction.
 *   Host pages are always a ring.
 *
 * Streams and order. Calls on one pool are counted on the host in the order in which they are made. Stores of a pool
 * run on one stream or behind each other; so do loads (drops are loads). The caller waits, by events:
 *   a store   behind what wrote its members, and behind every load that was called before it
 *   a load    behind the store of its group and what used its targets; where te_stash_load_waits() says so, behind
 *             every store that was called before it
 *   an evict  is both: behind every store and load before it, and before those after it
 * A load that was called after a store may run before it: the store still sees only pages that loads before it gave
 * back, so a trace of calls gives the same maps however two streams interleave, and the CPU's are CUDA's.
 *
 * Capture. store, load, drop, evict, reset and read are one node each (debug adds its own); nothing is allocated and
 * nothing waits for the host. Captured calls must be replayed behind a captured or eager reset(): numbers of calls
 * start at 0 there.
 *
 * Counts above `most` are cut (TE_STASH_OVER_CAPACITY), negative ones are 0 (TE_STASH_NEGATIVE): both are flagged.
 * Every flag raises the gate, a float that is 1 for a bad step (found_inf of fused optimizers), until the next reset:
 * the report's, and the caller's own (options.gate), which outlives the pool.
 *
 * Memory. The caller owns pages, control and entries: device memory (plain on the CPU) on 128 bytes, alive as long as
 * the pool, its graphs included. Host pages are the core's pinned memory, counted as "stash".
 * Threads. Calls on one pool take turns.
 * Errors. TE_INVALID_ARGUMENT, naming the argument; TE_PINNED_MEMORY; TE_RUNTIME_ERROR from CUDA. Nothing is changed.
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

/* What a load writes behind the live units of a member. */
typedef enum te_stash_tail {
  TE_STASH_TAIL_KEEP = 0, /* nothing */
  TE_STASH_TAIL_TILE = 1, /* zeros up to a multiple of tile_units */
  TE_STASH_TAIL_ZERO = 2  /* zeros up to `most` */
} te_stash_tail;

typedef enum te_stash_flag {
  TE_STASH_LOST = 1,          /* no room in either tier */
  TE_STASH_OVER_CAPACITY = 2, /* a count above `most` */
  TE_STASH_NEGATIVE = 4,      /* a count below 0 */
  TE_STASH_ORDER = 8,         /* bump: a group came back that was not the last one */
  TE_STASH_EMPTY = 16,        /* a load of an entry that holds nothing, or not these sizes: every byte of `most` units
                               * becomes 0xFF. Or a store into one that holds something, which is not done: what it
                               * holds stays */
  TE_STASH_CHANGED = 32,      /* debug: the bytes of a group are not those that were stored */
  TE_STASH_CANARY = 64,       /* debug: somebody wrote between two pages */
  TE_STASH_LEAKED = 128       /* debug, at reset: pages were still taken. A flag of the step that starts */
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
  int64_t device_pages; /* may be 0: everything on the host */
  int64_t host_pages;   /* may be 0: nothing there */
  int32_t sm_budget;    /* blocks of a copy, from 1 on; 4 more where there are host pages */
  int32_t trap;         /* 1: a lost group ends the process with a message (a CUDA trap; abort() on the CPU) */
  int32_t debug;        /* 1: canaries, checksums, 0xFF in pages that were given back, leaks at reset */
  void* pages;          /* te_stash_pages_bytes(); NULL for 0 */
  void* control;        /* te_stash_control_bytes() */
  float* gate;          /* the report's gate once more, on the device; NULL: nowhere else */
} te_stash_options;

typedef struct te_stash_member {
  void* data;            /* `most` units, contiguous. Any alignment; on 16 bytes it is fast */
  const void* counter;   /* a store: one integer on the device. A load: not read */
  int32_t counter_bytes; /* 1, 4 or 8; signed, but for one byte, which is unsigned */
  int32_t tail;          /* te_stash_tail, for the load */
  int64_t unit_bytes;    /* not 0 */
  int64_t most;          /* units */
  int64_t tile_units;    /* of TE_STASH_TAIL_TILE: 128 rows / rows of a unit, at least 1 */
  int64_t behind;        /* a store: units that count as alive behind the live ones, where there is a live one */
} te_stash_member;

/* The head of an entry, which te_stash_read_entry() brings: what is stored of one group. Its page map follows it. */
typedef struct te_stash_entry {
  int32_t state; /* te_stash_state */
  int32_t members;
  int64_t number;       /* what the store was told */
  int64_t stream_bytes; /* live parts with their padding */
  int64_t live_bytes;   /* without */
  int64_t pages;        /* wanted; taken where state is stored */
  int64_t host_pages;   /* of them on the host: the last ones */
  int64_t counts[TE_STASH_MOST_MEMBERS];
  uint64_t checksum; /* debug */
  uint32_t words[4]; /* the kernels': 0 between calls */
  /* Behind it are the room's own words, up to byte 256; the map of int32 ids begins there. */
} te_stash_entry;

/* The head of control. Since the last reset, but for `step`. */
typedef struct te_stash_report {
  float gate;            /* 1: something is flagged */
  uint32_t flags;        /* te_stash_flag bits */
  int64_t step;          /* resets so far */
  int64_t flagged_entry; /* number of the first group that was flagged; -1: none, or no group was at fault */
  int64_t groups;        /* stored, lost ones included */
  int64_t lost_groups;
  int64_t live_bytes;    /* of all groups that found room */
  int64_t stream_bytes;  /* of these, with padding: what lies in pages */
  int64_t taken_bytes;   /* of these, whole pages; taken - live is waste */
  int64_t spilled_bytes; /* of the stream, into host pages */
  int64_t evicted_pages;
  int64_t device_in_use, device_peak; /* pages. Now; and at most, as the order of calls has it */
  int64_t host_in_use, host_peak;
  int64_t demand; /* most pages wanted at once, lost groups counted until they are loaded */
} te_stash_report;

/* Sizes of what the caller brings, for options whose pointers are not looked at. Bad options: 0 (a pool without device
 * pages has 0 bytes of pages, but never of control). */
TE_API size_t te_stash_pages_bytes(te_stash_options options);
TE_API size_t te_stash_control_bytes(te_stash_options options);
/* Memory of one entry whose group may want that many pages; the caller fills it with 0 before the first store. */
TE_API size_t te_stash_entry_bytes(int64_t most_pages);
/* Pages that members want when all their units are alive. */
TE_API te_status te_stash_most_pages(const te_stash_member* members, int32_t count, size_t page_bytes, int64_t* pages);

/* Takes the host pages, and starts the first step on `stream`. */
TE_API te_status te_stash_pool_create(te_stash_options options, te_stream stream, te_stash_pool** out);
/* Gives the host pages back; the device must be done with them. */
TE_API te_status te_stash_pool_destroy(te_stash_pool* pool);

/* The next step starts: every page is free and in the first order, flags, gate and statistics are cleared, and what an
 * entry holds is forgotten: loading it is loading nothing, storing into it is allowed (te_stash_read_entry still shows
 * what was). Behind every other call on the pool. */
TE_API te_status te_stash_reset(te_stash_pool* pool, te_stream stream);

/* entry: te_stash_entry_bytes(most pages of the members) of the pool's device, which holds nothing now. number: names
 * the group in the report. */
TE_API te_status te_stash_store(te_stash_pool* pool, const te_stash_member* members, int32_t count, void* entry,
                                int64_t number, te_stream stream);
/* Live units of each member and its tail are written; what of `most` is behind stays. The sizes of the store, other
 * data. keep: the pages stay the entry's, for another load. */
TE_API te_status te_stash_load(te_stash_pool* pool, const te_stash_member* members, int32_t count, void* entry,
                               int32_t keep, te_stream stream);
/* The pages of an entry are given back unread. An entry that holds nothing is let be. */
TE_API te_status te_stash_drop(te_stash_pool* pool, void* entry, te_stream stream);
/* Where fewer than low_water device pages are free: the entry's device pages move to host pages, all of them or, where
 * those do not suffice, none. An entry that holds nothing is let be. */
TE_API te_status te_stash_evict(te_stash_pool* pool, void* entry, int64_t low_water, te_stream stream);

/* Whether the next load or drop has to run behind every store so far: always but for RING; there behind an evict, and
 * once in 128 loads, drops and evicts, the first one of a step included. Asked before each load and each drop. */
TE_API int32_t te_stash_load_waits(const te_stash_pool* pool);

/* Enqueues a copy of the report to host memory (pinned, or the call waits). */
TE_API te_status te_stash_read(te_stash_pool* pool, te_stash_report* out, te_stream stream);
/* The same into a mailbox, pinned memory on 8 bytes that the host may look into at any time: a kernel writes it there,
 * step last, which is -1 meanwhile. */
TE_API te_status te_stash_post(te_stash_pool* pool, te_stash_report* mailbox, te_stream stream);
/* What te_stash_post() wrote there, without waiting: 1, or 0 where nothing whole is there at this moment (filled with
 * 0xFF before the first post, or being written). */
TE_API int32_t te_stash_report_in(const void* mailbox, te_stash_report* out);
/* An entry's head. Waits for the device. */
TE_API te_status te_stash_read_entry(te_stash_pool* pool, const void* entry, te_stash_entry* out, te_stream stream);
/* For tests: the page map of an entry (device pages first: ids of the device tier, then of the host tier) and, where
 * ids is not NULL, how many there are. Waits for the device. */
TE_API te_status te_stash_read_map(te_stash_pool* pool, const void* entry, int32_t* ids, int64_t most, int64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_STASH_H_ */
