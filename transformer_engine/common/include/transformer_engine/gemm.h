/* gemm: matrix products with epilogues, on cuBLASLt for CUDA tensors; on the CPU a plain loop, the oracle of the tests.
 *
 * Formula, row-major, with op() given by the layout (transpose letters of a, then of b, as in BLAS; the fprop, dgrad
 * and wgrad of a linear layer with weight [N, K], input [M, K], output [M, N]):
 *   TN  d[M, N] = b[M, K] a[N, K]^T     fprop: a = weight, b = input
 *   NN  d[M, K] = b[M, N] a[N, K]       dgrad: a = weight, b = output gradient
 *   NT  d[N, K] = b[M, N]^T a[M, K]     wgrad: a = input, b = output gradient
 *   accumulate: d += the product instead of d =.
 * Epilogues, applied in float32 before the one rounding; on CUDA cuBLASLt's own, which may round the product to a
 * 16-bit d's dtype first (seen with gelu, with accumulate, and with a bias at sizes that are no multiples of 8):
 *   BIAS       d += bias[cols of d], the same for every row
 *   GELU       aux = the product (with bias when one is given), d = gelu(aux), tanh form; aux is written, shaped like d
 *   DGELU      d = product * gelu'(aux); aux is read, shaped like d
 *   BGRAD      bias[rows of d] = sum over the rows of b; layout NT alone
 * Dtypes. a and b: float32, float16 or bfloat16, the same; d: theirs or float32; bias: the dtype of a or of d; aux:
 *   the dtype of d. Accumulation in float32; allow_tf32 lets float32 operands be cut to TF32 on CUDA.
 * Determinism. The heuristic's first algorithm whose reduction order is fixed, remembered per problem: the same call
 *   gives the same bits. Alignment enters as "16 bytes, or what the pointers and pitches have", so views and fresh
 *   tensors of one shape pick alike.
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
  te_tensor bias; /* data NULL where the epilogue has none */
  te_tensor aux;  /* data NULL where the epilogue has none */
  te_gemm_layout layout;
  te_gemm_epilogue epilogue;
  int accumulate;
  int allow_tf32;
} te_gemm_problem;

/* Bytes of device memory the chosen algorithm wants; 0 on the CPU. */
TE_API te_status te_gemm_workspace(const te_gemm_problem* problem, size_t* bytes);

/* workspace: at least te_gemm_workspace bytes on the problem's device, 256-byte aligned, free to use on the stream. */
TE_API te_status te_gemm(const te_gemm_problem* problem, void* workspace, size_t workspace_bytes, te_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TRANSFORMER_ENGINE_GEMM_H_ */
