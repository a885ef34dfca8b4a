/* comm_peer: a channel by which ranks push rows into each other's memory, on one machine. The caller passes ranks and
 * addresses; the channel discovers nothing.
 *
 * Slots. A rank has up to TE_COMM_PEER_SLOTS pieces of memory that its peers push to. A call uses one slot: it begins,
 *   pushes to peers and signals, waits for the pushes of its peers, and is done when its last reader is enqueued; only
 *   after that may the next call's pushes arrive. On CUDA pushes run on a copy stream of the channel, concurrently with
 *   computation; on the CPU they have completed when the call returns.
 * Words. The ranks share host memory, zero at first. Streams set, await and reset words in it, so that eager calls and
 *   replays of graphs can be mixed without counters. The value of a word identifies its call (op, shape and dtype in
 *   the caller's text), and the word next to it what its owner waits for.
 * Failure. A thread of each rank reads the words, without a CUDA call: it detects a wait for a peer that is dead
 *   (within 2 seconds) or in another call, and a wait beyond the deadline. Then the channel has failed for every rank,
 *   permanently: waits end, te_comm_peer_poison() fills later results with NaN, and te_comm_peer_failure() returns the
 *   reason. te_comm_peer_give_up() ends the channel in the same way. A peer that exits after its last push causes no
 *   failure.
 * No multicast, and no stream writes to a peer's memory.
 * Errors. TE_INVALID_ARGUMENT for arguments out of range, TE_RUNTIME_ERROR if the driver refuses, and for calls in a
 *   process that was forked from the channel's. A channel is not thread-safe. */
#ifndef TRANSFORMER_ENGINE_COMM_PEER_H_
#define TRANSFORMER_ENGINE_COMM_PEER_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TE_COMM_PEER_SLOTS 8
#define TE_COMM_PEER_TEXT 160
#define TE_COMM_PEER_OTHERS (-1) /* as a rank: all ranks but this one, in one operation of a stream */

typedef struct te_comm_peer te_comm_peer;

typedef struct te_comm_peer_options {
  int32_t ranks; /* 2 to TE_COMM_MOST_RANKS (comm.h) */
  int32_t rank;
  int32_t device;   /* TE_DEVICE_CPU, or a CUDA device */
  void* words;      /* te_comm_peer_bytes() bytes, page-aligned; they outlive the channel */
  double timeout_s; /* deadline of a wait */
} te_comm_peer_options;

typedef enum te_comm_peer_trouble {
  TE_COMM_PEER_SOUND = 0,
  TE_COMM_PEER_LATE = 1,  /* the wait exceeded the deadline */
  TE_COMM_PEER_DEAD = 2,  /* the peer's process has ended */
  TE_COMM_PEER_OTHER = 3, /* the peer is in another call */
  TE_COMM_PEER_LEFT = 4   /* a rank gave up a call, or its channel while others waited for it */
} te_comm_peer_trouble;

typedef struct te_comm_peer_failure_info {
  te_comm_peer_trouble trouble;
  int32_t rank;                  /* the rank that detected it */
  int32_t peer;                  /* the rank that it waited for; -1: none in particular */
  int32_t freeing;               /* 1: it waited for the peer's slot to be free, 0: for the peer's rows */
  char op[TE_COMM_PEER_TEXT];    /* the call of `rank` */
  char other[TE_COMM_PEER_TEXT]; /* the call of `peer`, if it differs */
} te_comm_peer_failure_info;

TE_API te_status te_comm_peer_bytes(int32_t ranks, size_t* bytes);
/* All ranks create their channel before any of them begins a call. */
TE_API te_status te_comm_peer_create(const te_comm_peer_options* options, te_comm_peer** out);
/* Does not wait: all enqueued work must have ended. */
TE_API te_status te_comm_peer_destroy(te_comm_peer* channel);

/* Sets the addresses of each rank's memory of a slot in this rank's address space: `ranks` of them. From the next call
 * on. */
TE_API te_status te_comm_peer_slot(te_comm_peer* channel, int32_t slot, void* const* addresses, size_t bytes);

/* A call's first step. `text` describes the call, identically on all ranks. */
TE_API te_status te_comm_peer_begin(te_comm_peer* channel, int32_t slot, const char* text);
/* Later pushes wait for the current work of `stream`. */
TE_API te_status te_comm_peer_follow(te_comm_peer* channel, te_stream stream);
/* Pushes `rows` runs of row_bytes, source_pitch bytes apart, into `to`'s slot from `offset` on, target_pitch apart. If
 * `to` is this rank itself, at most one copy a call is allowed, and no word is set for it. */
TE_API te_status te_comm_peer_push(te_comm_peer* channel, int32_t slot, int32_t to, size_t offset, size_t target_pitch,
                                   const void* source, size_t source_pitch, size_t row_bytes, int64_t rows);
/* The call has no more pushes to `to`. */
TE_API te_status te_comm_peer_signal(te_comm_peer* channel, int32_t slot, int32_t to);
/* `stream` waits for the signal of `from`, or for this rank's own copy if that is `from`. */
TE_API te_status te_comm_peer_wait(te_comm_peer* channel, int32_t slot, int32_t from, te_stream stream);
/* `stream` waits for all pushes and copies of this call so far. */
TE_API te_status te_comm_peer_join(te_comm_peer* channel, int32_t slot, te_stream stream);
/* A call's last step, for each other rank: after the current work of `stream`, `from` may use the slot again. data: the
 * memory that te_comm_peer_poison() is applied to first; NULL: none. */
TE_API te_status te_comm_peer_done(te_comm_peer* channel, int32_t slot, int32_t from, void* data, size_t bytes,
                                   te_stream stream);

/* Fills this memory with NaN (bytes of 0xff) if the channel has failed by the time that the stream reaches it. */
TE_API te_status te_comm_peer_poison(te_comm_peer* channel, void* data, size_t bytes, te_stream stream);
/* Abandons a call: the channel fails. */
TE_API te_status te_comm_peer_give_up(te_comm_peer* channel, const char* text);
TE_API te_status te_comm_peer_failure(te_comm_peer* channel, te_comm_peer_failure_info* info);
/* idle: 1 if all enqueued work has ended and no graph has recorded any of it, so that the channel may be destroyed.
 * Does not wait. */
TE_API te_status te_comm_peer_idle(te_comm_peer* channel, int32_t* idle);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_COMM_PEER_H_ */
