// See accumulators.h; for Python also contexts in which leaves get new accumulation nodes.
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>

#include "autograd/accumulators.h"

namespace te_torch {

namespace {

namespace impl = torch::autograd::impl;
using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;

// A node belongs to the stream that it was created on, and a captured backward would make that stream wait.
class FreshAccumulators {
 public:
  explicit FreshAccumulators(std::vector<Tensor> leaves) : leaves_(std::move(leaves)) {}

  void enter() {
    TORCH_CHECK(nodes_.empty(), "FreshAccumulators: entered twice; leave the context before it is entered again.");
    for (const auto& leaf : leaves_) {
      nodes_.push_back(impl::try_get_grad_accumulator(leaf));
      if (nodes_.back() != nullptr) impl::set_grad_accumulator(leaf, WeakNodePtr(NodePtr()));
    }
  }

  void exit(const pybind11::args&) {
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i] != nullptr) impl::set_grad_accumulator(leaves_[i], WeakNodePtr(nodes_[i]));
    }
    nodes_.clear();
  }

 private:
  std::vector<Tensor> leaves_;
  std::vector<NodePtr> nodes_;
};

// Whether this is the node of a leaf, and the engine would do nothing but call it.
bool is_plain_leaf(const NodePtr& node, const c10::Stream& stream) {
  // Other users: another graph, another edge of this one, or DDP, which holds it for its hooks.
  if (node.use_count() != 1 || typeid(*node) != typeid(AccumulateGrad)) return false;
  return node->pre_hooks().empty() && node->post_hooks().empty() && node->tensor_pre_hooks().empty() &&
         node->tensor_post_acc_grad_hooks() == nullptr && node->input_metadata(0).stream() == stream;
}

// Whether the engine would have nothing to check or convert.
bool fits(const Tensor& gradient, const torch::autograd::InputMetadata& wanted) {
  return gradient.layout() == at::kStrided && takes_dtype(wanted, gradient.scalar_type()) &&
         gradient.device() == wanted.device() && !wanted.is_tensor_subclass() && !wanted.is_nested_tensor() &&
         wanted.is_same_shape(gradient);
}

// The lock under which a node adds to .grad.
struct Locked : torch::autograd::Node {
  static std::mutex& of(torch::autograd::Node& node) { return node.*(&Locked::mutex_); }
};

// The backward of this thread, by the address of a member: PyTorch returns that of no other part.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
torch::autograd::GraphTask* current_graph_task() {
  using torch::autograd::GraphTask;
  const auto* member = torch::autograd::get_current_graph_task_exec_info();
  if (member == nullptr) return nullptr;
  return reinterpret_cast<GraphTask*>(reinterpret_cast<uintptr_t>(member) - offsetof(GraphTask, exec_info_));
}
#pragma GCC diagnostic pop

// Makes the gradient the leaf's .grad if the leaf has none yet and nothing else holds the gradient; the node would make
// an alias of it. Returns whether it did.
bool set_as_grad(AccumulateGrad& node, Tensor& gradient) {
  const Tensor& leaf = node.variable;
  if (!leaf.requires_grad() || !leaf.is_leaf() || gradient.use_count() != 1 || gradient.requires_grad()) return false;
  if (gradient.is_inference() || !torch::autograd::utils::obeys_layout_contract(gradient, leaf)) return false;
  const std::lock_guard<std::mutex> lock(Locked::of(node));
  Tensor& grad = leaf.mutable_grad();
  if (grad.defined()) return false;
  gradient.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(false);  // as autograd does for a .grad
  grad = std::move(gradient);
  return true;
}

}  // namespace

bool all_leaves_wanted() {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  return exec_info == nullptr || exec_info->empty();
}

