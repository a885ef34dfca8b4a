"""The flag of captured weights: whether a replay quantizes them anew, and what the quantized ones were made from."""

import torch

from transformer_engine.pytorch.graph.memory.buffers import version_of


class WeightFlag:
    """On the device: not 0, the graphs of one capture take the quantized weights that they have. None of the modules'
    own flags, which may come and go."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.float32, device=device)
        self._first = True
        self._made: dict[int, int | None] = {}  # the version of each weight (by id) that they were made from

    def set(self, first: bool, weights: list[torch.nn.Parameter]) -> None:
        """Before a replay of a callable that has these weights; `first`: they are quantized anew."""
        if first:
            self.note(weights)
        if first is not self._first:
            self.tensor.fill_(0.0 if first else 1.0)
            self._first = first

    def note(self, weights: list[torch.nn.Parameter]) -> None:
        """They are quantized as they are now."""
        for p in weights:
            self._made[id(p)] = version_of(p)

    def made(self, weights: list[torch.nn.Parameter]) -> list[int | None]:
        """What the quantized ones that there are were made from."""
        return [self._made.get(id(p)) for p in weights]
