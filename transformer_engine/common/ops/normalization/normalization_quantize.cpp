// normalization with its output in FP8, contract and CPU path: y is computed as elsewhere and quantized by
// ops/quantize.
#include "core/device.h"
#include "core/tensor.h"
#include "ops/normalization/tensors.h"
#include "ops/quantize/store.h"
#include "transformer_engine/quantize.h"

namespace te::normalization::cpu {

namespace {

void quantize_known(const Plan& plan, const KnownTensors& t, const te_quantize_plan& quantization,
                    const te_quantized& out, bool with_amax) {
  const te::quantize::cpu::Scratch y(t.h.rows, t.h.cols, t.h);
  forward_known(plan, t, y.tensor());
  if (with_amax) te::quantize::cpu::amax(y.tensor(), quantization.amax_parts, te_tensor{});
  te::quantize::cpu::quantize(quantization, y.tensor(), out);
}

void forward_quantize(const Plan& plan, const ForwardTensors& t, const te_quantize_plan& quantization,
                      const te_quantized& out) {
  forward(plan, t);
  quantize_known(plan, KnownTensors(t), quantization, out, quantization.amax_parts.data != nullptr);
}

}  // namespace

}  // namespace te::normalization::cpu

extern "C" {

te_status te_normalization_quantize(te_normalization_plan plan, te_tensor h, te_tensor mean, te_tensor rstd,
                                    te_tensor gamma, te_tensor beta, const te_quantize_plan* quantize,
                                    const te_quantized* out, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_normalization_quantize";
    const normalization::KnownTensors t{h, mean, rstd, gamma, beta};
    normalization::check_known(op, plan, t);
    quantize::check_quantization(op, *quantize, h.rows, h.cols, h, *out, "out");
    TE_ON_DEVICE_OF(op, h, normalization::cpu::quantize_known(plan, t, *quantize, *out, false),
                    normalization::cuda::quantize(plan, t, *quantize, *out, stream));
  });
}

size_t te_normalization_forward_quantize_workspace(int64_t rows) {
  return rows <= 0 ? 0 : size_t(te::normalization::bands_of(rows) + 2) * sizeof(uint32_t);
}

te_status te_normalization_forward_quantize(te_normalization_plan plan, te_tensor x, te_tensor residual,
                                            te_tensor gamma, te_tensor beta, te_tensor residual_out, te_tensor mean,
                                            te_tensor rstd, const te_quantize_plan* quantize, const te_quantized* out,
                                            te_tensor workspace, te_stream stream) {
  return te::c_guard([&] {
    using namespace te;
    const char* op = "te_normalization_forward_quantize";
    const te_tensor none{nullptr, 0, 0, 0, x.dtype, x.device};
    const normalization::ForwardTensors t{x, residual, gamma, beta, none, residual_out, mean, rstd};
    normalization::check_forward(op, plan, t);
    normalization::check_known(op, plan, normalization::KnownTensors(t));
    quantize::check_quantization(op, *quantize, x.rows, x.cols, x, *out, "out");
    if (quantize->amax_parts.data != nullptr) quantize::check_amax_parts(op, quantize->amax_parts, te_tensor{}, x);
    normalization::check_bytes(op, workspace, x, int64_t(te_normalization_forward_quantize_workspace(x.rows)));
    TE_ON_DEVICE_OF(op, x, normalization::cpu::forward_quantize(plan, t, *quantize, *out),
                    normalization::cuda::forward_quantize(plan, t, *quantize, *out, workspace, stream));
  });
}

}  // extern "C"
