// See gathered_product.h.
#include "gathered_product.h"

namespace te_torch::layer {

std::shared_ptr<WeightProduct> GatheredProduct::gathered(const Route& route, Leases& leases) const {
  const ProductQuantization* q = quantization_.get();
  const Operand& dy = gradient_.dy;
  const Tensor& behind = dy.quantized() ? dy.fp8.columnwise : dy.plain;
  Operand x = x_;
  if (gather_x_) {
    const Quantizer* quantizer = q != nullptr && q->x.active() && !x_.quantized() ? &q->x : nullptr;
    const BackwardReads reads = backward_reads(q);
    x = exchange_->whole(route, Pass::kFprop, x_, reads == BackwardReads::kQuantized ? quantizer : nullptr, nullptr,
                         behind, &leases);
    if (reads == BackwardReads::kDequantized && !x.quantized()) {  // as the forward has, when all rows were there
      x = operand_of(route, quantizer, x.plain, kept_directions(q));
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
