// See gathered_product.h.
#include "layer/gathered_product.h"

namespace te_torch::layer {

const Quantizer* GatheredProduct::quantizes_x() const {
  const ProductQuantization* q = quantization_.get();
  return q != nullptr && q->x.active() && !x_.quantized() ? &q->x : nullptr;
}

const Tensor& GatheredProduct::behind() const {
  return gradient_.dy.quantized() ? gradient_.dy.fp8.columnwise : gradient_.dy.plain;
}

void GatheredProduct::begin(const Route& route, Leases& leases) {
  if (!gather_x_) return;
  const bool quantized = backward_reads(quantization_.get()) == BackwardReads::kQuantized;
  x_arriving_ = exchange_->begin_whole(route, Pass::kFprop, x_, quantized ? quantizes_x() : nullptr, behind(), &leases);
}

std::shared_ptr<WeightProduct> GatheredProduct::gathered(const Route& route, Leases& leases) const {
  const ProductQuantization* q = quantization_.get();
  const Operand& dy = gradient_.dy;
  Operand x = x_;
  if (gather_x_) {
    const BackwardReads reads = backward_reads(q);
    const Quantizer* quantizer = reads == BackwardReads::kQuantized ? quantizes_x() : nullptr;
    const std::unique_ptr<Arriving> arriving = std::move(x_arriving_);
    x = arriving ? arriving->wait() : exchange_->whole(route, Pass::kFprop, x_, quantizer, nullptr, behind(), &leases);
    if (reads == BackwardReads::kDequantized && !x.quantized()) {  // as the forward has, when all rows were there
      x = operand_of(route, quantizes_x(), x.plain, kept_directions(q));
    }
  }
  Gradient gradient = gradient_;
  gradient.dy = exchange_->whole(route, Pass::kDgrad, dy, behind_ ? &q->dy : nullptr, arrived_, Tensor(), &leases);
  return products_->weight_product(route, std::move(gradient), std::move(x), dtype_, q == nullptr || q->split_wgrad);
}

WeightGrads GatheredProduct::compute(const Route& route, bool with_bias) const {
  Leases leases;
  return gathered(route, leases)->compute(route, with_bias);
}

std::vector<Tensor> GatheredProduct::accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const {
  const Operand& dy = gradient_.dy;
  const Tensor& read = dy.quantized() ? dy.fp8.columnwise : dy.plain;
  const Route route = must_dispatch({&read}) ? Route(Dispatched{}) : Route(Direct{});  // a traced sink's
  Leases leases;
  return gathered(route, leases)->accumulate(targets, with_bias);
}

std::vector<Tensor> GatheredProduct::reads() const {
  std::vector<Tensor> plain;
  for (const Operand* t : {&gradient_.dy, &x_}) {
    if (!t->quantized()) plain.push_back(t->plain);
  }
  return plain;
}

}  // namespace te_torch::layer
