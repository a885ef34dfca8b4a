"""What a capture leaves for replays: the graphs of each pass, their static tensors, flags and quantization."""
