"""A group as a client of the saved door: what is saved inside of it and says how many of its rows are alive is its
own; everything else goes outward (csrc/stash_members.h). When that leaves and comes back is the manager's."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.saved import is_recorded
from transformer_engine.pytorch.stash.handle import Handle
from transformer_engine.pytorch.stash.step import Stash, Step

Stashed = _C.Stashed  # a storage that saved tensors of one group lie in


class Group:
    """`with stash.group(name, counts):`, once."""

    __slots__ = ("_hooks", "_members", "_open", "_step", "handle", "name", "stash", "tail")

    def __init__(self, stash: Stash, name: Hashable, counts: torch.Tensor | None, tail: str) -> None:
        self.stash, self.name, self.tail = stash, name, tail
        self.handle: Handle | None = None
        self._step: Step | None = None  # in which it was entered
        self._members = _C.StashMembers(name, counts, stash.device)
        self._hooks = _C.SavedHooks(self._members)
        self._open = False

    def __enter__(self) -> Group:
        if self.handle is not None:
            raise RuntimeError(f"PagedStash: group {self.name!r} was entered before; call stash.group() again.")
        if is_recorded():
            self._step = self.stash.step
            self.handle = self._step.open(self.name, self.tail)
            self._members.open(self.handle)
            try:
                self._hooks.push()  # refused where torch takes no hooks
            except BaseException:
                self._members.close()
                self._step.exit(self.handle, True)
                raise
            self._open = True
        return self

    def __exit__(self, *raised: object) -> None:
        if not self._open:
            return
        self._hooks.pop()
        self._open = False
        self._members.close()
        self._step.exit(self.handle, raised[0] is not None)
