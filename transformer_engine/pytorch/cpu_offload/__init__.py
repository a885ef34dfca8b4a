"""Offloads saved activations to pinned host memory, layer by layer, on separate streams.

- Gradients keep their bits.
- Weights and optimizer states are not offloaded.
"""

from transformer_engine.pytorch.cpu_offload.context import OffloadContext as OffloadContext
from transformer_engine.pytorch.cpu_offload.context import get_cpu_offload_context as get_cpu_offload_context
from transformer_engine.pytorch.cpu_offload.context import mark_activation_offload as mark_activation_offload
from transformer_engine.pytorch.cpu_offload.context import start_offload as start_offload
from transformer_engine.pytorch.cpu_offload.layer import OffloadableLayerState as OffloadableLayerState
from transformer_engine.pytorch.cpu_offload.layer import PinnedMemoryError as PinnedMemoryError
from transformer_engine.pytorch.cpu_offload.schedule import DefaultOffloadSynchronizer as DefaultOffloadSynchronizer
from transformer_engine.pytorch.cpu_offload.schedule import ManualOffloadSynchronizer as ManualOffloadSynchronizer
from transformer_engine.pytorch.saved.marks import mark_not_offload as mark_not_offload
from transformer_engine.pytorch.saved.offload_scope import is_cpu_offload_enabled as is_cpu_offload_enabled
