// The bias as an epilogue. Most GEMMs add it themselves, and its gradient comes with the weight's then.
#include <ATen/TensorOperators.h>

#include "layer/epilogue.h"

namespace te_torch::layer {

namespace {

class Bias final : public Epilogue {
 public:
  bool fuses_into(const GemmPolicy& gemm) const override { return gemm.adds_bias(); }
  EpilogueOutput forward(const DispatchMode&, const Tensor& y, const OwnTensors& tensors) const override {
    const Tensor& bias = tensors[kBias];
    return {bias.defined() ? y + bias : y, {}};
  }
  EpilogueBackward backward(const DispatchMode&, const Tensor& dy, const OwnTensors&, OwnWanted wanted) const override {
    EpilogueBackward back{dy, {}};
    if (wanted[kBias]) back.gradients.emplace_back(kBias, column_sums(dy));
    return back;
  }
};

}  // namespace

const std::shared_ptr<const Epilogue>& bias_epilogue() {
  static const std::shared_ptr<const Epilogue> epilogue = std::make_shared<Bias>();
  return epilogue;
}

}  // namespace te_torch::layer
