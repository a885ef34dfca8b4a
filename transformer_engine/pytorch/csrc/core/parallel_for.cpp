// Lends PyTorch's thread pool to the engine, so that nothing oversubscribes. A file of its own, since it alone is
// compiled for OpenMP.
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
