// activation fused with quantization to FP8, CUDA path, forward: the producer for the tile kernel of quantize. The
// value is rounded to its own dtype first, so that the bytes are those of the activation followed by a quantization,
// without its bf16 copy: 6.06 bytes an element of SwiGLU to 1x128 blocks in both directions.
#include "core/device.h"
#include "ops/activation/activation.cuh"
#include "ops/quantize/store.cuh"

namespace te::activation::cuda {

namespace {

using quantize::kColumns;
using quantize::Vector;

template <class Op, class T>
struct ForwardProducer {
  using Type = T;
  using Row = quantize::NoRow;
  static constexpr int kInputs = Op::kGated ? 2 : 1, kOutputs = 1, kAmaxOutputs = 1;
  static constexpr int kBatch = sizeof(T) == 4 ? 2 : 4, kBlocksPerSm = sizeof(T) == 4 ? 2 : 3;
  static constexpr bool kStaged = true;

  Params params;
  const T* x;
  int64_t row_pitch, cols;  // columns of y

  __device__ __forceinline__ const T* input(int k, int64_t row, int64_t col) const {
    return x + row * row_pitch + k * cols + col;
  }

  __device__ __forceinline__ int64_t pitch(int) const { return row_pitch; }

  __device__ __forceinline__ Row of(int64_t) const { return {}; }

  __device__ __forceinline__ void compute(const Vector<T> (&in)[kInputs], Row, int64_t, Vector<T> (&out)[1]) const {
    float a[kColumns], b[kColumns], y[kColumns];
    widen<T, kColumns>(in[0], a);
    if constexpr (Op::kGated) widen<T, kColumns>(in[1], b);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      y[i] = Op::template forward<CudaExp<T>>(a[i], Op::kGated ? b[i] : 0.f, params);
    }
    out[0] = narrow<T, kColumns>(y);
  }
};

// Calls f(producer, wide) with the producer of a kind and dtype.
template <class F>
void with_producer(const char* op, int kind, const Params& params, const te_tensor& x, int64_t cols, F&& f) {
  const bool aligned = aligned16(x), divides = cols % kColumns == 0;
  note_width(aligned, divides);
  dispatch(kind, [&](auto act) {
    dispatch_float(x.dtype, op, "x", [&](auto t) {
      using T = decltype(t);
      f(ForwardProducer<decltype(act), T>{params, static_cast<const T*>(x.data), x.row_pitch, cols},
        aligned && divides);
    });
  });
}

}  // namespace

void forward_quantize(int kind, const Params& params, const te_tensor& x, int64_t cols, const te_quantize_plan& plan,
                      const te_quantized& out, te_stream stream) {
  const char* op = "te_activation_forward_quantize";
  with_producer(op, kind, params, x, cols, [&](const auto& producer, bool wide) {
    const quantize::Dests<1> dests{{quantize::Dest(plan, out, x.rows, cols)}};
    quantize::launch_quantize(op, producer, dests, x.rows, cols, wide, stream);
  });
}

void forward_amax(int kind, const Params& params, const te_tensor& x, int64_t cols, const te_tensor& parts,
                  const te_tensor& noop, te_stream stream) {
  const char* op = "te_activation_forward_amax";
  with_producer(op, kind, params, x, cols, [&](const auto& producer, bool wide) {
    quantize::launch_amax(op, producer, x.rows, cols, wide, parts, noop, stream);
  });
}

}  // namespace te::activation::cuda
