// stash, CUDA path: comes with the next change.
