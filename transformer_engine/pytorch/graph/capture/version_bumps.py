"""Finds the tensors whose version counters a replay has to increment: a graph writes them without a version bump."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.graph.capture.static_callable import StaticCallable
from transformer_engine.pytorch.graph.describe import PLAIN_TENSORS
from transformer_engine.pytorch.graph.memory.buffers import version_of


def _module_tensors(module: object) -> list[torch.Tensor]:
    if not isinstance(module, torch.nn.Module):
        return []
    return [t for t in (*module.parameters(), *module.buffers()) if type(t) in PLAIN_TENSORS]


@contextmanager
def record_mutations(module: object, found: list[torch.Tensor]) -> Iterator[None]:
    """Around a capture: adds the parameters and buffers that it writes to `found`."""
    before = [(t, version_of(t)) for t in _module_tensors(module)]
    yield
    found += [t for t, version in before if version_of(t) != version]


def new_outputs(outputs: Sequence[torch.Tensor], func: StaticCallable) -> list[torch.Tensor]:
    """The results that a forward makes, without those in the memory of an argument, a parameter or a buffer."""

    def address(t: torch.Tensor) -> int:
        return t.untyped_storage().data_ptr() if t.layout is torch.strided and not t.is_nested else 0

    existing = {address(t) for t in (*func.inputs, *_module_tensors(func.module))} - {0}
    return [t for t in outputs if type(t) not in PLAIN_TENSORS or address(t) not in existing]
