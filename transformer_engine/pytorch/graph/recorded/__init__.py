"""The results of a capture that replays read: graphs, their static tensors, flags and quantization."""
