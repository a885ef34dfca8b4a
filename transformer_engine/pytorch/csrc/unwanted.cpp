// Whose gradients the backward that runs is not asked for (torch.autograd.grad(), backward(inputs=)), as a node of C++
// asks by needs_input_grad(): for Python, whose flag of that name knows the forward alone.
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "common.h"

namespace te_torch {

namespace {

// Of leaves, by number; none outside of a backward, or in one that asks for all gradients.
std::vector<size_t> unwanted(const std::vector<Tensor>& leaves) {
  std::vector<size_t> found;
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) return found;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto node = torch::autograd::impl::try_get_grad_accumulator(leaves[i]);
    const auto entry = info->find(node.get());
    if (entry == info->end() || !entry->second.should_execute()) found.push_back(i);
  }
  return found;
}

}  // namespace

void register_unwanted(pybind11::module_& m) {
  m.def("unwanted", torch::wrap_pybind_function(unwanted), pybind11::arg("leaves"),
        "Numbers of the leaves whose gradients the backward that runs is not asked for.");
}

}  // namespace te_torch
