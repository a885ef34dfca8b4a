// quantize list, CUDA path: launches the kernels of list.cuh.
#include "ops/quantize/list.cuh"

namespace te::quantize::list::cuda {

void run(const te_quantize_list_problem& list, te_stream stream) {
  const char* op = "te_quantize_list";
  if (list.count == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  dispatch_float(list.xs[0].dtype, op, "xs[0]", [&](auto t) {
    using T = decltype(t);
    Launch<T> launch{Source<T>(list.xs[0]), {}, {}, 0, 0, {}};
    const auto amaxes = [&](const Launch<T>& one, float* parts, uint32_t of_one, uint32_t blocks) {
      list_amax_kernel<T><<<blocks, kThreads, 0, on>>>(one, parts, of_one);
      check_launch(op);
    };
    for_launches(op, list, launch, amaxes, [&](const Launch<T>& one, uint32_t blocks) {
      list_kernel<T><<<blocks, kThreads, 0, on>>>(one);
      check_launch(op);
    });
  });
}

}  // namespace te::quantize::list::cuda
