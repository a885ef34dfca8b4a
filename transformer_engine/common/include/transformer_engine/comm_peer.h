/* comm_peer: a channel by which ranks push rows into each other's memory, on one machine. Who is who, and whose memory
 * lies where, is told; nothing is looked for here, and no group is known.
 *
 * Slots. A rank has up to TE_COMM_PEER_SLOTS pieces of memory that its peers push to. A call uses a slot as a whole: it
 *   begins, pushes to peers and signals, waits for what peers push here, and is done when its last reader is enqueued;
 *   only then may the next call's pushes come. On CUDA pushes run on a stream of the channel's (the copy lane), beside
 *   what computes; on the CPU they are done when the call returns.
 * Words. Ranks share some host memory, zeros before the first of them comes. Streams set and await words there and put
 *   them back, so that eager calls and replays of graphs mix and nothing is counted. What a word is set to says which
 *   call it belongs to (op, shape and dtype in the caller's words), and beside it stands what its owner waits for.
 * Failure. A thread of each rank reads the words, without a CUDA call: it finds a wait for a peer that is dead (within
 *   2 seconds) or at another call, and one that stands longer than the deadline. Then the channel has failed, for every
 *   rank and for good: waits end, te_comm_peer_poison() makes NaN of what was computed behind them, and
 *   te_comm_peer_failure() says what happened. A call that is given up ends the channel in the same way. A peer that
 *   ended when all it had to push was pushed harms nobody.
 * No multicast, and no stream writes to a peer's memory.
 * Errors. TE_INVALID_ARGUMENT for what is out of range, TE_RUNTIME_ERROR where the driver refuses, and for calls in a
 *   process that was forked from the channel's, which has no part in it. One thread at a time is in a call of a
 *   channel. */
#ifndef TRANSFORMER_ENGINE_COMM_PEER_H_
#define TRANSFORMER_ENGINE_COMM_PEER_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TE_COMM_PEER_SLOTS 8
#define TE_COMM_PEER_TEXT 160
#define TE_COMM_PEER_OTHERS (-1) /* in place of a rank: every one but this, in one operation of a stream */

typedef struct te_comm_peer te_comm_peer;

typedef struct te_comm_peer_options {
  int32_t ranks; /* 2 to TE_COMM_MOST_RANKS (comm.h) */
  int32_t rank;
  int32_t device;   /* TE_DEVICE_CPU, or a CUDA device */
  void* words;      /* te_comm_peer_bytes() of them, on a page; they outlive the channel */
  double timeout_s; /* how long a wait may stand */
} te_comm_peer_options;

typedef enum te_comm_peer_trouble {
  TE_COMM_PEER_SOUND = 0,
  TE_COMM_PEER_LATE = 1,  /* the wait outlasted the deadline */
  TE_COMM_PEER_DEAD = 2,  /* the peer's process is gone */
  TE_COMM_PEER_OTHER = 3, /* the peer is at another call */
  TE_COMM_PEER_LEFT = 4   /* a rank gave up a call, or its channel while others wait for it */
} te_comm_peer_trouble;

typedef struct te_comm_peer_failure_info {
  te_comm_peer_trouble trouble;
  int32_t rank;                  /* who found it */
  int32_t peer;                  /* whom it waited for; -1: nobody in particular */
  int32_t freeing;               /* 1: for the peer's slot to be free, 0: for the peer's rows */
  char op[TE_COMM_PEER_TEXT];    /* the call of `rank` */
  char other[TE_COMM_PEER_TEXT]; /* the call of `peer`, where that is another one */
} te_comm_peer_failure_info;

TE_API te_status te_comm_peer_bytes(int32_t ranks, size_t* bytes);
/* Every rank makes its own before any of them begins a call. */
TE_API te_status te_comm_peer_create(const te_comm_peer_options* options, te_comm_peer** out);
/* Waits for nothing: what was enqueued has to have ended. */
TE_API te_status te_comm_peer_destroy(te_comm_peer* channel);

/* Where each rank's memory of a slot lies as this rank sees it: `ranks` addresses. From the next call on. */
TE_API te_status te_comm_peer_slot(te_comm_peer* channel, int32_t slot, void* const* addresses, size_t bytes);

/* A call's first step: `text` says what every rank of it does, in the same words. */
TE_API te_status te_comm_peer_begin(te_comm_peer* channel, int32_t slot, const char* text);
/* What is pushed from now on comes behind what `stream` has so far. */
TE_API te_status te_comm_peer_follow(te_comm_peer* channel, te_stream stream);
/* `rows` runs of row_bytes, source_pitch bytes apart, into `to`'s slot from `offset` on, target_pitch apart. To this
 * rank itself it is one copy a call, beside those to others, with no word for it. */
TE_API te_status te_comm_peer_push(te_comm_peer* channel, int32_t slot, int32_t to, size_t offset, size_t target_pitch,
                                   const void* source, size_t source_pitch, size_t row_bytes, int64_t rows);
/* All that this call pushes to `to` is pushed. */
TE_API te_status te_comm_peer_signal(te_comm_peer* channel, int32_t slot, int32_t to);
/* `stream` goes on when `from` has signalled; when this rank's own copy is there, where that is `from`. */
TE_API te_status te_comm_peer_wait(te_comm_peer* channel, int32_t slot, int32_t from, te_stream stream);
/* `stream` goes on behind all that this call has pushed and copied so far. */
TE_API te_status te_comm_peer_join(te_comm_peer* channel, int32_t slot, te_stream stream);
/* A call's last step: behind what `stream` has so far the slot is `from`'s again; for each other rank. data: what is
 * made NaN as by te_comm_peer_poison() before; NULL: nothing. */
TE_API te_status te_comm_peer_done(te_comm_peer* channel, int32_t slot, int32_t from, void* data, size_t bytes,
                                   te_stream stream);

/* Makes NaN (bytes of 0xff) of this memory if the channel has failed by then. */
TE_API te_status te_comm_peer_poison(te_comm_peer* channel, void* data, size_t bytes, te_stream stream);
/* A call that will not be finished: the channel fails. */
TE_API te_status te_comm_peer_give_up(te_comm_peer* channel, const char* text);
TE_API te_status te_comm_peer_failure(te_comm_peer* channel, te_comm_peer_failure_info* info);
/* idle: 1 where all that was enqueued has ended and no graph has recorded any of it, so that the channel may end. Waits
 * for nothing. */
TE_API te_status te_comm_peer_idle(te_comm_peer* channel, int32_t* idle);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_COMM_PEER_H_ */
