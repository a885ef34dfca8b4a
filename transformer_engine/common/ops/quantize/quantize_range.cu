// quantize, ranges of matrices, CUDA path: launches the kernels of range.cuh, for one matrix and for lists.
#include "ops/quantize/range.cuh"

namespace te::quantize::cuda {

namespace {

// Calls body(dtype) for each dtype that sources may have.
template <class Body>
void for_floats(Body&& body) {
  for (const te_dtype dtype : {TE_FLOAT32, TE_BFLOAT16, TE_FLOAT16}) body(dtype);
}

template <int kMost>
void launch_amaxes(const char* op, te_dtype from, const Items<RangeAmaxes, kMost>& items, uint32_t blocks, bool raises,
                   te_stream stream) {
  dispatch_float(from, op, "range.x", [&](auto t) {
    range_amax_kernel<decltype(t), kMost><<<blocks, kThreads, 0, cudaStream_t(stream)>>>(items, raises);
  });
  check_launch(op);
}

template <int kMost>
void launch_casts(const char* op, te_dtype from, te_dtype to, const Items<RangeCast, kMost>& items, uint32_t blocks,
                  te_stream stream) {
  dispatch_float(from, op, "range.x", [&](auto t) {
    using T = decltype(t);
    const auto kernel = to == TE_FLOAT8_E5M2 ? range_cast_kernel<T, true, kMost> : range_cast_kernel<T, false, kMost>;
    kernel<<<blocks, kThreads, 0, cudaStream_t(stream)>>>(items);
  });
  check_launch(op);
}

}  // namespace

void range_amax(const te_quantize_range& range, te_scaling scaling, const te_tensor& amaxes, te_stream stream) {
  const char* op = "te_quantize_range_amax";
  const RangeAmaxes one = amaxes_of(range, scaling, amaxes);
  if (one.tensor) check_cuda(cudaMemsetAsync(one.amaxes, 0, sizeof(float), cudaStream_t(stream)), op);
  if (tiles_of(range) == 0) return;
  launch_amaxes<1>(op, range.x.dtype, {1, {0}, {one}}, grid_of(op, tiles_of(range)), false, stream);
}

void range_cast(const te_quantize_range& range, const te_quantize_range_plan& plan, const te_tensor& data,
                const te_tensor& scale_inv, te_stream stream) {
  const char* op = "te_quantize_range_cast";
  if (!writes(range, plan)) return;
  const uint32_t blocks = grid_of(op, tiles_of(range));
  launch_casts<1>(op, range.x.dtype, data.dtype, {1, {0}, {cast_of(range, plan, data, scale_inv)}}, blocks, stream);
}

void range_list_amaxes(const te_quantize_range_list_problem& list, te_stream stream) {
  const char* op = "te_quantize_range_list_amaxes";
  for_floats([&](te_dtype from) {
    for_amaxes(op, list, from, [&](const Items<RangeAmaxes, kMostItems>& items, uint32_t blocks) {
      launch_amaxes(op, from, items, blocks, true, stream);
    });
  });
}

void range_list_cast(const te_quantize_range_list_problem& list, te_stream stream) {
  const char* op = "te_quantize_range_list_cast";
  for_floats([&](te_dtype from) {
    for (const te_dtype to : {TE_FLOAT8_E4M3, TE_FLOAT8_E5M2}) {
      for_casts(op, list, from, to, [&](const Items<RangeCast, kMostItems>& items, uint32_t blocks) {
        launch_casts(op, from, to, items, blocks, stream);
      });
    }
  });
}

}  // namespace te::quantize::cuda
