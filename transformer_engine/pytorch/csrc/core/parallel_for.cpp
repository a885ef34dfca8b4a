// Registers PyTorch's thread pool with the engine, so that the process has one pool. This file alone is compiled for
// OpenMP.
#include <ATen/Parallel.h>
#include <transformer_engine/transformer_engine.h>

namespace te_torch {

namespace {

void parallel_hook(int64_t n_blocks, void (*body)(void*, int64_t), void* context) {
  at::parallel_for(0, n_blocks, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) body(context, block);
  });
}

[[maybe_unused]] const bool hook_installed = (te_set_parallel_for(parallel_hook), true);

}  // namespace

}  // namespace te_torch
