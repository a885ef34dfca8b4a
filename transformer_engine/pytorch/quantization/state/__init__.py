"""The quantization contexts in force: the contexts that set them, and the manager that clients call."""
