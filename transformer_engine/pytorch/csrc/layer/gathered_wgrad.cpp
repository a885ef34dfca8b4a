// See gathered_wgrad.h.
#include "layer/gathered_wgrad.h"

namespace te_torch::layer {

const Quantizer* GatheredWgrad::quantizes_x() const {
  const ProductQuantization* q = quantization_.get();
  return q != nullptr && q->x.active() && !x_.quantized() ? &q->x : nullptr;
}

const Tensor& GatheredWgrad::incoming() const {
  return gradient_.dy.quantized() ? gradient_.dy.fp8.columnwise : gradient_.dy.plain;
}

void GatheredWgrad::begin(const DispatchMode& dispatch, ScopedBuffers& buffers) {
  if (!gather_x_) return;
  const bool quantized = backward_reads(quantization_.get()) == BackwardReads::kQuantized;
  x_arriving_ =
      tp_comm_->begin_gather_all(dispatch, Pass::kFprop, x_, quantized ? quantizes_x() : nullptr, incoming(), &buffers);
}

std::shared_ptr<WgradTask> GatheredWgrad::gathered(const DispatchMode& dispatch, ScopedBuffers& buffers) const {
  const ProductQuantization* q = quantization_.get();
  const Operand& dy = gradient_.dy;
  Operand x = x_;
  if (gather_x_) {
    const BackwardReads reads = backward_reads(q);
    const Quantizer* quantizer = reads == BackwardReads::kQuantized ? quantizes_x() : nullptr;
    const std::unique_ptr<GatherFuture> arriving = std::move(x_arriving_);
    x = arriving ? arriving->wait()
                 : tp_comm_->gather_all(dispatch, Pass::kFprop, x_, quantizer, nullptr, incoming(), &buffers);
    if (reads == BackwardReads::kDequantized && !x.quantized()) {  // as the forward has quantized it after the gather
      x = operand_of(dispatch, quantizes_x(), x.plain, kept_usage(q));
    }
  }
  Gradient gradient = gradient_;
  gradient.dy =
      tp_comm_->gather_all(dispatch, Pass::kDgrad, dy, quantizes_dy_ ? &q->dy : nullptr, arrived_, Tensor(), &buffers);
  return gemm_policy_->wgrad_task(dispatch, std::move(gradient), std::move(x), dtype_, q == nullptr || q->split_wgrad);
}

WeightGrads GatheredWgrad::compute(const DispatchMode& dispatch, bool with_bias) const {
  ScopedBuffers buffers;
  return gathered(dispatch, buffers)->compute(dispatch, with_bias);
}

std::vector<Tensor> GatheredWgrad::accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const {
  const Operand& dy = gradient_.dy;
  const Tensor& read = dy.quantized() ? dy.fp8.columnwise : dy.plain;
  const DispatchMode dispatch =
      must_dispatch({&read}) ? DispatchMode(Dispatched{}) : DispatchMode(Direct{});  // a traced gradient accumulator's
  ScopedBuffers buffers;
  return gathered(dispatch, buffers)->accumulate(targets, with_bias);
}

std::vector<Tensor> GatheredWgrad::reads() const {
  std::vector<Tensor> plain;
  for (const Operand* t : {&gradient_.dy, &x_}) {
    if (!t->quantized()) plain.push_back(t->plain);
  }
  return plain;
}

}  // namespace te_torch::layer
