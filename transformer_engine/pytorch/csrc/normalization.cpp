// normalization, binding: the room has not been bound yet, and says so.
#include "normalization.h"

namespace te_torch {

std::tuple<Tensor, Tensor, Tensor, Tensor> normalization_fwd(const Tensor&, const OptionalTensor&, const Tensor&,
                                                             const OptionalTensor&, double, bool, bool) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "normalization: not available in this build.");
}

std::tuple<Tensor, Tensor, Tensor> normalization_bwd(const Tensor&, const OptionalTensor&, const Tensor&,
                                                     const Tensor&, const Tensor&, const Tensor&, bool, bool) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "normalization: not available in this build.");
}

}  // namespace te_torch
