"""Puts back what a probing run of a module moves: its buffers, the random states, the gradients and their hooks, and
what its modules know about quantization. It copies no parameters: a forward that writes into them is not undone."""

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
    """Buffers, scales and random states, those of the trackers too, are as before behind the block, exceptions
    included; an autocast around it learns nothing of what ran, and no step of a stash has a part in it."""
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
    """The same tensors with the same bytes, in place: who holds a view of one sees nothing either. Their versions are
    put back too, so that a graph that the caller has not run backward through yet still may."""
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
    """The whole storage, under a version of its own; elements that a view has twice are copied once."""
    if t.layout is not torch.strided:
        return t.data
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


@contextmanager
def _quantization_restored(module: torch.nn.Module) -> Iterator[None]:
    """Scales and histories in their memory, which views and graphs know, and kept weights: inside, none is written to.
    No region is told of what runs: its end and its backward would make scales of it."""
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
    """A backward inside reaches neither the .grad of the leaves nor the hooks on them."""
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
