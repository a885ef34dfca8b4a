// quantize, transposes of bytes, CUDA path: launches the kernel of transpose.cuh, for one matrix and for lists.
#include "ops/quantize/transpose.cuh"

namespace te::quantize::cuda {

void transpose(const te_tensor& rowwise, const te_tensor& columnwise, te_stream stream) {
  const char* op = "te_quantize_transpose";
  const int64_t tiles = tiles_of(columnwise);
  if (tiles == 0) return;
  const Items<Transpose, 1> items{1, {0}, {transpose_of(rowwise, columnwise, te_tensor{}, te_tensor{})}};
  transpose_kernel<1><<<grid_of(op, tiles), kThreads, 0, cudaStream_t(stream)>>>(items);
  check_launch(op);
}

void transpose_list(const te_quantize_transpose_list_problem& list, te_stream stream) {
  const char* op = "te_quantize_transpose_list";
  for_transposes(op, list, [&](const Items<Transpose, kMostItems>& items, uint32_t blocks) {
    transpose_kernel<kMostItems><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(items);
    check_launch(op);
  });
}

}  // namespace te::quantize::cuda
