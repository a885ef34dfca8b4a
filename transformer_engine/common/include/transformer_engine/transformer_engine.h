/* Declarations that all ops of the C API share: status codes, dtypes, tensors, streams, the thread-pool hook.
 * Independent of PyTorch. Each op has its own header in this folder. */
#ifndef TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_
#define TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_

#include <stddef.h>
#include <stdint.h>

#define TE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* Returned by every te_* function that can fail; te_last_error() returns the message. */
typedef enum te_status {
  TE_SUCCESS = 0,
  TE_INVALID_ARGUMENT = 1, /* a wrong shape, dtype, device or option (Python: ValueError) */
  TE_NOT_IMPLEMENTED = 2,  /* a valid call that is not supported (Python: NotImplementedError) */
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
 * data may be NULL only if rows * cols == 0, or if the tensor is optional by the op's header. */
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

/* How FP8 data is scaled: value = data * scale_inv. There is one scale for the tensor (blocks of 0 x 0), or one for
 * each block of block_rows x block_cols in the rows and columns of a direction; blocks at an edge may be smaller.
 * Scales of blocks are stored in the order of the blocks, or across (one row of scales for each column of blocks), and
 * their rows are padded to a multiple of 4. transformer_engine/quantize.h lists the shapes;
 * transformer_engine/scaling.h has this table for C++.
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

/* Records, for the calling thread, the path that an op takes ("registers hold the row") and why it takes no faster one
 * ("" if there is none). Static strings; costs two stores. NULL clears. For te.explain. */
TE_API void te_note_path(const char* path, const char* why_not_faster);
TE_API void te_noted_path(const char** path, const char** why_not_faster);

/* "2.20.0": the level of the Python API that this library implements. */
TE_API const char* te_version(void);

/* Name and size of a dtype; NULL and 0 when dtype is not in the table. */
TE_API const char* te_dtype_name(te_dtype dtype);
TE_API size_t te_dtype_bytes(te_dtype dtype);

/* Runs body(context, block) once for each block in [0, n_blocks), in any order, on any threads, and returns when all
 * are done. Blocks are cut by shape, never by thread count, so the hook cannot change a result. NULL restores the
 * serial loop. The hook must outlive every later te_* call. */
typedef void (*te_parallel_for_hook)(int64_t n_blocks, void (*body)(void* context, int64_t block), void* context);
TE_API void te_set_parallel_for(te_parallel_for_hook hook);

/* 1 if the CUDA kernels are compiled in, whether or not a GPU is present. */
TE_API int te_built_with_cuda(void);

typedef struct te_device_properties {
  int32_t sm_count;
  int32_t capability; /* 10 * major + minor, 90 for Hopper */
  int64_t l2_bytes;
  int64_t shared_bytes_per_block; /* the opt-in limit */
} te_device_properties;

/* Cached for each device. Errors: TE_NOT_IMPLEMENTED in a CPU build, TE_RUNTIME_ERROR from the driver. */
TE_API te_status te_get_device_properties(int32_t device, te_device_properties* out);

/* TE_SUCCESS if the named library ("cublasLt", "nccl", "cuda") can be opened; otherwise the message lists the paths
 * that were tried. These libraries are opened on first use, never at load. */
TE_API te_status te_probe_library(const char* name);

/* The events that the current capture of `stream` records for work outside of it (cudaEventRecordExternal): the first
 * `capacity` cudaEvent_t; *count: the number of all. None if the stream is not being captured. Child graphs are not
 * searched. Errors: TE_INVALID_ARGUMENT if `count` is NULL, or `events` is with a capacity above 0,
 * TE_NOT_IMPLEMENTED in a CPU build, TE_RUNTIME_ERROR from CUDA. */
TE_API te_status te_captured_events(te_stream stream, void** events, size_t capacity, size_t* count);

/* Pinned host memory of this process (pageable memory for ops on the CPU). */
typedef struct te_pinned_bytes {
  size_t reserved; /* bytes allocated */
  size_t used;     /* bytes of them in slots */
  size_t peak;     /* the largest `used` so far */
  int64_t slots;
} te_pinned_bytes;

/* The pinned memory of `owner` ("offload"), over all its engines and devices; NULL: of all owners. Zeros for an owner
 * that never had any. Errors: TE_INVALID_ARGUMENT if `out` is NULL. */
TE_API te_status te_pinned_usage(const char* owner, te_pinned_bytes* out);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_ */