void accumulate_in_leaves(at::ArrayRef<Tensor*> gradients, std::vector<NodePtr>& leaf_nodes) {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  const bool all_wanted =
      exec_info != nullptr && exec_info->empty() && !torch::autograd::get_current_graph_task_keep_graph();
  const auto node = torch::autograd::get_current_node();
  if (!all_wanted || node == nullptr || !node->post_hooks().empty() || torch::autograd::AnomalyMode::is_enabled()) {
    return;
  }
  const c10::Stream stream = node->input_metadata(0).stream();
  TORCH_INTERNAL_ASSERT(gradients.size() == node->num_outputs());
  const bool profiled = at::hasCallbacks();  // a profiler shows each node that runs
  bool engine_has_one = false;
  for (size_t i = 0; i < gradients.size(); ++i) {
    torch::autograd::Edge& edge = node->next_edges()[i];
    if (!edge.is_valid() || !is_plain_leaf(edge.function, stream)) continue;
    if (gradients[i]->defined() && !fits(*gradients[i], edge.function->input_metadata(0))) continue;
    if (!std::exchange(engine_has_one, true)) continue;
    leaf_nodes.push_back(std::move(edge.function));
    if (!gradients[i]->defined()) continue;
    if (!profiled && set_as_grad(static_cast<AccumulateGrad&>(*leaf_nodes.back()), *gradients[i])) continue;
    variable_list one(1);
    one[0] = std::move(*gradients[i]);  // the only reference, so that it becomes .grad without a copy
    (*leaf_nodes.back())(std::move(one));
  }
}

bool is_last_edge(torch::autograd::Node& accumulator) {
  torch::autograd::GraphTask* task = current_graph_task();
  const auto node = torch::autograd::get_current_node();
  if (task == nullptr || node == nullptr) return false;
  torch::autograd::Node* const key = &accumulator;
  const auto& edges = node->next_edges();
  const auto leads_there = [&](const torch::autograd::Edge& edge) { return edge.function.get() == key; };
  if (std::none_of(edges.begin(), edges.end(), leads_there)) return false;
  if (!task->exec_info_.empty()) {
    const auto entry = task->exec_info_.find(key);
    if (entry == task->exec_info_.end() || !entry->second.needed_) return false;
  }
  const std::lock_guard<std::mutex> lock(task->mutex_);
  const auto edges_left = task->dependencies_.find(key);
  if (edges_left == task->dependencies_.end() || edges_left->second != 1) return false;
  const auto arrived = task->not_ready_.find(key);
  return arrived == task->not_ready_.end() || !arrived->second.buffer[0].defined();
}

Tensor take_grad(const Tensor& leaf) {
  const NodePtr node = impl::try_get_grad_accumulator(leaf);
  std::unique_lock<std::mutex> lock;
  if (node != nullptr) lock = std::unique_lock<std::mutex>(Locked::of(*node));
  return std::exchange(leaf.mutable_grad(), Tensor());
}

// The C++ counterpart is needs_input_grad(); Python's flag of that name is set in the forward alone.
std::vector<size_t> unwanted(const std::vector<Tensor>& leaves) {
  std::vector<size_t> found;
  if (all_leaves_wanted()) return found;
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto node = impl::try_get_grad_accumulator(leaves[i]);
    const auto entry = info->find(node.get());
    if (entry == info->end() || !entry->second.should_execute()) found.push_back(i);
  }
  return found;
}

void register_accumulators(pybind11::module_& m) {
  m.def("unwanted", torch::wrap_pybind_function(unwanted), pybind11::arg("leaves"),
        "Indices of the leaves whose gradients the running backward does not compute.");
  pybind11::class_<FreshAccumulators>(
      m, "FreshAccumulators",
      "Inside of the context the leaves get new accumulation nodes, on the stream of their first use. After it they "
      "have their old nodes with their hooks.")
      .def(pybind11::init<std::vector<Tensor>>(), pybind11::arg("leaves"))
      .def("__enter__", torch::wrap_pybind_function(&FreshAccumulators::enter))
      .def("__exit__", torch::wrap_pybind_function(&FreshAccumulators::exit));
}

}  // namespace te_torch
