"""Memory of graphs: static tensors, gradients that alias them, and microbatches that overwrite each other's memory."""
