// See saved_leaves.h.
#include "autograd/saved_leaves.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

namespace te_torch {

namespace {

thread_local KeepsLeaf keeps_leaf = nullptr;

bool is_plain_leaf(const at::Tensor& t) { return t.requires_grad() && t.is_leaf() && !t.is_inference(); }

}  // namespace

KeepsLeaf set_keeps_leaf(KeepsLeaf keeps) { return std::exchange(keeps_leaf, keeps); }

void SavedLeaves::take(std::vector<at::Tensor>& tensors) {
  const size_t hooks = at::SavedTensorDefaultHooks::get_tls_state().stack.size();
  if (hooks > 1 || (hooks == 1 && keeps_leaf == nullptr)) return;
  std::vector<at::Tensor> left;
  leaves_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    at::Tensor& t = tensors[i];
    if (is_plain_leaf(t) && (hooks == 0 || keeps_leaf(t))) {
      const uint32_t version = t.unsafeGetTensorImpl()->version_counter().current_version();
      leaves_.push_back({i, std::move(t), version});
    } else {
      left.push_back(std::move(t));
    }
  }
  tensors = std::move(left);
}

void SavedLeaves::give(const char* op, std::vector<at::Tensor>& tensors) const {
  TORCH_CHECK(!released_, op,
              ": a backward through this graph failed after this node, and a part of the graph was freed; run forward "
              "again.");
  if (leaves_.empty()) return;
  std::vector<at::Tensor> all(tensors.size() + leaves_.size());
  for (const Leaf& leaf : leaves_) {
    const uint32_t version = leaf.tensor.unsafeGetTensorImpl()->version_counter().current_version();
    TORCH_CHECK(version == leaf.version, op,
                ": one of the variables needed for gradient computation has been modified by an inplace operation: [",
                leaf.tensor.toString(), " ", leaf.tensor.sizes(), "] is at version ", version, "; expected version ",
                leaf.version, " instead. Write to parameters between a backward and the next forward.");
    all[leaf.index] = leaf.tensor;
  }
  auto next = all.begin();
  for (at::Tensor& t : tensors) {
    next = std::find_if(next, all.end(), [](const at::Tensor& place) { return !place.defined(); });
    *next++ = std::move(t);
  }
  tensors = std::move(all);
}

void SavedLeaves::end_with_graph() {
  if (leaves_.empty() || torch::autograd::get_current_graph_task_keep_graph()) return;
  leaves_.clear();
  released_ = true;
}

}  // namespace te_torch
