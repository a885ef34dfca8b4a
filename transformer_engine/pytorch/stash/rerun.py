"""What a step starts with besides its inputs and parameters: random states, buffers, scales of delayed scaling. Kept to
run it again, and to take back what a step leaves behind whose gate is up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.rng import trackers_of
from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.quantization.delayed import ScalingState
from transformer_engine.pytorch.stash.scales import StepScales


def _seed_and_offset(device: int) -> tuple[int, int]:
    """All that a CUDA generator's state is: two numbers, where its get_state() makes a tensor of them."""
    generator = torch.cuda.default_generators[device]
    return generator.initial_seed(), generator.get_offset()


def _put_back(device: int, state: tuple[int, int]) -> None:
    seed, offset = state
    torch.cuda.default_generators[device].manual_seed(seed).set_offset(offset)


class Snapshot:
    """Of the host's part an eager reset() takes one, and of the device's part every reset(), a replayed one too: its
    copies are memory that stays."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._random: list[tuple] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ours: list = []  # runtimes of modules of this library
        self._known: list = []  # what they knew
        self._scales = StepScales()
        self._replayed: torch.Tensor | None = None  # on the device: the step's reset() was a captured one
        self._taken = False

    def register(self, *modules: torch.nn.Module) -> None:
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"PagedStash.register: got a {type(module).__name__}, wanted modules.")
            self._modules.append(module)

    @torch.no_grad()
    def take(self, device: torch.device, captured: bool) -> None:
        if captured and self._replayed is None:
            self._replayed = torch.zeros((), device=device)
        if self._replayed is not None:
            self._replayed.fill_(float(captured))
        if not captured:
            self._taken = True
            default = torch.default_generator
            self._random = [(partial(_C.set_random_state, default), _C.get_random_state(default))]
            if device.type == "cuda":
                self._random.append((partial(_put_back, device.index), _seed_and_offset(device.index)))
            self._random += [(tracker.set_states, tracker.get_states()) for tracker in trackers_of(self._modules)]
            parts = {id(part): part for module in self._modules for part in our_modules(module)}.values()
            self._ours = [part.runtime for part in parts]
            self._known = [part.runtime.snapshot(part, values=False) for part in parts]
        self._note_buffers()
        self._scales.note(self._states(device))

    def _note_buffers(self) -> None:
        buffers = [b for module in self._modules for b in module.buffers()]
        known = [b for b, _ in self._buffers]
        if len(known) == len(buffers) and all(
            a is b and a.shape == c.shape for a, (b, c) in zip(buffers, self._buffers)
        ):
            for buffer, copy in self._buffers:
                copy.copy_(buffer)
        else:
            self._buffers = [(b, b.detach().clone()) for b in buffers]

    def _states(self, device: torch.device) -> list[ScalingState]:
        found = [s for runtime in self._ours for s in runtime.quantization.scaling_states()]
        return [s for s in found if s.scale.device == device]

    def settle(self, gate: torch.Tensor, behind: Callable[[], None] | None) -> None:
        """Where the gate is up, the scales are as they were when the step started; the host waits for nothing. behind:
        called before the gate is read."""
        states = self._states(gate.device)
        if states:
            if behind is not None:
                behind()
            self._scales.put_back(states, gate != 0)

    def put_back(self, device: torch.device) -> None:
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
        if self._replayed is None or not bool(self._replayed):  # else the host's part is an older step's
            for set_state, state in self._random:
                set_state(state)
            for runtime, known in zip(self._ours, self._known, strict=True):
                runtime.restore(known)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
        self._scales.put_back(self._states(device), torch.ones((), dtype=torch.bool, device=device))
