"""State that a step starts with besides its inputs and parameters: random states, buffers, scales of delayed scaling.
rerun() restores all of it; a step whose gate is up gets its scales back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import foreach_copy_
from transformer_engine.pytorch.distributed.rng import trackers_of
from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.quantization.delayed import ScalingState


class StepScales:
    """Scales and histories of delayed scaling as they were when the step started, in memory that stays, so that they
    can be restored on the device, in a captured step too. A state made since then started with scales of 1 and an
    empty history."""

    def __init__(self) -> None:
        self._saved: list[torch.Tensor] = []
        self._values: torch.Tensor | None = None  # of all saved tensors, concatenated

    @torch.no_grad()
    def save(self, states: Sequence[ScalingState]) -> None:
        tensors = _tensors(states)
        if not tensors:
            self._saved, self._values = [], None
        elif self._values is None or not _same_tensors(tensors, self._saved):
            self._saved, self._values = tensors, _concatenated(tensors)
        else:
            torch.cat([t.view(-1) for t in tensors], out=self._values)

    @torch.no_grad()
    def restore(self, states: Sequence[ScalingState], bad: torch.Tensor) -> None:
        """bad: a bool on the states' device; where it is False, the present values stay."""
        tensors = _tensors(states)
        if not tensors:
            return
        now, before = _concatenated(tensors), self._values_before(tensors)
        values = torch.where(bad, before, now).split([t.numel() for t in tensors])
        foreach_copy_(tensors, [v.view_as(t) for v, t in zip(values, tensors, strict=True)])
        for state in states:
            state.changed()

    def _values_before(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        if _same_tensors(tensors, self._saved):
            return self._values
        saved = {}
        if self._values is not None:
            parts = self._values.split([t.numel() for t in self._saved])
            saved = {id(t): part for t, part in zip(self._saved, parts, strict=True)}
        fresh = [torch.ones_like(t) if t.dim() == 1 else torch.zeros_like(t) for t in tensors]
        return torch.cat([saved.get(id(t), new.view(-1)) for t, new in zip(tensors, fresh, strict=True)])


def _tensors(states: Sequence[ScalingState]) -> list[torch.Tensor]:
    return [t for state in states for t in (state.scale, state.amax_history)]


def _same_tensors(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _concatenated(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.view(-1) for t in tensors])


def _seed_and_offset(device: int) -> tuple[int, int]:
    """The whole state of a CUDA generator as two numbers, without the tensor that get_state() makes."""
    generator = torch.cuda.default_generators[device]
    return generator.initial_seed(), generator.get_offset()


def _set_seed_and_offset(device: int, state: tuple[int, int]) -> None:
    seed, offset = state
    torch.cuda.default_generators[device].manual_seed(seed).set_offset(offset)


class Snapshot:
    """An eager reset() saves the state of the host; every reset(), also a replayed one, saves the state of the device,
    in memory that stays."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._random: list[tuple] = []
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._runtimes: list = []  # of modules of this library
        self._runtime_states: list = []
        self._scales = StepScales()
        self._replayed: torch.Tensor | None = None  # on the device: whether the step's reset() was a captured one
        self._saved = False

    def register(self, *modules: torch.nn.Module) -> None:
        for module in modules:
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"PagedStash.register: got a {type(module).__name__}, wanted a torch.nn.Module.")
            self._modules.append(module)

    def save(self, device: torch.device, captured: bool) -> None:
        if captured and self._replayed is None:
            self._replayed = torch.zeros((), device=device)
        if self._replayed is not None:
            self._replayed.fill_(float(captured))
        if not captured:
            self._saved = True
            default = torch.default_generator
            self._random = [(partial(_C.set_random_state, default), _C.get_random_state(default))]
            if device.type == "cuda":
                self._random.append((partial(_set_seed_and_offset, device.index), _seed_and_offset(device.index)))
            self._random += [(tracker.set_states, tracker.get_states()) for tracker in trackers_of(self._modules)]
            parts = {id(part): part for module in self._modules for part in our_modules(module)}.values()
            self._runtimes = [part.runtime for part in parts]
            self._runtime_states = [part.runtime.snapshot(part, values=False) for part in parts]
        if self._modules:
            self._save_buffers()
            self._scales.save(self._states(device))

    @torch.no_grad()
    def _save_buffers(self) -> None:
        buffers = [b for module in self._modules for b in module.buffers()]
        if len(self._buffers) == len(buffers) and all(
            a is b and a.shape == c.shape for a, (b, c) in zip(buffers, self._buffers)
        ):
            for buffer, copy in self._buffers:
                copy.copy_(buffer)
        else:
            self._buffers = [(b, b.detach().clone()) for b in buffers]

    def _states(self, device: torch.device) -> list[ScalingState]:
        found = [s for runtime in self._runtimes for s in runtime.quantization.scaling_states()]
        return [s for s in found if s.scale.device == device]

    def restore_scales(self, gate: torch.Tensor, join: Callable[[], None] | None) -> None:
        """Restores the scales of the step's start where the gate is up, without waiting for the device. join: called
        before the gate is read."""
        states = self._states(gate.device)
        if states:
            if join is not None:
                join()
            self._scales.restore(states, gate != 0)

    def restore(self, device: torch.device) -> None:
        if not self._saved:
            raise RuntimeError("PagedStash.rerun: no step has started; call reset() first.")
        for module in self._modules:
            for name, parameter in module.named_parameters():
                if parameter.grad is not None and bool(parameter.grad.any()):
                    raise RuntimeError(
                        f"PagedStash.rerun: parameter {name!r} has a gradient that is not zero, wanted zero "
                        "or None: the rerun would add to the gradients of the first run. Zero the gradients first; a "
                        "step that accumulates onto earlier steps cannot be rerun."
                    )
        if self._replayed is None or not bool(self._replayed):  # else the host's state is of an earlier step
            for set_state, state in self._random:
                set_state(state)
            for runtime, state in zip(self._runtimes, self._runtime_states, strict=True):
                runtime.restore(state)
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
        self._scales.restore(self._states(device), torch.ones((), dtype=torch.bool, device=device))
