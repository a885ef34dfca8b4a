// activation fused with quantization to FP8, CUDA path, backward: dx, and the recomputed activation if wanted. The
// three outputs of a gated kind are tiles of one read, staged in shared memory: together they do not fit into
// registers. If gate and up meet inside a block of 128 columns, dx's tiles are computed one by one, and y by the
// forward's kernel.
#include "core/device.h"
#include "ops/activation/activation.cuh"
#include "ops/quantize/store.cuh"

namespace te::activation::cuda {

void forward_quantize(int kind, const Params& params, const te_tensor& x, int64_t cols, const te_quantize_plan& plan,
                      const te_quantized& out, te_stream stream);

namespace {

using quantize::kColumns;
using quantize::Vector;

// Addresses of dy and x; columns count those of dy.
template <class Op, class T>
struct Operands {
  Params params;
  const T *dy, *x;
  int64_t dy_pitch, x_pitch, cols;

  Operands(const Params& params, const te_tensor& dy, const te_tensor& x)
      : params(params),
        dy(static_cast<const T*>(dy.data)),
        x(static_cast<const T*>(x.data)),
        dy_pitch(dy.row_pitch),
        x_pitch(x.row_pitch),
        cols(dy.cols) {}

  using Row = quantize::NoRow;
  static constexpr int kInputs = Op::kGated ? 3 : 2;

  __device__ __forceinline__ const T* input(int k, int64_t row, int64_t col) const {
    return k == 0 ? dy + row * dy_pitch + col : x + row * x_pitch + (k - 1) * cols + col;
  }

  __device__ __forceinline__ int64_t pitch(int k) const { return k == 0 ? dy_pitch : x_pitch; }

  __device__ __forceinline__ Row of(int64_t) const { return {}; }

  // Calls each(i, gradients) for 8 elements.
  template <class Each>
  __device__ __forceinline__ void for_gradients(const Vector<T> (&in)[kInputs], Each&& each) const {
    float g[kColumns], a[kColumns], b[kColumns];
    widen<T, kColumns>(in[0], g);
    widen<T, kColumns>(in[1], a);
    if constexpr (Op::kGated) widen<T, kColumns>(in[2], b);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      each(i, Op::template backward<CudaExp<T>>(g[i], a[i], Op::kGated ? b[i] : 0.f, params));
    }
  }
};

// da, db, y of a gated kind; dx, y of a plain one.
template <class Op, class T>
struct BackwardProducer : Operands<Op, T> {
  using Type = T;
  using Operands<Op, T>::Operands;
  using Operands<Op, T>::kInputs;
  using typename Operands<Op, T>::Row;
  static constexpr int kOutputs = Op::kGated ? 3 : 2, kAmaxOutputs = kOutputs - 1;
  static constexpr int kBatch = sizeof(T) == 4 ? 1 : 2, kBlocksPerSm = sizeof(T) == 4 ? 1 : 2;
  static constexpr bool kStaged = true;

  __device__ __forceinline__ void compute(const Vector<T> (&in)[kInputs], Row, int64_t,
                                          Vector<T> (&out)[kOutputs]) const {
    float da[kColumns], db[kColumns], y[kColumns];
    this->for_gradients(in, [&](int i, const Gradients& r) {
      da[i] = r.da;
      db[i] = r.db;
      y[i] = r.y;
    });
    out[0] = narrow<T, kColumns>(da);
    if constexpr (Op::kGated) out[1] = narrow<T, kColumns>(db);
    out[kOutputs - 1] = narrow<T, kColumns>(y);
  }
};

// dx of a gated kind in its own columns: da up to `cols`, then db.
template <class Op, class T>
struct MergedProducer : Operands<Op, T> {
  using Type = T;
  using Operands<Op, T>::Operands;
  using Operands<Op, T>::kInputs;
  using typename Operands<Op, T>::Row;
  static constexpr int kOutputs = 1, kAmaxOutputs = 1, kBatch = sizeof(T) == 4 ? 1 : 2, kBlocksPerSm = 2;
  static constexpr bool kStaged = true;

  __device__ __forceinline__ const T* input(int k, int64_t row, int64_t col) const {
    return Operands<Op, T>::input(k, row, col < this->cols ? col : col - this->cols);
  }

  __device__ __forceinline__ void compute(const Vector<T> (&in)[kInputs], Row, int64_t col, Vector<T> (&out)[1]) const {
    float dx[kColumns];
    this->for_gradients(in, [&](int i, const Gradients& r) { dx[i] = col + i < this->cols ? r.da : r.db; });
    out[0] = narrow<T, kColumns>(dx);
  }
};

bool is_wide(const te_tensor& dy, const te_tensor& x) {
  const bool aligned = aligned16(dy) && aligned16(x), divides = dy.cols % kColumns == 0;
  note_width(aligned, divides);
  return aligned && divides;
}

}  // namespace

void backward_quantize(int kind, const Params& params, const te_tensor& dy, const te_tensor& x,
                       const te_quantize_plan& dx_plan, const te_quantized& dx, const te_quantize_plan& y_plan,
                       const te_quantized& y, te_stream stream) {
  using quantize::Dest;
  const char* op = "te_activation_backward_quantize";
  const int64_t rows = dy.rows, cols = dy.cols;
  const bool wide = is_wide(dy, x);
  const bool emits = y.rowwise_scale_inv.data != nullptr || y.columnwise_scale_inv.data != nullptr;
  dispatch(kind, [&](auto act) {
    dispatch_float(x.dtype, op, "x", [&](auto t) {
      using Op = decltype(act);
      using T = decltype(t);
      if constexpr (!Op::kGated) {
        const quantize::Dests<2> dests{{Dest(dx_plan, dx, rows, cols), Dest(y_plan, y, rows, cols)}};
        quantize::launch_quantize(op, BackwardProducer<Op, T>(params, dy, x), dests, rows, cols, wide, stream);
      } else if (cols % quantize::kTile == 0) {
        const quantize::Dests<3> dests{{Dest(dx_plan, dx, rows, 2 * cols, 0, cols),
                                        Dest(dx_plan, dx, rows, 2 * cols, cols), Dest(y_plan, y, rows, cols)}};
        quantize::launch_quantize(op, BackwardProducer<Op, T>(params, dy, x), dests, rows, cols, wide, stream);
      } else {
        te_note_path("CUDA, separate kernels for dx and y", "gate and up meet inside a block of 128 columns");
        const quantize::Dests<1> dests{{Dest(dx_plan, dx, rows, 2 * cols)}};
        quantize::launch_quantize(op, MergedProducer<Op, T>(params, dy, x), dests, rows, 2 * cols, wide, stream);
      }
    });
  });
  const bool apart = 2 * dy.cols == x.cols && cols % quantize::kTile != 0;
  if (apart && emits) forward_quantize(kind, params, x, cols, y_plan, y, stream);
}

void backward_amax(int kind, const Params& params, const te_tensor& dy, const te_tensor& x, const te_tensor& parts,
                   const te_tensor& noop, te_stream stream) {
  const char* op = "te_activation_backward_amax";
  const bool wide = is_wide(dy, x);
  dispatch(kind, [&](auto act) {
    dispatch_float(x.dtype, op, "x", [&](auto t) {
      quantize::launch_amax(op, BackwardProducer<decltype(act), decltype(t)>(params, dy, x), dy.rows, dy.cols, wide,
                            parts, noop, stream);
    });
  });
}

}  // namespace te::activation::cuda
