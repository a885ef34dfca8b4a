/* gemm: matrix products with epilogues, on cuBLASLt for CUDA tensors; on the CPU by the function that te_set_cpu_gemm
 * installed, else by a plain loop, the reference of the tests.
 *
 * Formula, row-major, with op() given by the layout (transpose letters of a, then of b, as in BLAS; the fprop, dgrad
 * and wgrad of a linear layer with weight [N, K], input [M, K], output [M, N]):
 *   TN  d[M, N] = b[M, K] a[N, K]^T     fprop: a = weight, b = input
 *   NN  d[M, K] = b[M, N] a[N, K]       dgrad: a = weight, b = output gradient
 *   NT  d[N, K] = b[M, N]^T a[M, K]     wgrad: a = input, b = output gradient
 *   accumulate: d += the product instead of d =.
 * Epilogues, applied in float32 before the one rounding; on CUDA those of cuBLASLt, which may round the product to a
 * 16-bit d's dtype first (observed with gelu, with accumulate, and with a bias at sizes that are not multiples of 8):
 *   BIAS       d += bias[cols of d], the same for every row
 *   GELU       aux = the product (plus bias, if given), d = gelu(aux), tanh form; aux is written, shaped like d
 *   DGELU      d = product * gelu'(aux); aux is read, shaped like d
 *   BGRAD      bias[rows of d] = sum over the rows of b; layout NT alone
 * Dtypes. a and b: float32, float16 or bfloat16, the same; d: theirs or float32; bias: the dtype of a or of d; aux:
 *   the dtype of d. Accumulation in float32; allow_tf32 lets float32 operands be cut to TF32 on CUDA.
 * FP8 operands, as from te_quantize: value = data * scale_inv. Layout TN alone (pass the columnwise data for dgrad and
 *   wgrad), cols and depth multiples of 16, addresses and pitches of a, b and d multiples of 16 bytes; the data of a
 *   matrix narrower than depth is padded with 0. Pairs of dtypes: E4M3 with E4M3 or E5M2. Scalings: TENSOR with TENSOR
 *   (scale_inv [1, 1 or 2]); BLOCK_1D with BLOCK_1D or BLOCK_2D, not BLOCK_2D with itself; rows are a multiple of 4 if
 *   b has BLOCK_1D. Scales are dense, on 16 bytes.
 *   d: float32, bfloat16 or float16, never FP8. bias: float16 with a float16 d, bfloat16 otherwise. No other epilogue.
 *   fast_accumulation keeps sums in the tensor cores, with fewer bits than float32 (TENSOR alone); without it they are
 *   accumulated in float32 in steps of some ten products.
 * Determinism. The heuristic's first algorithm with a fixed reduction order, cached for each problem: the same call
 *   gives the same bits. Alignment enters as the smaller of 16 bytes and that of pointers and pitches, so that views
 *   and new tensors of one shape get the same algorithm. te_gemm_choose() sets another algorithm of fixed order.
 * Aliasing. d must not overlap any input (with accumulate it is read and written).
 * Errors. TE_INVALID_ARGUMENT for shapes, dtypes, devices; TE_NOT_IMPLEMENTED, naming the combination, when cuBLASLt
 *   has no algorithm; TE_RUNTIME_ERROR when the library is missing or fails. */
#ifndef TRANSFORMER_ENGINE_GEMM_H_
#define TRANSFORMER_ENGINE_GEMM_H_

#include "transformer_engine/transformer_engine.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum te_gemm_layout { TE_GEMM_TN = 0, TE_GEMM_NN = 1, TE_GEMM_NT = 2 } te_gemm_layout;

typedef enum te_gemm_epilogue {
  TE_GEMM_NONE = 0,
  TE_GEMM_BIAS = 1,
  TE_GEMM_GELU = 2,
  TE_GEMM_DGELU = 3,
  TE_GEMM_BGRAD = 4
} te_gemm_epilogue;

typedef struct te_gemm_problem {
  te_tensor a;
  te_tensor b;
  te_tensor d;
  te_tensor bias; /* data NULL if the epilogue has none */
  te_tensor aux;  /* data NULL if the epilogue has none */
  te_gemm_layout layout;
  te_gemm_epilogue epilogue;
  int accumulate;
  int allow_tf32;
  /* For FP8 operands; data NULL and 0 with others. */
  te_tensor a_scale_inv;
  te_tensor b_scale_inv;
  te_scaling a_scaling;
  te_scaling b_scaling;
  int fast_accumulation;
  /* 0, or: b and d are consecutive rows of matrices with this many, in layout TN or NN without aux; the algorithm is
   * that of the full product, so that these rows get the same bits. */
  int64_t whole_rows;
} te_gemm_problem;

/* Bytes of device memory that the algorithm needs; 0 on the CPU. */
TE_API te_status te_gemm_workspace(const te_gemm_problem* problem, size_t* bytes);

/* workspace: at least te_gemm_workspace bytes on the problem's device, 256-byte aligned, free to use on the stream. */
TE_API te_status te_gemm(const te_gemm_problem* problem, void* workspace, size_t workspace_bytes, te_stream stream);

/* Elements of d that an algorithm computes at once on a cluster of `units` multiprocessors; all 0 if that is unknown.
 */
typedef struct te_gemm_tile {
  int32_t rows;
  int32_t cols;
  int32_t units;
} te_gemm_tile;

/* *does: 1 if products of some rows of this one give the bits of the full product (see whole_rows): its algorithm does
 * not split the reduction, so that the order of an element is that of its tile. On the CPU 1: te_gemm_by_loop gives
 * such bits; a product that te_set_cpu_gemm installed may not. tile: NULL, or receives the tile of that algorithm. */
