// The table of attention's kernels.
#include "ops/attention_kernels.h"

#include "ops/attention_batch.h"
#include "ops/attention_chunked.h"
#include "ops/attention_flash.h"

namespace te_torch {

const AttentionKernel& attention_kernel(std::string_view name) {
  static constexpr AttentionKernel kKernels[] = {
      {"chunked", true, [](const AttentionCall&) {}, chunked_attention, chunked_attention_backward},
      {"flash", false, check_flash_attention, flash_attention, flash_attention_backward},
      {"flash_deterministic", false, check_flash_attention, flash_attention, deterministic_flash_attention_backward},
      {"cudnn", false, check_cudnn_attention, cudnn_attention, cudnn_attention_backward},
      {"efficient", false, check_efficient_attention, efficient_attention, efficient_attention_backward},
  };
  for (const AttentionKernel& kernel : kKernels) {
    if (kernel.name == name) return kernel;
  }
  TORCH_CHECK_VALUE(false, "attention: argument 'kernel' is '", name,
                    "', wanted 'chunked', 'flash', 'flash_deterministic', 'cudnn' or 'efficient'.");
}

}  // namespace te_torch
