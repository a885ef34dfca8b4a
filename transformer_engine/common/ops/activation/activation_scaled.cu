// activation with a scale for each row, CUDA path: launches the kernels of activation_scaled.cuh. Memory-bound: 6 bytes
// an element for a gated bf16 forward, 14 for its backward that recomputes the activation.
#include "core/device.h"
#include "ops/activation/activation.cuh"
#include "ops/activation/activation_scaled.cuh"
#include "ops/activation/activation_scaled.h"
#include "ops/quantize/store.cuh"

namespace te::activation::cuda {

namespace {

// Calls launch(Op{}, width, input, blocks) with the functor of `kind`, the columns of an access (16 bytes, or one where
// rows are not aligned), and the tensors by their types. aligned: of the other tensors.
template <class Launch>
void for_rows(const char* op, int kind, const ScaledRows& in, int64_t cols, bool aligned, Launch&& launch) {
  if (in.x.rows == 0) return;
  const int64_t blocks = (in.x.rows + kScaledRows - 1) / kScaledRows;
  if (blocks > INT32_MAX) throw Error(TE_NOT_IMPLEMENTED, concat(op, ": more than 2^34 rows in one call."));
  dispatch(kind, [&](auto act) {
    dispatch_float(in.x.dtype, op, "x", [&](auto t) {
      using T = decltype(t);
      const bool wide = aligned && aligned16(in.x), divides = cols % kVec<T> == 0;
      note_width(wide, divides);
      const auto go = [&](auto s, auto width) {
        using S = decltype(s);
        launch(act, width,
               ScaledInput<T, S>{static_cast<const T*>(in.x.data), in.x.row_pitch, static_cast<const S*>(in.scale.data),
                                 static_cast<const int32_t*>(in.live.data), in.x.rows, cols},
               dim3(static_cast<unsigned>(blocks)));
      };
      const auto with_scale = [&](auto s) {
        if (wide && divides) return go(s, std::integral_constant<int, kVec<T>>{});
        go(s, std::integral_constant<int, 1>{});
      };
      in.scale.dtype == in.x.dtype ? with_scale(t) : with_scale(float{});
    });
  });
  check_launch(op);
}

}  // namespace

void scaled_forward(int kind, const Params& params, const ScaledRows& in, const te_tensor& y, te_stream stream) {
  for_rows("te_activation_scaled_forward", kind, in, y.cols, aligned16(y),
           [&](auto act, auto width, auto input, dim3 blocks) {
             using T = typename decltype(input)::Value;
             scaled_forward_kernel<decltype(act), CudaExp<T>, width()>
                 <<<blocks, kScaledThreads, 0, cudaStream_t(stream)>>>(params, input, quantize::PlainStore<T>(y));
           });
}

void scaled_backward(int kind, const Params& params, const te_tensor& dy, const ScaledRows& in,
                     const ScaledResults& out, te_stream stream) {
  const bool aligned = aligned16(dy) && aligned16(out.dx) && aligned16(out.y);
  for_rows(
      "te_activation_scaled_backward", kind, in, dy.cols, aligned, [&](auto act, auto width, auto input, dim3 blocks) {
        using T = typename decltype(input)::Value;
        using S = typename decltype(input)::Scale;
        using Store = quantize::PlainStore<T>;
        scaled_backward_kernel<decltype(act), CudaExp<T>, width()><<<blocks, kScaledThreads, 0, cudaStream_t(stream)>>>(
            params, input, static_cast<const T*>(dy.data), dy.row_pitch, Store(out.dx),
            static_cast<S*>(out.dscale.data), Store(out.y));
      });
}

}  // namespace te::activation::cuda
