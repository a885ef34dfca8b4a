"""The paged stash: what layers keep for backward, packed by its live rows into pages of one pool. docs/stash.md."""

from transformer_engine.pytorch.stash.handle import Handle as Handle
from transformer_engine.pytorch.stash.manager import PagedStash as PagedStash
from transformer_engine.pytorch.stash.plan import Plan as Plan
from transformer_engine.pytorch.stash.verdict import Verdict as Verdict
