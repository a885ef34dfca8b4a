"""What a replay writes to without torch's counting it: each counts that itself, for autograd. Writes nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.graph.capture.work import Work
from transformer_engine.pytorch.graph.describe import PLAIN
from transformer_engine.pytorch.graph.memory.buffers import version_of


def _held(module: object) -> list[torch.Tensor]:
    if not isinstance(module, torch.nn.Module):
        return []
    return [t for t in (*module.parameters(), *module.buffers()) if type(t) in PLAIN]


@contextmanager
def writes_noted(module: object, found: list[torch.Tensor]) -> Iterator[None]:
    """Around a capture: `found` gets the parameters and buffers that it writes to."""
    before = [(t, version_of(t)) for t in _held(module)]
    yield
    found += [t for t, version in before if version_of(t) != version]


def own_results(outputs: Sequence[torch.Tensor], work: Work) -> list[torch.Tensor]:
    """Of a forward's results those that it makes: that are no argument, parameter or buffer."""

    def address(t: torch.Tensor) -> int:
        return t.untyped_storage().data_ptr() if t.layout is torch.strided and not t.is_nested else 0

    theirs = {address(t) for t in (*work.inputs, *_held(work.module))} - {0}
    return [t for t in outputs if type(t) not in PLAIN or address(t) not in theirs]
