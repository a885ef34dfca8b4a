// The nodes that add to .grad of leaves: which of them the backward that runs is to reach.
#pragma once

#include "common.h"

namespace te_torch {

// Numbers of the leaves whose gradients the backward that runs on this thread does not bring (torch.autograd.grad(),
// backward(inputs=)); none outside of a backward, or in one that asks for all gradients.
std::vector<size_t> unwanted(const std::vector<Tensor>& leaves);

}  // namespace te_torch
