"""Steps of a stack of MoE blocks under one optimizer, eager or as one CUDA graph, with a stash or without."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.stash import PagedStash

from .blocks import Config, MoEStack


@dataclass
class Result:
    """Results of a step, as copies."""

    loss: torch.Tensor
    grads: list[torch.Tensor]

    def equals(self, other: Result) -> bool:
        """Bit for bit, NaN as well."""
        pairs = zip([self.loss, *self.grads], [other.loss, *other.grads], strict=True)
        return all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


def batch(config: Config, device: torch.device, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and target of a step, determined by its number."""
    how = {"generator": torch.Generator(device).manual_seed(number), "dtype": torch.bfloat16, "device": device}
    x, target = (torch.randn(config.tokens, config.hidden, **how) for _ in range(2))
    return x, target


class Run:
    """A stack with the same first weights as every other one of this config."""

    def __init__(self, config: Config, device: torch.device, stash: PagedStash | None = None, around=None) -> None:
        torch.manual_seed(0)
        self.config, self.device, self.stash, self.around = config, device, stash, around
        self.model = MoEStack(config, device, stash)
        # FusedAdam takes a gate on CUDA; torch's own fused optimizer does anywhere.
        self.optimizer = (
            FusedAdam(self.model.parameters(), lr=1e-3, capturable=True, master_weights=True)
            if device.type == "cuda"
            else torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        )
        self.loss = torch.zeros((), device=device)
        self.gradients_stay = False  # kept from step to step, so a step's peak has no gradients that its backward makes
        self._static: tuple[torch.Tensor, torch.Tensor] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        if stash is not None:
            stash.register(self.model)

    def compute(self, x: torch.Tensor, target: torch.Tensor) -> None:
        """Forward and backward, into new or existing gradients; the loss stays in its static tensor."""
        self.model.zero_grad(set_to_none=not self.gradients_stay)
        y = self.model(x, self.around)
        loss = torch.nn.functional.mse_loss(y.float(), target.float())
        loss.backward()
        self.loss.copy_(loss.detach())

    def update(self) -> None:
        """The optimizer's step; the gate of a bad step makes it change nothing."""
        if self.stash is not None:
            self.optimizer.found_inf = self.stash.gate()
        self.optimizer.step()

    def step(self, x: torch.Tensor, target: torch.Tensor) -> None:
        if self.stash is not None:
            self.stash.reset()
        self.compute(x, target)
        self.update()

    def __call__(self, number: int, skew: str) -> Result:
        """One step on the batch of that number."""
        self.model.skew(skew)
        x, target = batch(self.config, self.device, number)
        if self._graph is None:
            self.step(x, target)
        else:
            for static, new in zip(self._static, (x, target), strict=True):
                static.copy_(new)
            self._graph.replay()
        return self.result()

    def result(self) -> Result:
        return Result(self.loss.clone(), [p.grad.clone() for p in self.model.parameters()])

    def capture(self) -> None:
        """Later calls replay one graph of the whole step: reset, forward, backward, gate, optimizer. Eager steps must
        have made the pool and the optimizer's states before; nothing is computed here."""
        self._graph = None
        self._static = batch(self.config, self.device, 0)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(*self._static)
        self._graph = graph

    def state(self) -> list[torch.Tensor]:
        """Copies of everything that a step changes: weights, masters, moments, counts of steps."""
        kept = [value for state in self.optimizer.state.values() for value in state.values()]
        return [t.detach().clone() for t in [*self.model.parameters(), *kept] if isinstance(t, torch.Tensor)]