TE_API te_status te_gemm_takes_runs(const te_gemm_problem* problem, int32_t* does, te_gemm_tile* tile);

/* For `number` problems like this one, but with counts[i] rows of b and d (along_depth: with a depth of counts[i]), and
 * a, b and d dense: splits[i] becomes 1 if the algorithm of te_gemm, from the heuristic or te_gemm_choose, splits the
 * reduction of an element, or cuBLASLt has none; 0 if each element has one accumulator, or nothing is multiplied.
 * Answers are cached by count, for lists of hundreds, until te_gemm_choose. On the CPU 0, as for te_gemm_takes_runs. */
TE_API te_status te_gemm_splits(const te_gemm_problem* problem, int along_depth, const int64_t* counts, int32_t number,
                                uint8_t* splits);

/* d[rows, cols] = the product of float32 matrices in CPU memory, in one of the layouts above (d += with accumulate,
 * which alone reads d): sgemm without alpha, whose leading dimensions are the pitches, in elements.
 *
 *   TN  a [cols, depth], b [rows, depth]
 *   NN  a [depth, cols], b [rows, depth]
 *   NT  a [depth, cols], b [depth, rows]
 *
 * No size is 0, d overlaps neither a nor b, and memory beyond d's columns must not be written. */
typedef void (*te_cpu_gemm_hook)(te_gemm_layout layout, int64_t rows, int64_t cols, int64_t depth, const float* a,
                                 int64_t a_pitch, const float* b, int64_t b_pitch, float* d, int64_t d_pitch,
                                 int accumulate);

/* Installs a product for the CPU; NULL restores the plain loop. Every later problem on the CPU that is not empty uses
 * it, from any thread, concurrently: operands of other dtypes, FP8 included, as dense float32 copies; epilogues (bias,
 * gelu, accumulation into a d of 16 bits, the rounding) are applied outside of it. te_gemm then repeats its bits as far
 * as the hook does. The hook must outlive every later te_gemm and the calls that have begun. A hook in C++ may throw:
 * the call fails with TE_RUNTIME_ERROR, and d is unspecified. transformer_engine.pytorch installs LibTorch's product on
 * import. */
TE_API void te_set_cpu_gemm(te_cpu_gemm_hook hook);

/* te_gemm by the plain loop, regardless of te_set_cpu_gemm. Each element of d is one chain of fused multiply-adds in
 * float32 in the order of the reduced dimension: its bits depend neither on threads nor on the other rows and columns.
 * The CPU alone: TE_INVALID_ARGUMENT for CUDA tensors. */
TE_API te_status te_gemm_by_loop(const te_gemm_problem* problem);

/* The properties of a problem that select its algorithm. Alignments: the largest power of two up to 16 that divides
 * address and pitch in bytes; 0, and a dtype of -1, for an absent tensor. Unused fields are 0. */
typedef struct te_gemm_key {
  int64_t rows; /* of d */
  int64_t cols; /* of d */
  int64_t depth;
  int64_t a_pitch;
  int64_t b_pitch;
  int64_t d_pitch;
  int64_t aux_pitch;
  int32_t layout;
  int32_t epilogue;
  int32_t accumulate;
  int32_t tf32;
  int32_t dtype; /* of a */
  int32_t b_dtype;
  int32_t d_dtype;
  int32_t bias_dtype;
  int32_t a_scaling;
  int32_t b_scaling;
  int32_t fast_accumulation;
  int32_t a_alignment;
  int32_t b_alignment;
  int32_t d_alignment;
  int32_t aux_alignment;
  int32_t device;
} te_gemm_key;

/* An algorithm in the bytes of cuBLASLt, valid for the same version on the same kind of GPU. */
typedef struct te_gemm_choice {
  uint64_t algorithm[8];
  uint64_t workspace_bytes;
} te_gemm_choice;

/* The key of a non-empty problem on CUDA; TE_INVALID_ARGUMENT for one on the CPU or an empty one. */
TE_API te_status te_gemm_key_of(const te_gemm_problem* problem, te_gemm_key* key);

/* Up to `most` algorithms of fixed reduction order for a key: first the default of te_gemm, then in the heuristic's
 * order. Measures nothing. */
TE_API te_status te_gemm_candidates(const te_gemm_key* key, int32_t most, te_gemm_choice* choices, int32_t* found);

/* From now on te_gemm uses choices[i] for problems of keys[i]; calls that have begun are not affected. All or none:
 * TE_INVALID_ARGUMENT, naming the first that cuBLASLt does not accept for its key, or whose reduction order varies. */
TE_API te_status te_gemm_choose(const te_gemm_key* keys, const te_gemm_choice* choices, int32_t count);

/* Discards all choices. */
TE_API te_status te_gemm_forget_choices(void);

/* Device addresses with the alignments of the key; bias aligned to its dtype; NULL for tensors that the key lacks. */
typedef struct te_gemm_operands {
  void* a;
  void* b;
  void* d;
  void* bias;
  void* aux;
  void* a_scale_inv;
  void* b_scale_inv;
} te_gemm_operands;

/* Runs the product of a key by `choice` `repeats` times, for measurements. */
TE_API te_status te_gemm_try(const te_gemm_key* key, const te_gemm_choice* choice, const te_gemm_operands* operands,
                             int32_t repeats, void* workspace, size_t workspace_bytes, te_stream stream);

/* cuBLASLt's version, e.g. 130100. */
TE_API te_status te_gemm_library_version(int64_t* version);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_GEMM_H_ */
