"""Backends that capture and replay: CUDA graphs, and recorded eager work on a machine without CUDA."""
