"""Saved-tensor hooks for features that store, move or count saved tensors: cpu_offload, the stash, te.memory_plan.

- A feature derives StorageHandler, which chooses storages, and PackedStorage, which restores one.
- Versions, views, shared storages, quantized tensors, marks, nesting and observers are handled here.
- This package moves no memory itself.
"""

from transformer_engine.pytorch.saved.marks import live_rows as live_rows
from transformer_engine.pytorch.saved.marks import mark_not_offload as mark_not_offload
from transformer_engine.pytorch.saved.marks import mark_pageable as mark_pageable
from transformer_engine.pytorch.saved.saved_tensor_hooks import Hooks as Hooks
from transformer_engine.pytorch.saved.saved_tensor_hooks import PackedStorage as PackedStorage
from transformer_engine.pytorch.saved.saved_tensor_hooks import Saved as Saved
from transformer_engine.pytorch.saved.saved_tensor_hooks import StorageHandler as StorageHandler
from transformer_engine.pytorch.saved.saved_tensor_hooks import is_recorded as is_recorded
from transformer_engine.pytorch.saved.saved_tensor_hooks import observed as observed
from transformer_engine.pytorch.saved.saved_tensor_hooks import pop_saved as pop_saved
from transformer_engine.pytorch.saved.saved_tensor_hooks import unpack as unpack
