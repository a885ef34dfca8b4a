// The sum of each token's rows as an epilogue: the gradient of a row is that of its token.
#include "layer/epilogue.h"
#include "ops/permute.h"

namespace te_torch::layer {

namespace {

constexpr SavedInfo kSummedRows{"token of each row", "the gradient of a row is that of its token",
                                "making it again from the routing", true, true};

class RowSum final : public Epilogue {
 public:
  EpilogueOutput forward(const DispatchMode& dispatch, const Tensor& y, const OwnTensors& tensors) const override {
    const OptionalTensor none;
    return {dispatch.call<unpermute_fwd>("te::unpermute_fwd", y, tensors[row_sum::kRowOfPair], false, none, none, none),
            {{row_sum::kTokenOfRow, tensors[row_sum::kTokenOfRow], &kSummedRows, true}}};
  }
  EpilogueBackward backward(const DispatchMode& dispatch, const Tensor& dy, const OwnTensors& saved,
                            OwnWanted) const override {
    return {dispatch.call<permute_gather_fwd>("te::permute_gather_fwd", dy, saved[row_sum::kTokenOfRow]), {}};
  }
};

}  // namespace

const std::shared_ptr<const Epilogue>& row_sum_epilogue() {
  static const std::shared_ptr<const Epilogue> epilogue = std::make_shared<RowSum>();
  return epilogue;
}

}  // namespace te_torch::layer
