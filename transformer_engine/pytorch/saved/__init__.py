"""Saved-tensor hooks for what keeps, moves or counts saved tensors. A client derives StorageHandler (what it takes) and
PackedStorage (how that comes back); versions, views, shared storages, quantized tensors, marks, nesting and
observers are handled here. This package moves nothing itself."""

from transformer_engine.pytorch.saved.context import Hooks as Hooks
from transformer_engine.pytorch.saved.context import StorageHandler as StorageHandler
from transformer_engine.pytorch.saved.context import is_recorded as is_recorded
from transformer_engine.pytorch.saved.context import observed as observed
from transformer_engine.pytorch.saved.marks import mark_not_offload as mark_not_offload
from transformer_engine.pytorch.saved.rows import live_rows as live_rows
from transformer_engine.pytorch.saved.rows import mark_pageable as mark_pageable
from transformer_engine.pytorch.saved.standing import PackedStorage as PackedStorage
from transformer_engine.pytorch.saved.standing import Saved as Saved
from transformer_engine.pytorch.saved.standing import pop_saved as pop_saved
from transformer_engine.pytorch.saved.standing import unpack as unpack
