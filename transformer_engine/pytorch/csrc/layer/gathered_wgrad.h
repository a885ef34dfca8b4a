// A weight's gradient whose matrices are divided over ranks: the task holds this rank's rows, and gathers the rows of
// the other ranks when it is computed, which may be in backward_dw().
#pragma once

#include "layer/layer.h"

namespace te_torch::layer {

class GatheredWgrad final : public WgradTask {
 public:
  // gather_x: x has this rank's rows alone. after_gather: quantizes the gathered dy, or null.
  GatheredWgrad(const LayerConfig& config, Gradient gradient, Operand x, const Quantizer* after_gather, bool gather_x,
                at::ScalarType dtype)
      : tp_comm_(config.tp_comm),
        gemm_policy_(config.gemm_policy),
        quantization_(config.quantization),
        gradient_(std::move(gradient)),
        x_(std::move(x)),
        quantizes_dy_(after_gather != nullptr),
        gather_x_(gather_x),
        dtype_(dtype) {}

  // While it lives, the task can reuse the CommOp that has gathered dy for the input's gradient.
  class ReuseScope {
   public:
    ReuseScope(std::shared_ptr<GatheredWgrad> product, const CommOp* arrived) : product_(std::move(product)) {
      product_->arrived_ = arrived;
    }
    ~ReuseScope() { product_->arrived_ = nullptr; }
    ReuseScope(const ReuseScope&) = delete;
    ReuseScope& operator=(const ReuseScope&) = delete;

   private:
    std::shared_ptr<GatheredWgrad> product_;
  };

  // Starts to gather x's rows, if that saves time. The task must be computed in this call, before `buffers` ends.
  void begin(const DispatchMode& dispatch, ScopedBuffers& buffers);

  WeightGrads compute(const DispatchMode& dispatch, bool with_bias) const override;
  std::vector<Tensor> accumulate(at::ArrayRef<WeightTarget> targets, bool with_bias) const override;
  std::vector<Tensor> reads() const override;
  at::ScalarType dtype() const override { return dtype_; }

 private:
  const Quantizer* quantizes_x() const;  // after the gather
  const Tensor& incoming() const;
  // buffers: those of the call that computes the task.
  std::shared_ptr<WgradTask> gathered(const DispatchMode& dispatch, ScopedBuffers& buffers) const;

  std::shared_ptr<const TPComm> tp_comm_;
  std::shared_ptr<const GemmPolicy> gemm_policy_;
  Quantization quantization_;
  Gradient gradient_;
  Operand x_;
  bool quantizes_dy_, gather_x_;
  at::ScalarType dtype_;
  const CommOp* arrived_ = nullptr;
  mutable std::unique_ptr<GatherFuture> x_arriving_;
};

}  // namespace te_torch::layer
