"""A place for the debugging tools for PyTorch: only their switch, which is off."""
