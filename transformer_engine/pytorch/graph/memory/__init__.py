"""The memory of graphs: static tensors, gradients lent from it, and passes that overwrite each other there."""
