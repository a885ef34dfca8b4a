"""Restores what a probing run of a module changes: buffers, random states, gradients with their hooks, and the
quantization state of modules.

- Parameters are not copied: a forward that writes to them is not undone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import unsafe_preserve_version_counter
from transformer_engine.pytorch.distributed.rng import Snapshot, trackers_of
from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


@contextmanager
def state_restored(module: torch.nn.Module) -> Iterator[None]:
    """Buffers, scales and random states, including those of trackers, are restored after the block, also after an
    exception. The run does not affect an autocast around it or a step of a stash."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with ExitStack() as stack:
        stack.callback(Snapshot(devices=devices).restore)
        for tracker in trackers_of([module]):
            stack.callback(tracker.set_states, tracker.get_states())
        _C.set_stash_probe(True)
        stack.callback(_C.set_stash_probe, False)
        stack.enter_context(_buffers_restored(module))
        stack.enter_context(_quantization_restored(module))
        yield


@contextmanager
def _buffers_restored(module: torch.nn.Module) -> Iterator[None]:
    """Restores the same tensors in place with the same bytes, so that views of them are restored too, and their
    versions, so that the caller can still run a backward through an earlier graph."""
    tables = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    buffers = [b for _, before in tables for b in before.values() if b is not None and b.device.type != "meta"]
    copies = [(alias, alias.clone()) for alias in {_key(b): _alias(b) for b in buffers}.values()]
    versioned = tuple(b for b in buffers if not b.is_inference())
    try:
        with unsafe_preserve_version_counter(versioned):
            yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)
        for alias, copy in copies:
            alias.copy_(copy)


def _key(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def _alias(t: torch.Tensor) -> torch.Tensor:
    """The whole storage, with a version counter of its own; elements that a view repeats are copied once."""
    if t.layout is not torch.strided:
        return t.data
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


@contextmanager
def _quantization_restored(module: torch.nn.Module) -> Iterator[None]:
    """Restores scales and histories in their memory, which views and graphs read, and cached weights. No region records
    the run: otherwise its end and its backward would update scales from it."""
    parts, state = our_modules(module), current_state()
    before = [(part.runtime, part.runtime.snapshot(part)) for part in parts]
    for runtime, _ in before:
        runtime.weights_anew()
    region, state.region = state.region, None
    try:
        yield
    finally:
        state.region = region
        for runtime, snapshot in before:
            runtime.restore(snapshot)


@contextmanager
def gradients_restored(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """A backward inside changes no .grad of the leaves and runs no hooks on them."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    tables = [t for leaf, _ in before for t in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if t]
    hooks = [(table, dict(table)) for table in tables]
    try:
        for leaf, _ in before:
            leaf.grad = None
        for table, _ in hooks:
            table.clear()
        yield
    finally:
        for leaf, grad in before:
            leaf.grad = grad
        for table, entries in hooks:
            table.update(entries)
