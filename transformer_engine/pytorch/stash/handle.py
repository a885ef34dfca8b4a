"""What one group stashed, from its store to its way back (csrc/stash_handle.h). States: kept (nothing was copied),
stored (its copy is under way or done, the originals are there), away, coming (its copy back is under way), back,
gone."""

from __future__ import annotations

from transformer_engine.pytorch import _C

Handle = _C.StashHandle
