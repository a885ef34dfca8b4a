// Saves the leaves of a node without SavedVariables, for nodes with hundreds of leaves: a parameter belongs to no
// graph, so that its version is all that has to be saved with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace te_torch {

class SavedLeaves {
 public:
  // Moves leaves out of the tensors to save, unless saved-tensor hooks are active. Called once, in the forward.
  void take(std::vector<at::Tensor>& tensors);
  // Puts them back. Raises, as autograd does, where one was modified in place since. op: in the error.
  void give(const char* op, std::vector<at::Tensor>& tensors) const;
  // Called in the backward: releases them as autograd does with its own, unless the graph is retained.
  void end_with_graph();

 private:
  struct Leaf {
    size_t index;
    at::Tensor tensor;
    uint32_t version;
  };
  std::vector<Leaf> leaves_;
  bool released_ = false;
};

}  // namespace te_torch
