// The nodes that add to .grad of leaves: which of them the running backward needs, and a fast path to them for nodes
// with hundreds of leaves.
#pragma once

#include "core/common.h"
#include "core/torch_api.h"

namespace te_torch {

// Indices of the leaves whose gradients the running backward of this thread does not compute (torch.autograd.grad(),
// backward(inputs=)). Empty outside of a backward, or in one for all gradients.
std::vector<size_t> unwanted(const std::vector<Tensor>& leaves);
bool all_leaves_wanted();  // whether unwanted() is empty for any leaves

// Whether the accumulator of a leaf waits for the node that runs now on this thread alone, and has no gradient yet: it
// runs after that node, with the node's gradient or none.
bool is_last_edge(torch::autograd::Node& accumulator);

// The .grad of a leaf, which is none from then on. A backward of another thread adds to it before that or after it.
Tensor take_grad(const Tensor& leaf);

// Called at the end of a node's backward with the gradients of its edges: runs the AccumulateGrad nodes of leaves at
// once and removes their edges, as autograd's engine takes longer for each node than the node itself.
// - Only where the result is the same: the graph is not retained, all gradients are needed, and the leaf has no hooks,
//   the same stream and no other user.
// - One leaf is left to the engine, which waits at the end for the streams of the nodes that it ran.
// - leaf_nodes gets the nodes that ran, also one that throws; they have to live as long as the graph.
void accumulate_in_leaves(at::ArrayRef<Tensor*> gradients, std::vector<NodePtr>& leaf_nodes);

}  // namespace te_torch
