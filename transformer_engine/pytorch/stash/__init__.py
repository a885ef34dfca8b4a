"""The paged stash: what layers keep for backward, packed by its live rows into pages of one pool (guide/stash.md)."""

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash.manager import PagedStash as PagedStash
from transformer_engine.pytorch.stash.plan import Plan as Plan
from transformer_engine.pytorch.stash.verdict import Verdict as Verdict

Handle = _C.StashHandle  # one stashed group
