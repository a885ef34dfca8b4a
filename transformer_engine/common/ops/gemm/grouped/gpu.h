// The Gpu of launches.h on CUDA: what a launch needs of the device, and the kernels, each instantiated by a .cu file.
#pragma once

#include "core/tensor.h"
#include "ops/gemm/grouped/params.h"
#include "ops/gemm/grouped/params_fp8.h"

namespace te::gemm::grouped::cuda {

struct Gpu {
  int32_t device;
  te_stream stream;
  te_dtype operands;
  te_scaling scaling;

  int32_t sms() const;
  bool wide(const te_tensor& t) const;  // whether its rows begin on 16 bytes
  CUtensorMap map(const te_tensor& t, int box_rows) const;
  CUtensorMap result_map(const te_tensor& t) const;

  // Launches the kernel of Traits, on a stream that may be capturing (start.cuh).
  template <class Traits, class Params>
  void start(const Params& params, int32_t ctas) const;
  void rows_fp8(const Fp8RowParams& params, int32_t ctas) const;
  void wgrad_fp8(const Fp8WgradParams& params, int32_t ctas) const;
  void staged_rows_fp8(const StagedFp8RowParams& params, int32_t ctas) const;
  void staged_wgrad_fp8(const StagedFp8WgradParams& params, int32_t ctas) const;
};

}  // namespace te::gemm::grouped::cuda
