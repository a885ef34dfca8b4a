"""What te.memory_plan and te.explain share: one run of a module while the extension tells what it keeps and which path
each op takes. Nothing of the module, its gradients or its random states is changed by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


@dataclass
class Recording:
    """Filled when the block ends: `kept` and `paths` as the extension's rows."""

    kept: list[tuple] = field(default_factory=list)
    paths: list[tuple] = field(default_factory=list)


class _Labels:
    """Tells the extension which submodule is at work."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.names = {m: name or type(module).__name__ for name, m in module.named_modules()}
        self.at_work: list[str] = []

    def enter(self, module: torch.nn.Module, _) -> None:
        self.at_work.append(self.names[module])
        _C.set_recording_label(self.at_work[-1])

    def leave(self, *_) -> None:
        self.at_work.pop()
        _C.set_recording_label(self.at_work[-1] if self.at_work else "")


@contextmanager
def recording(op: str, module: torch.nn.Module) -> Iterator[tuple[Recording, _Labels]]:
    if not isinstance(module, torch.nn.Module) or hasattr(module, "_orig_mod"):
        raise TypeError(
            f"{op}: argument 'module' is a {type(module).__name__}, wanted a torch.nn.Module that is not compiled; "
            "pass the one that went into torch.compile."
        )
    record, labels = Recording(), _Labels(module)
    devices = sorted({t.device.index for t in module.parameters() if t.is_cuda})
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        for part in module.modules():
            stack.callback(part.register_forward_pre_hook(labels.enter, prepend=True).remove)
            stack.callback(part.register_forward_hook(labels.leave, always_call=True).remove)
        _C.start_recording()
        try:
            yield record, labels
        finally:
            record.kept, record.paths = _C.stop_recording()


@contextmanager
def _gradients_returned(module: torch.nn.Module) -> Iterator[None]:
    """Weight gradients go to autograd inside, not to main_grad or to backward_dw()."""
    parts = [m for m in module.modules() if isinstance(m, TransformerEngineBaseModule)]
    before = [(m, m.fuse_wgrad_accumulation, m._wgrad_stores) for m in parts]
    try:
        for m in parts:
            m.fuse_wgrad_accumulation, m._wgrad_stores = False, {}
        yield
    finally:
        for m, fused, stores in before:
            m.fuse_wgrad_accumulation, m._wgrad_stores = fused, stores


def run_with_gradients(module: torch.nn.Module, sample: Sequence[object], options: Mapping[str, object]) -> None:
    """One forward and backward whose gradients go nowhere: .grad, main_grad and what waits for backward_dw() stay."""
    with _gradients_returned(module), torch.enable_grad():
        outputs = [t for t in tensors_in(module(*sample, **options)) if t.requires_grad]
        wanted = [t for t in (*tensors_in([sample, options]), *module.parameters()) if t.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)


def tensors_in(values: object) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = list(values.values())
    if isinstance(values, Sequence) and not isinstance(values, str):
        return [t for value in values for t in tensors_in(value)]
    return []


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Left-aligned text columns."""
    texts = [list(columns)] + [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
