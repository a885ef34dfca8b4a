// Saves the leaves of a node without SavedVariables, for nodes with hundreds of leaves: a parameter belongs to no
// graph, so that its version is all that has to be saved with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace te_torch {

// Whether saved-tensor hooks of this library would keep a leaf as it is. set_keeps_leaf: those of this thread's only
// hooks, null: none; returns the previous one.
using KeepsLeaf = bool (*)(const at::Tensor&);
KeepsLeaf set_keeps_leaf(KeepsLeaf keeps);

class SavedLeaves {
 public:
  // Moves leaves out of the tensors to save, but not those that saved-tensor hooks have to see. Called once, in the
  // forward.
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
