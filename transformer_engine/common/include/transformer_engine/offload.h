/* offload: copies saved tensors to pinned host memory and back, layer by layer, on separate streams.
 *
 * An engine has two streams (device to host, host to device) and one arena of pinned memory (pageable memory on the
 * CPU, where copies complete at once and streams are names alone). A layer is a list of pieces of device memory,
 * usually whole storages, that are copied together. The caller owns that memory, and may free it where a call permits
 * it.
 *
 * States of a layer and the calls that each accepts; any other call is an error that names both:
 *   not_offloaded    mark, prepare, start                      -> offload_started
 *   offload_started  join, release                             -> offload_finished
 *   offload_finished start_reload                              -> reload_started
 *   reload_started   wait_reload; park                         -> offload_finished
 *   any              reset                                     -> not_offloaded
 *
 * Waits, each of them an event. No call but reset() in a capture blocks the host.
 *
 *             made by        waiting stream      waits for
 *   PRODUCED  start          the copy out        the compute stream, which writes the pieces
 *   COPIED    release, join  the compute stream  the copy out, before the pieces' memory is reused
 *   ON_HOST   start_reload   the copy back       the copy out
 *   ROOM      start_reload   the copy back       the compute stream, which used the target's memory before
 *   RELOADED  wait_reload    the compute stream  the copy back
 *   SLOT      reset          later copies out    a copy back that still reads the host memory they may reuse
 *
 * Capture. Calls whose stream is being captured become nodes of the graph. A capture must join its copies before it
 *   ends (join, wait_reload, park or reset); the order of graphs then replaces waits across two captures, and host
 *   memory that a capture used is reserved for its graph (te_offload_release_captured). The arena does not grow in a
 *   capture.
 * Two or more pieces under 2 MiB are packed: one copy on the device, one transfer.
 * Threads. Calls on one engine are serialised.
 * Errors. TE_INVALID_ARGUMENT for bad arguments, TE_PINNED_MEMORY if pinned memory is exhausted (with sizes, and
 *   nothing changed), TE_RUNTIME_ERROR for a call in the wrong state, a released slot, or a failure of CUDA. */
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
  te_stream stream;    /* for both directions; NULL: the engine creates one stream for each */
  size_t pinned_limit; /* largest size of the arena in bytes; 0: no limit */
  int32_t debug;       /* 1: a released slot is filled with 0xFF (on CUDA the host then waits for its last reader) */
  int32_t trace;       /* 1: records every wait, record and copy */
  uint32_t left_out;   /* te_offload_wait bits that are not waited for. For tests: it causes races */
} te_offload_options;

/* device memory to offload */
typedef struct te_offload_piece {
  void* data;
  size_t bytes;
} te_offload_piece;

typedef struct te_offload_usage {
  size_t reserved; /* bytes of the arena */
  size_t used;     /* bytes of them in slots */
  size_t peak;     /* the largest `used` so far */
  size_t captured; /* bytes of `used` that are reserved for graphs */
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
/* The engine's layers must have been destroyed. Frees the arena. */
TE_API te_status te_offload_engine_destroy(te_offload_engine* engine);
/* Ensures one free range of at least `bytes`. */
TE_API te_status te_offload_reserve(te_offload_engine* engine, size_t bytes);
/* Frees allocations without slots. On CUDA the driver waits for the device. */
TE_API te_status te_offload_trim(te_offload_engine* engine);
/* The graphs whose captures used the engine have been destroyed: their slots may be reused. */
TE_API te_status te_offload_release_captured(te_offload_engine* engine);
TE_API te_status te_offload_get_usage(const te_offload_engine* engine, te_offload_usage* out);
TE_API te_status te_offload_streams(const te_offload_engine* engine, te_stream* d2h, te_stream* h2d);
/* Copies up to `most` steps from `first` on; *count: the number of all. */
TE_API te_status te_offload_get_trace(const te_offload_engine* engine, int64_t first, int64_t most,
                                      te_offload_step* steps, int64_t* count);

/* retain: the layer keeps its host memory, at the same address, from a reset to the next start. */
TE_API te_status te_offload_layer_create(te_offload_engine* engine, int32_t retain, te_offload_layer** out);
/* Resets the layer on the last stream that it was called with, then destroys it and its retained memory. */
TE_API te_status te_offload_layer_destroy(te_offload_layer* layer);
TE_API te_offload_state te_offload_layer_state(const te_offload_layer* layer);

/* Marks the current work of `stream`: copies of pieces with this mark wait for no later work. */
TE_API te_status te_offload_mark(te_offload_layer* layer, te_stream stream, int64_t* mark);
/* Allocates host memory for pieces of these sizes; *staging: bytes of device memory that start and start_reload
 * need. */
TE_API te_status te_offload_prepare(te_offload_layer* layer, const size_t* sizes, int64_t count, te_stream stream,
                                    size_t* staging);
/* The same number, for start_reload. */
TE_API te_status te_offload_staging(te_offload_layer* layer, size_t* staging);
/* Starts the copy out. The pieces of prepare(), in order; marks: one each, or -1 (NULL: no marks). Pieces and staging
 * must not change until release() or reset(). */
TE_API te_status te_offload_start(te_offload_layer* layer, const te_offload_piece* pieces, const int64_t* marks,
                                  int64_t count, void* staging, te_stream stream);
/* `stream` waits for the copy out; the state does not change. */
TE_API te_status te_offload_join(te_offload_layer* layer, te_stream stream);
/* `stream` waits for the copy out; after that the caller may reuse pieces and staging. */
TE_API te_status te_offload_release(te_offload_layer* layer, te_stream stream);
/* Starts the copy back, into pieces of the same sizes, whose memory `stream` may have used before. */
TE_API te_status te_offload_start_reload(te_offload_layer* layer, const te_offload_piece* pieces, int64_t count,
                                         void* staging, te_stream stream);
/* `stream` waits for the copy back; after that the pieces may be read, and staging reused. */
TE_API te_status te_offload_wait_reload(te_offload_layer* layer, te_stream stream);
/* Drops the reloaded pieces (`stream` waits for the copy back) and keeps the host copies. */
TE_API te_status te_offload_park(te_offload_layer* layer, te_stream stream);
/* Drops everything: `stream`, and the stream of start() or start_reload(), wait for copies in flight. In a capture the
 * host waits for those that were started outside of it. */
TE_API te_status te_offload_reset(te_offload_layer* layer, te_stream stream);

/* Bytes of `count` pieces in packed form: each starts on a multiple of 256. */
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
