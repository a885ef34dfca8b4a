/* offload: saved tensors leave for pinned host memory and come back, layer by layer, on streams of their own.
 *
 * An engine has the two streams (device to host, host to device) and one arena of pinned memory (plain memory on the
 * CPU, where copies are done at once and streams are only names). A layer is what leaves together: pieces of device
 * memory, whole storages as a rule. The caller owns that memory and frees or hands on what a call says is free.
 *
 * States of a layer, and the calls that each one takes; any other call is an error that names both:
 *   not_offloaded    mark, prepare, start                      -> offload_started
 *   offload_started  join, release                             -> offload_finished
 *   offload_finished start_reload                              -> reload_started
 *   reload_started   wait_reload; park                         -> offload_finished
 *   any              reset                                     -> not_offloaded
 *
 * Waits, each of them an event: no call but reset() in a capture waits on the host, and none changes memory that it
 * does not name.
 *
 *             made by        who waits           for what
 *   PRODUCED  start          the copy out        the compute stream, which writes the pieces
 *   COPIED    release, join  the compute stream  the copy out, before it uses their memory again
 *   ON_HOST   start_reload   the copy back       the copy out
 *   ROOM      start_reload   the copy back       the compute stream, which used the target's memory before
 *   RELOADED  wait_reload    the compute stream  the copy back
 *   SLOT      reset          later copies out    a copy back that reads the host memory they may be given
 *
 * Capture. Calls whose stream is being captured become nodes of the graph. What one capture forks it must join before
 *   it ends (join, wait_reload, park or reset); waits across two captures are then left to the order of the graphs, and
 *   memory used inside of one is kept for it (te_offload_release_captured). The arena grows outside of captures alone.
 * Pieces under 2 MiB travel packed where there are two or more of them: one copy on the device, one transfer.
 * Threads. Calls on one engine take turns.
 * Errors. TE_INVALID_ARGUMENT for bad arguments, TE_PINNED_MEMORY where that is exhausted (sizes named, nothing
 *   changed), TE_RUNTIME_ERROR for a call in the wrong state, a slot that was given back, or a failure of CUDA. */
#ifndef TRANSFORMER_ENGINE_OFFLOAD_H_
#define TRANSFORMER_ENGINE_OFFLOAD_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct te_offload_engine te_offload_engine;
typedef struct te_offload_layer te_offload_layer;

typedef enum te_offload_state {
  TE_OFFLOAD_NOT_OFFLOADED = 0,
  TE_OFFLOAD_STARTED = 1,
  TE_OFFLOAD_FINISHED = 2,
  TE_OFFLOAD_RELOAD_STARTED = 3
} te_offload_state;

typedef enum te_offload_wait {
  TE_OFFLOAD_WAIT_PRODUCED = 1,
  TE_OFFLOAD_WAIT_COPIED = 2,
  TE_OFFLOAD_WAIT_ON_HOST = 4,
  TE_OFFLOAD_WAIT_ROOM = 8,
  TE_OFFLOAD_WAIT_RELOADED = 16,
  TE_OFFLOAD_WAIT_SLOT = 32
} te_offload_wait;

typedef struct te_offload_options {
  int32_t device;      /* TE_DEVICE_CPU, or a CUDA ordinal */
  te_stream stream;    /* both directions on this one; NULL: one stream each, made here */
  size_t pinned_limit; /* most bytes of the arena; 0: what the machine gives */
  int32_t debug;       /* 1: a slot given back is filled with 0xFF (on CUDA the host then waits for its last reader) */
  int32_t trace;       /* 1: every wait, record and copy is noted */
  uint32_t left_out;   /* te_offload_wait bits that are not waited for. For tests: it makes races */
} te_offload_options;

/* device memory that travels */
typedef struct te_offload_piece {
  void* data;
  size_t bytes;
} te_offload_piece;

typedef struct te_offload_usage {
  size_t reserved; /* bytes of the arena */
  size_t used;     /* of them in slots */
  size_t peak;     /* the most that was in slots */
  size_t captured; /* of used: slots that graphs own */
  int64_t slots;
} te_offload_usage;

typedef enum te_offload_step_kind {
  TE_OFFLOAD_STEP_RECORD = 0,
  TE_OFFLOAD_STEP_WAIT = 1,
  TE_OFFLOAD_STEP_COPY = 2
} te_offload_step_kind;

