// The nodes that add to .grad of leaves: which of them the backward that runs is to reach, and a short way to them for
// nodes with hundreds.
#pragma once

#include "core/common.h"
#include "core/torch_api.h"

namespace te_torch {

// Numbers of the leaves whose gradients the backward that runs on this thread does not bring (torch.autograd.grad(),
// backward(inputs=)); none outside of a backward, or in one that asks for all gradients.
std::vector<size_t> unwanted(const std::vector<Tensor>& leaves);
bool asks_for_all();  // that backward, or none: unwanted() has nothing of any

// At the end of a node's backward, of the gradients of its edges: what belongs to leaves is added to .grad at once, by
// the nodes that do so in any case, and the engine, which takes longer for each of them than they do, is told of no
// gradient and no edge. So wherever nobody would mind: the graph is not kept, all gradients are asked for, a leaf has
// no hooks, the same stream, and no user but this node, whose next_functions are gone behind it. One leaf is the
// engine's, which waits for the streams of those that it knows. through: gets the nodes that are through, one that
// throws as well; they have to live as long as the graph.
void give_to_leaves(at::ArrayRef<Tensor*> gradients, std::vector<NodePtr>& through);

}  // namespace te_torch
