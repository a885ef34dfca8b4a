// The product of a weight's gradient whose matrices are divided over ranks: it holds this rank's rows alone, and
// gathers the others' when it is computed, in backward_dw() too.
#pragma once

#include "layer/layer.h"

namespace te_torch::layer {

class GatheredProduct final : public WeightProduct {
 public:
  // gather_x: x has this rank's rows alone. behind: quantizes dy when all of it has arrived, or null.
  GatheredProduct(const Stage& stage, Gradient gradient, Operand x, const Quantizer* behind, bool gather_x,
                  at::ScalarType dtype)
      : exchange_(stage.exchange),
        products_(stage.products),
        quantization_(stage.quantization),
        gradient_(std::move(gradient)),
        x_(std::move(x)),
        behind_(behind != nullptr),
        gather_x_(gather_x),
        dtype_(dtype) {}

  // Lends a product the transfer of dy that the input's gradient was taken over, while that is there.
  class Loan {
   public:
    Loan(std::shared_ptr<GatheredProduct> product, const Transfer* arrived) : product_(std::move(product)) {
      product_->arrived_ = arrived;
    }
    ~Loan() { product_->arrived_ = nullptr; }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    std::shared_ptr<GatheredProduct> product_;
  };

  // Sets x's rows on their way, if that wins anything: for a product that is computed in this call, while `leases`
  // last.
  void begin(const Route& route, Leases& leases);

  WeightGrads compute(const Route& route, bool with_bias) const override;
  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override;
  std::vector<Tensor> reads() const override;
  at::ScalarType dtype() const override { return dtype_; }

 private:
  const Quantizer* quantizes_x() const;  // when all of it has arrived
  const Tensor& behind() const;
  // leases: of the call that computes it.
  std::shared_ptr<WeightProduct> gathered(const Route& route, Leases& leases) const;

  std::shared_ptr<const Exchange> exchange_;
  std::shared_ptr<const Products> products_;
  Quantization quantization_;
  Gradient gradient_;
  Operand x_;
  bool behind_, gather_x_;
  at::ScalarType dtype_;
  const Transfer* arrived_ = nullptr;
  mutable std::unique_ptr<Arriving> x_arriving_;
};

}  // namespace te_torch::layer
