// The nodes that add to .grad of leaves, for Python: whose gradients the backward that runs is not asked for, and
// leaves that get new nodes for a while.
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "accumulators.h"

namespace te_torch {

namespace {

namespace impl = torch::autograd::impl;

// A node belongs to the stream on which it was made, and a backward that is captured would make that stream wait.
class FreshAccumulators {
 public:
  explicit FreshAccumulators(std::vector<Tensor> leaves) : leaves_(std::move(leaves)) {}

  void enter() {
    TORCH_CHECK(nodes_.empty(), "FreshAccumulators: entered twice, wanted once at a time.");
    for (const auto& leaf : leaves_) {
      nodes_.push_back(impl::try_get_grad_accumulator(leaf));
      if (nodes_.back() != nullptr) impl::set_grad_accumulator(leaf, {});
    }
  }

  void exit(const pybind11::args&) {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i] != nullptr) impl::set_grad_accumulator(leaves_[i], nodes_[i]);
    }
    nodes_.clear();
  }

 private:
  std::vector<Tensor> leaves_;
  std::vector<std::shared_ptr<torch::autograd::Node>> nodes_;
};

}  // namespace

// torch.autograd.grad(), backward(inputs=), as a node of C++ asks by needs_input_grad(): Python's flag of that name
// knows the forward alone. Leaves by number; none outside of a backward, or in one that asks for all gradients.
std::vector<size_t> unwanted(const std::vector<Tensor>& leaves) {
  std::vector<size_t> found;
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) return found;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto node = impl::try_get_grad_accumulator(leaves[i]);
    const auto entry = info->find(node.get());
    if (entry == info->end() || !entry->second.should_execute()) found.push_back(i);
  }
  return found;
}

void register_accumulators(pybind11::module_& m) {
  m.def("unwanted", torch::wrap_pybind_function(unwanted), pybind11::arg("leaves"),
        "Numbers of the leaves whose gradients the backward that runs is not asked for.");
  pybind11::class_<FreshAccumulators>(
      m, "FreshAccumulators",
      "Inside of the context what adds to .grad of the leaves is made anew, on the stream of whoever uses them first; "
      "behind it they have again what they had, its hooks with it.")
      .def(pybind11::init<std::vector<Tensor>>(), pybind11::arg("leaves"))
      .def("__enter__", torch::wrap_pybind_function(&FreshAccumulators::enter))
      .def("__exit__", torch::wrap_pybind_function(&FreshAccumulators::exit));
}

}  // namespace te_torch
