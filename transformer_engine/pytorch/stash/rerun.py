"""What a step starts with besides its inputs and parameters: random states, buffers. Kept to run it again."""

from __future__ import annotations

from functools import partial

import torch

from transformer_engine.pytorch.distributed.rng import trackers


def _seed_and_offset(device: int) -> tuple[int, int]:
    """All that a CUDA generator's state is: two numbers, where its get_state() makes a tensor of them."""
    generator = torch.cuda.default_generators[device]
    return generator.initial_seed(), generator.get_offset()


def _put_back(device: int, state: tuple[int, int]) -> None:
    seed, offset = state
    torch.cuda.default_generators[device].manual_seed(seed).set_offset(offset)


class Snapshot:
    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._random: list[tuple] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._taken = False

    def register(self, *modules: torch.nn.Module) -> None:
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"PagedStash.register: got a {type(module).__name__}, wanted modules.")
            self._modules.append(module)

    def take(self, device: torch.device) -> None:
        self._taken = True
        self._random = [(torch.set_rng_state, torch.get_rng_state())]
        if device.type == "cuda":
            self._random.append((partial(_put_back, device.index), _seed_and_offset(device.index)))
        self._random += [(tracker.set_states, tracker.get_states()) for tracker in trackers()]
        with torch.no_grad():
            self._buffers = [(b, b.detach().clone()) for module in self._modules for b in module.buffers()]

    def put_back(self) -> None:
        if not self._taken:
            raise RuntimeError("PagedStash.rerun: no step has started, wanted reset() before it.")
        for module in self._modules:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None and bool(parameter.grad.any()):
                    raise RuntimeError(
                        f"PagedStash.rerun: parameter {name!r} has a gradient that is not zero, wanted none: the "
                        "step would be added to what it gave before. Zero the gradients first; a step that adds to "
                        "those of steps before cannot be run again."
                    )
        for set_state, state in self._random:
            set_state(state)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
