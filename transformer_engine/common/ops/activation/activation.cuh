// Declarations that the kernels of activation share: the exponential of the CUDA path. The formulas are in
// activation_math.h.
#pragma once

#include "ops/activation/activation_math.h"

namespace te::activation::cuda {

// expf for fp32 results; the hardware's exp2 and reciprocal (a few ulp of fp32) for results of 16 bits.
template <class T>
struct CudaExp {
  static __device__ __forceinline__ float exp(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    return __expf(x);
  }
  static __device__ __forceinline__ float reciprocal(float x) {
    if constexpr (sizeof(T) == 4) return __frcp_rn(x);
    return __fdividef(1.f, x);
  }
};

}  // namespace te::activation::cuda
