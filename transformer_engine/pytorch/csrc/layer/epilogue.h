// An epilogue runs after the GEMM of a layer: it changes the result by tensors of its own, for example adds a bias or
// another tensor. A layer has a list of epilogues; the GEMM itself computes those at its head that fuse into it.
#pragma once

#include "layer/gemm_policy.h"
#include "layer/named_arguments.h"

namespace te_torch::layer {

struct EpilogueOutput {
  Tensor y;
  OwnSaves saves;
};

struct EpilogueBackward {
  Tensor dy;  // of the y that forward() was given
  OwnGradients gradients;
};

class TE_EXPORT Epilogue {
 public:
  Epilogue() = default;
  virtual ~Epilogue() = default;
  Epilogue(const Epilogue&) = delete;
  Epilogue& operator=(const Epilogue&) = delete;

  // Whether the GEMM computes it, or the TPComm after its sum over ranks: forward() and backward() do not run then.
  virtual bool fuses_into(const GemmPolicy& gemm) const { return false; }
  virtual EpilogueOutput forward(const DispatchMode& dispatch, const Tensor& y, const OwnTensors& tensors) const = 0;
  virtual EpilogueBackward backward(const DispatchMode& dispatch, const Tensor& dy, const OwnTensors& saved,
                                    OwnWanted wanted) const = 0;
};

using Epilogues = c10::SmallVector<std::shared_ptr<const Epilogue>, 1>;

// Adds the tensor named kBias, if there is one.
TE_EXPORT const std::shared_ptr<const Epilogue>& bias_epilogue();

// Sums the rows of each token, by the map of prologue.h's rows_prologue().
namespace row_sum {
enum Own : int { kTokenOfRow = kBias + 1, kRowOfPair };
}
TE_EXPORT const std::shared_ptr<const Epilogue>& row_sum_epilogue();

}  // namespace te_torch::layer
