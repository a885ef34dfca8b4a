// activation fused with quantization to FP8, contract and CPU path (the specification): the activation into temporary
// memory, then te_quantize of it.
#include "core/device.h"
#include "core/tensor.h"
#include "ops/activation/activation.h"
#include "ops/quantize/store.h"
#include "transformer_engine/quantize.h"

namespace te::activation {

namespace cuda {
void forward_quantize(int kind, const Params& params, const te_tensor& x, int64_t cols, const te_quantize_plan& plan,
                      const te_quantized& out, te_stream stream);
void forward_amax(int kind, const Params& params, const te_tensor& x, int64_t cols, const te_tensor& parts,
                  const te_tensor& noop, te_stream stream);
void backward_quantize(int kind, const Params& params, const te_tensor& dy, const te_tensor& x,
                       const te_quantize_plan& dx_plan, const te_quantized& dx, const te_quantize_plan& y_plan,
                       const te_quantized& y, te_stream stream);
void backward_amax(int kind, const Params& params, const te_tensor& dy, const te_tensor& x, const te_tensor& parts,
                   const te_tensor& noop, te_stream stream);
}  // namespace cuda

namespace {

using quantize::cpu::Scratch;

constexpr te_tensor kAbsent{nullptr, 0, 0, 0, TE_FLOAT32, TE_DEVICE_CPU};
constexpr te_quantize_plan kNoPlan{kAbsent, kAbsent, kAbsent, kAbsent, kAbsent, 0, 0.f};
constexpr te_quantized kNothing{TE_SCALING_BLOCK_1D, kAbsent, kAbsent, kAbsent, kAbsent};

// Columns of y.
int64_t check_x(const char* op, int kind, const Params& params, const te_tensor& x) {
  check_kind(op, kind, params);
  check_tensor(op, "x", x);
  dispatch_float(x.dtype, op, "x", [](auto) {});
  if (!is_gated(kind)) return x.cols;
  if (x.cols % 2 != 0) bad_argument(op, "x", shape_of(x), "an even number of columns");
  return x.cols / 2;
}

void forward_on_cpu(int kind, const Params& params, const te_tensor& x, int64_t cols, const te_quantize_plan& plan,
                    const te_quantized& out) {
  const Scratch y(x.rows, cols, x);
  cpu::forward(kind, params, x, y.tensor());
  quantize::cpu::quantize(plan, y.tensor(), out);
}

void backward_on_cpu(int kind, const Params& params, const te_tensor& dy, const te_tensor& x,
                     const te_quantize_plan& dx_plan, const te_quantized& dx, const te_quantize_plan& y_plan,
                     const te_quantized& y) {
  const Scratch gradient(x.rows, x.cols, x), recomputed(dy.rows, dy.cols, x);
  cpu::backward(kind, params, dy, x, gradient.tensor(), recomputed.tensor());
  quantize::cpu::quantize(dx_plan, gradient.tensor(), dx);
  quantize::cpu::quantize(y_plan, recomputed.tensor(), y);
}

}  // namespace

}  // namespace te::activation

extern "C" {

te_status te_activation_forward_quantize(int kind, te_activation_params params, te_tensor x,
                                         const te_quantize_plan* plan, const te_quantized* out, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_forward_quantize";
    const int64_t cols = activation::check_x(op, kind, params, x);
    quantize::check_quantization(op, *plan, x.rows, cols, x, *out, "out");
    TE_ON_DEVICE_OF(op, x, activation::forward_on_cpu(kind, params, x, cols, *plan, *out),
                    activation::cuda::forward_quantize(kind, params, x, cols, *plan, *out, stream));
  });
}

te_status te_activation_backward_quantize(int kind, te_activation_params params, te_tensor dy, te_tensor x,
                                          const te_quantize_plan* dx_plan, const te_quantized* dx,
                                          const te_quantize_plan* y_plan, const te_quantized* y, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_backward_quantize";
    const int64_t cols = activation::check_x(op, kind, params, x);
    check_as(op, "dy", dy, x.rows, cols, x);
    const bool emits = y != nullptr && y_plan != nullptr;
    const te_quantize_plan& recomputed_plan = emits ? *y_plan : activation::kNoPlan;
    const te_quantized& recomputed = emits ? *y : activation::kNothing;
    quantize::check_quantization(op, *dx_plan, x.rows, x.cols, x, *dx, "dx");
    quantize::check_quantization(op, recomputed_plan, x.rows, cols, x, recomputed, "y");
    TE_ON_DEVICE_OF(
        op, x, activation::backward_on_cpu(kind, params, dy, x, *dx_plan, *dx, recomputed_plan, recomputed),
        activation::cuda::backward_quantize(kind, params, dy, x, *dx_plan, *dx, recomputed_plan, recomputed, stream));
  });
}

te_status te_activation_forward_amax(int kind, te_activation_params params, te_tensor x, te_tensor parts,
                                     te_tensor noop, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_forward_amax";
    const int64_t cols = activation::check_x(op, kind, params, x);
    quantize::check_amax_parts(op, parts, noop, x);
    const auto on_cpu = [&] {
      const activation::Scratch y(x.rows, cols, x);
      activation::cpu::forward(kind, params, x, y.tensor());
      quantize::cpu::amax(y.tensor(), parts, noop);
    };
    TE_ON_DEVICE_OF(op, x, on_cpu(), activation::cuda::forward_amax(kind, params, x, cols, parts, noop, stream));
  });
}

te_status te_activation_backward_amax(int kind, te_activation_params params, te_tensor dy, te_tensor x, te_tensor parts,
                                      te_tensor noop, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_activation_backward_amax";
    const int64_t cols = activation::check_x(op, kind, params, x);
    check_as(op, "dy", dy, x.rows, cols, x);
    quantize::check_amax_parts(op, parts, noop, x);
    const auto on_cpu = [&] {
      const activation::Scratch dx(x.rows, x.cols, x);
      activation::cpu::backward(kind, params, dy, x, dx.tensor(), activation::kAbsent);
      quantize::cpu::amax(dx.tensor(), parts, noop);
    };
    TE_ON_DEVICE_OF(op, x, on_cpu(), activation::cuda::backward_amax(kind, params, dy, x, parts, noop, stream));
  });
}

}  // extern "C"
