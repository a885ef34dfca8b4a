"""Quantization in one module: its plan, its calls under delayed scaling, its weights, and what clients see of it."""
