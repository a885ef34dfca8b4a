// The product of a weight's gradient whose matrices are divided over ranks: it holds this rank's rows alone, and
// gathers the others' when it is computed, in backward_dw() too.
#pragma once

#include "layer/layer.h"

namespace te_torch::layer {

class GatheredWgrad final : public WgradTask {
 public:
  // gather_x: x has this rank's rows alone. behind: quantizes dy when all of it has arrived, or null.
  GatheredWgrad(const LayerConfig& config, Gradient gradient, Operand x, const Quantizer* behind, bool gather_x,
                at::ScalarType dtype)
      : tp_comm_(config.tp_comm),
        gemm_policy_(config.gemm_policy),
        quantization_(config.quantization),
        gradient_(std::move(gradient)),
        x_(std::move(x)),
        behind_(behind != nullptr),
        gather_x_(gather_x),
        dtype_(dtype) {}

  // Lends a product the CommOp of dy that the input's gradient was taken over, while that is there.
  class Loan {
   public:
    Loan(std::shared_ptr<GatheredWgrad> product, const CommOp* arrived) : product_(std::move(product)) {
      product_->arrived_ = arrived;
    }
    ~Loan() { product_->arrived_ = nullptr; }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    std::shared_ptr<GatheredWgrad> product_;
  };

  // Sets x's rows on their way, if that wins anything: for a product that is computed in this call, while `buffers`
  // last.
  void begin(const DispatchMode& dispatch, ScopedBuffers& buffers);

  WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const override;
  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override;
  std::vector<Tensor> reads() const override;
  at::ScalarType dtype() const override { return dtype_; }

 private:
  const Quantizer* quantizes_x() const;  // when all of it has arrived
  const Tensor& behind() const;
  // buffers: of the call that computes it.
  std::shared_ptr<WgradTask> gathered(const DispatchMode& dispatch, ScopedBuffers& buffers) const;

  std::shared_ptr<const TPComm> tp_comm_;
  std::shared_ptr<const GemmPolicy> gemm_policy_;
  Quantization quantization_;
  Gradient gradient_;
  Operand x_;
  bool behind_, gather_x_;
  at::ScalarType dtype_;
  const CommOp* arrived_ = nullptr;
  mutable std::unique_ptr<GatherFuture> x_arriving_;
};

}  // namespace te_torch::layer
