"""The place of debugging tools for PyTorch: their switch alone, which is off."""
