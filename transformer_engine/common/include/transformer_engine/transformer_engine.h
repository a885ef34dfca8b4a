/* What every room of the C API shares: status codes, dtypes, the tensor POD, the stream, the thread-pool hook.
 * It owns no memory and knows nothing of PyTorch. Each room has its own header beside this one. */
#ifndef TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_
#define TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_

#include <stddef.h>
#include <stdint.h>

#define TE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Every te_* function that can fail returns one of these; te_last_error() has the sentence that goes with it. */
typedef enum te_status {
  TE_SUCCESS = 0,
  TE_INVALID_ARGUMENT = 1, /* the caller can mend it: a shape, dtype, device or option (Python: ValueError) */
  TE_NOT_IMPLEMENTED = 2,  /* right in itself, not supported here (Python: NotImplementedError) */
  TE_RUNTIME_ERROR = 3,    /* the machine or a library failed (Python: RuntimeError) */
  TE_PINNED_MEMORY = 4     /* pinned host memory is exhausted, nothing was changed (Python: PinnedMemoryError) */
} te_status;

/* The one table of element types: X(enumerator, value, name, bytes per element). */
#define TE_DTYPE_TABLE(X)                \
  X(TE_UINT8, 0, "uint8", 1)             \
  X(TE_INT32, 1, "int32", 4)             \
  X(TE_INT64, 2, "int64", 8)             \
  X(TE_FLOAT32, 3, "float32", 4)         \
  X(TE_FLOAT16, 4, "float16", 2)         \
  X(TE_BFLOAT16, 5, "bfloat16", 2)       \
  X(TE_FLOAT8_E4M3, 6, "float8_e4m3", 1) \
  X(TE_FLOAT8_E5M2, 7, "float8_e5m2", 1)

typedef enum te_dtype {
#define TE_DTYPE_ENUMERATOR(id, value, name, bytes) id = value,
  TE_DTYPE_TABLE(TE_DTYPE_ENUMERATOR)
#undef TE_DTYPE_ENUMERATOR
} te_dtype;

#define TE_DEVICE_CPU (-1)

/* A view of memory the caller owns: rows x cols elements, element (r, c) at data + r * row_pitch + c, in elements.
 * Leading dimensions are folded into rows by the caller; a vector of n is 1 x n. row_pitch >= cols.
 * data may be NULL only when rows * cols == 0, or where a room's header says the tensor is optional. */
typedef struct te_tensor {
  void* data;
  int64_t rows;
  int64_t cols;
  int64_t row_pitch;
  te_dtype dtype;
  int32_t device; /* TE_DEVICE_CPU, or the CUDA ordinal that data lives on */
} te_tensor;

/* A cudaStream_t on CUDA; ignored on the CPU. Work is only enqueued: no entry point waits for the device. */
typedef void* te_stream;

/* How FP8 data is scaled: value = data * scale_inv. A scale is the whole tensor's (blocks of 0 x 0), or a block's of so
 * many of a direction's own rows and columns; what is cut off at an edge is a block of its own. Scales of blocks lie as
 * the blocks do, or across (a row of them for each column of blocks), and their rows are padded to a multiple of 4.
 * transformer_engine/quantize.h spells the shapes out; transformer_engine/scaling.h is the table for C++.
 * X(name, number, block_rows, block_cols, across, words) */
#define TE_SCALING_TABLE(X)          \
  X(TENSOR, 0, 0, 0, 0, "tensor")    \
  X(BLOCK_1D, 1, 1, 128, 1, "1x128") \
  X(BLOCK_2D, 2, 128, 128, 0, "128x128")

typedef enum te_scaling {
#define TE_SCALING_ENUMERATOR(name, number, ...) TE_SCALING_##name = number,
  TE_SCALING_TABLE(TE_SCALING_ENUMERATOR)
#undef TE_SCALING_ENUMERATOR
} te_scaling;

/* The message of this thread's last failure; valid until its next te_* call. Never NULL. */
TE_API const char* te_last_error(void);

/* The path an op takes, in words: a room's call notes it for its thread ("registers hold the row"), with the reason why
 * not a faster one ("" where there is none). Static strings; costs two stores. NULL clears. For te.explain. */
TE_API void te_note_path(const char* path, const char* why_not_faster);
TE_API void te_noted_path(const char** path, const char** why_not_faster);

/* "2.20.0": the level of the Python API this library is built for. */
TE_API const char* te_version(void);

/* Name and size of a dtype; NULL and 0 when dtype is not in the table. */
TE_API const char* te_dtype_name(te_dtype dtype);
TE_API size_t te_dtype_bytes(te_dtype dtype);

/* Runs body(context, block) once for each block in [0, n_blocks), in any order, on any threads, and returns when all
 * are done. Blocks are cut by shape, never by thread count, so the hook cannot change a result. NULL restores the
 * serial loop. The hook must outlive every later te_* call. */
typedef void (*te_parallel_for_hook)(int64_t n_blocks, void (*body)(void* context, int64_t block), void* context);
TE_API void te_set_parallel_for(te_parallel_for_hook hook);

/* 1 when the CUDA kernels are compiled in (says nothing of whether a GPU is present). */
TE_API int te_built_with_cuda(void);

typedef struct te_device_properties {
  int32_t sm_count;
  int32_t capability; /* 10 * major + minor, 90 for Hopper */
  int64_t l2_bytes;
  int64_t shared_bytes_per_block; /* the opt-in limit */
} te_device_properties;

/* Read once per device and remembered. Errors: TE_NOT_IMPLEMENTED in a CPU build, TE_RUNTIME_ERROR from the driver. */
TE_API te_status te_get_device_properties(int32_t device, te_device_properties* out);

/* TE_SUCCESS when the named library ("cublasLt", "nccl", "cuda") can be opened here; otherwise the message says what
 * was tried. These libraries are opened on first use, never at load. */
TE_API te_status te_probe_library(const char* name);

/* The events that the capture under way on `stream` records for work outside of it (cudaEventRecordExternal): the first
 * `capacity` cudaEvent_t of them, and in *count how many there are. None where the stream is not being captured.
 * Events of child graphs are not looked for. Errors: TE_INVALID_ARGUMENT where `count` is NULL, or `events` without a
 * capacity of 0, TE_NOT_IMPLEMENTED in a CPU build, TE_RUNTIME_ERROR from CUDA. */
TE_API te_status te_captured_events(te_stream stream, void** events, size_t capacity, size_t* count);

/* Pinned host memory of this process (plain memory where a room works on the CPU). */
typedef struct te_pinned_bytes {
  size_t reserved; /* bytes taken from the machine */
  size_t used;     /* of them in slots */
  size_t peak;     /* the most that was in slots at once */
  int64_t slots;
} te_pinned_bytes;

/* What the room `owner` ("offload") has of it, over all its engines and devices; NULL: all rooms together. Zeros for a
 * room that never had any. Errors: TE_INVALID_ARGUMENT where `out` is NULL. */
TE_API te_status te_pinned_usage(const char* owner, te_pinned_bytes* out);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_ */
