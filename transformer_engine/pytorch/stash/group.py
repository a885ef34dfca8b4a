"""A group as a client of the saved door: what is saved inside of it and says how many of its rows are alive is its
own; everything else goes outward (csrc/stash_front.cpp, csrc/stash_members.h)."""

from __future__ import annotations

from transformer_engine.pytorch import _C

Group = _C.StashScope  # `with stash.group(name, counts):`, once
Stashed = _C.Stashed  # a storage that saved tensors of one group lie in
