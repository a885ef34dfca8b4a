// Leaves among the tensors that a node saves, in place of SavedVariables, for nodes with hundreds: a parameter is no
// part of its node's graph, so that nothing but its version has to be kept with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace te_torch {

class SavedLeaves {
 public:
  // Takes leaves out of what is to be saved, unless somebody's hooks are to see all that is. In the forward, once.
  void take(std::vector<at::Tensor>& tensors);
  // Puts them back where they were. Raises, as autograd does, where one was written to since.
  void give(std::vector<at::Tensor>& tensors) const;
  // In the backward: they go with autograd's own, unless the graph is kept.
  void end_with_graph();

 private:
  struct Leaf {
    size_t place;
    at::Tensor tensor;
    uint32_t version;
  };
  std::vector<Leaf> leaves_;
  bool gone_ = false;
};

}  // namespace te_torch
