"""Chooses the static inputs of a capture: the tensors of a sample, or copies if their memory is in use."""

from collections.abc import Iterable

import torch

from transformer_engine.pytorch.graph.capture.order import FORWARD
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.describe import PLAIN_TENSORS
from transformer_engine.pytorch.graph.memory.buffers import BufferPool


def static_inputs(plan: CapturePlan, others: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """One list for each sample: its own tensors, or with reuse_buffers those of microbatches that are complete by then.

    - A tensor in the memory of another sample, of this capture or an earlier one (`others`), is copied: otherwise the
      second call would overwrite what the backward of the first one reads.
    - A tensor in the memory of a parameter or a buffer is copied, too.
    """
    samples = [signature.tensors() for signature in plan.signatures]
    taken = _storages_in_use(others, plan)
    if not plan.reuse_buffers:
        return [[_exclusive(t, taken) for t in tensors] for tensors in samples]
    buffers, inputs = BufferPool(), [[] for _ in samples]
    for step in plan.schedule.steps:
        if step.kind == FORWARD:
            for t in samples[step.sample]:
                memory = buffers.acquire(t) if buffers.has(t) else _exclusive(t, taken)
                inputs[step.sample].append(memory.detach().requires_grad_(t.requires_grad))
        elif plan.last_use(step):
            for t in inputs[step.sample]:
                buffers.release(t)
    return inputs


def _storages_in_use(others: Iterable[torch.Tensor], plan: CapturePlan) -> set[int]:
    """Addresses of the storages that a call must not write: those of other static inputs, parameters and buffers."""
    held = [t for module in plan.torch_modules() for t in (*module.parameters(), *module.buffers())]
    return {
        t.untyped_storage().data_ptr()
        for t in (*held, *others)
        if type(t) in PLAIN_TENSORS and t.layout is torch.strided and not t.is_nested and t.numel()
    }


def _exclusive(t: torch.Tensor, taken: set[int]) -> torch.Tensor:
    address = t.untyped_storage().data_ptr()
    own = t.detach()
    if t.numel() and address in taken:
        own = BufferPool().acquire(t).copy_(own)
    taken.add(own.untyped_storage().data_ptr())
    return own.requires_grad_(t.requires_grad)
