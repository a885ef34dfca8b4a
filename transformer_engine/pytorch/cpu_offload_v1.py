"""The names of cpu_offload.py at the place where older clients look for them."""

from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context as get_cpu_offload_context
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled as is_cpu_offload_enabled
