"""Quantization in one module: its plan, its calls under delayed scaling, its weights, and its attributes for
clients."""