/* One step of the trace: a record or wait of event number `event` (wait: which of the six), or a copy. */
typedef struct te_offload_step {
  int32_t kind;
  uint32_t wait;
  te_stream stream;
  int64_t event;
  const void* from;
  void* to;
  size_t bytes;
} te_offload_step;

TE_API const char* te_offload_state_name(te_offload_state state); /* NULL when out of range */

TE_API te_status te_offload_engine_create(te_offload_options options, te_offload_engine** out);
/* Its layers must be gone. Gives the arena back. */
TE_API te_status te_offload_engine_destroy(te_offload_engine* engine);
/* One free range of at least `bytes` exists afterwards. */
TE_API te_status te_offload_reserve(te_offload_engine* engine, size_t bytes);
/* Gives back what no slot lies in. On CUDA the driver waits for the device. */
TE_API te_status te_offload_trim(te_offload_engine* engine);
/* The graphs whose captures used the engine are gone: their slots may serve again. */
TE_API te_status te_offload_release_captured(te_offload_engine* engine);
TE_API te_status te_offload_get_usage(const te_offload_engine* engine, te_offload_usage* out);
TE_API te_status te_offload_streams(const te_offload_engine* engine, te_stream* d2h, te_stream* h2d);
/* Copies up to `most` steps from `first` on; *count: how many there are in all. */
TE_API te_status te_offload_get_trace(const te_offload_engine* engine, int64_t first, int64_t most,
                                      te_offload_step* steps, int64_t* count);

/* retain: its host memory stays its own from one reset to the next start, at the same address. */
TE_API te_status te_offload_layer_create(te_offload_engine* engine, int32_t retain, te_offload_layer** out);
/* reset on the last stream it was called with, then gone, with what it retained. */
TE_API te_status te_offload_layer_destroy(te_offload_layer* layer);
TE_API te_offload_state te_offload_layer_state(const te_offload_layer* layer);

/* What `stream` has been given so far is ready to leave: pieces that name the mark need not wait for more. */
TE_API te_status te_offload_mark(te_offload_layer* layer, te_stream stream, int64_t* mark);
/* Takes host memory for pieces of these sizes; *staging: bytes of device memory that start and start_reload want. */
TE_API te_status te_offload_prepare(te_offload_layer* layer, const size_t* sizes, int64_t count, te_stream stream,
                                    size_t* staging);
/* The same figure again, for start_reload. */
TE_API te_status te_offload_staging(te_offload_layer* layer, size_t* staging);
/* Starts the copy out. The pieces of prepare(), in order; marks: one each, or -1 (NULL: no marks). Pieces and staging
 * stay as they are until release() or reset(). */
TE_API te_status te_offload_start(te_offload_layer* layer, const te_offload_piece* pieces, const int64_t* marks,
                                  int64_t count, void* staging, te_stream stream);
/* `stream` waits for the copy out; the state stays. */
TE_API te_status te_offload_join(te_offload_layer* layer, te_stream stream);
/* `stream` waits for the copy out: behind it, pieces and staging are the caller's to use again. */
TE_API te_status te_offload_release(te_offload_layer* layer, te_stream stream);
/* Starts the copy back, into pieces of the same sizes, whose memory `stream` may have used before. */
TE_API te_status te_offload_start_reload(te_offload_layer* layer, const te_offload_piece* pieces, int64_t count,
                                         void* staging, te_stream stream);
/* `stream` waits for the copy back: behind it, the pieces may be read, and staging used again. */
TE_API te_status te_offload_wait_reload(te_offload_layer* layer, te_stream stream);
/* The reloaded pieces are given up (`stream` waits for the copy back), the host copies stay. */
TE_API te_status te_offload_park(te_offload_layer* layer, te_stream stream);
/* Everything is given up: `stream`, and the one that start() or start_reload() was called on, wait for whatever is
 * under way. In a capture the host waits for what was started outside of it. */
TE_API te_status te_offload_reset(te_offload_layer* layer, te_stream stream);

/* Bytes that `count` pieces take in packed form: each starts on a multiple of 256. */
TE_API size_t te_offload_packed_bytes(const size_t* sizes, int64_t count);
/* packed <- pieces, and back; every byte of pieces or of their places in `packed` is written, one launch per 96. */
TE_API te_status te_offload_pack(const te_offload_piece* pieces, int64_t count, void* packed, int32_t device,
                                 te_stream stream);
TE_API te_status te_offload_unpack(const void* packed, const te_offload_piece* pieces, int64_t count, int32_t device,
                                   te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_OFFLOAD_H_ */
