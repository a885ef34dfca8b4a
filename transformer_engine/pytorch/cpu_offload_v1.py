"""The names of cpu_offload at the place where older clients look for them: the same objects, one path."""

from transformer_engine.pytorch.cpu_offload import DefaultOffloadSynchronizer as DefaultOffloadSynchronizer
from transformer_engine.pytorch.cpu_offload import ManualOffloadSynchronizer as ManualOffloadSynchronizer
from transformer_engine.pytorch.cpu_offload import OffloadableLayerState as OffloadableLayerState
from transformer_engine.pytorch.cpu_offload import OffloadContext as OffloadContext
from transformer_engine.pytorch.cpu_offload import PinnedMemoryError as PinnedMemoryError
from transformer_engine.pytorch.cpu_offload import get_cpu_offload_context as get_cpu_offload_context
from transformer_engine.pytorch.cpu_offload import is_cpu_offload_enabled as is_cpu_offload_enabled
from transformer_engine.pytorch.cpu_offload import mark_activation_offload as mark_activation_offload
from transformer_engine.pytorch.cpu_offload import mark_not_offload as mark_not_offload
from transformer_engine.pytorch.cpu_offload import start_offload as start_offload
