"""The static inputs of what is captured: a sample's own tensors, unless their memory is somebody's already."""

from collections.abc import Iterable

import torch

from transformer_engine.pytorch.graph.capture.order import FORWARD
from transformer_engine.pytorch.graph.capture.plan import CapturePlan
from transformer_engine.pytorch.graph.describe import PLAIN
from transformer_engine.pytorch.graph.memory.buffers import Buffers


def static_inputs(plan: CapturePlan, others: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """One list for each sample: its own tensors, or with `reuse` those of samples that are done by then. One in memory
    that another sample has, of this capture or of an earlier one (`others`), is copied: the second would overwrite what
    the first one's backward needs. So is one in the memory of a parameter or a buffer."""
    samples = [signature.tensors() for signature in plan.signatures]
    taken = _memory_of(others, plan)
    if not plan.reuse:
        return [[_own(t, taken) for t in tensors] for tensors in samples]
    buffers, inputs = Buffers(), [[] for _ in samples]
    for step in plan.schedule.steps:
        if step.kind == FORWARD:
            for t in samples[step.sample]:
                memory = buffers.take(t) if buffers.has(t) else _own(t, taken)
                inputs[step.sample].append(memory.detach().requires_grad_(t.requires_grad))
        elif plan.last_use(step):
            for t in inputs[step.sample]:
                buffers.give(t)
    return inputs


def _memory_of(others: Iterable[torch.Tensor], plan: CapturePlan) -> set[int]:
    """Where what a call must not write to begins: other static inputs, parameters and buffers."""
    held = [t for module in plan.torch_modules() for t in (*module.parameters(), *module.buffers())]
    return {
        t.untyped_storage().data_ptr()
        for t in (*held, *others)
        if type(t) in PLAIN and t.layout is torch.strided and not t.is_nested and t.numel()
    }


def _own(t: torch.Tensor, taken: set[int]) -> torch.Tensor:
    address = t.untyped_storage().data_ptr()
    own = t.detach()
    if t.numel() and address in taken:
        own = Buffers().take(t).copy_(own)
    taken.add(own.untyped_storage().data_ptr())
    return own.requires_grad_(t.requires_grad)
