"""Restores after a capture, successful or not, the state that it disturbs: random states, buffers, gradients, the
quantization state of modules, and the capture flag."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType

import torch

from transformer_engine.pytorch._internal.capture_flag import set_capture_end, set_capture_start
from transformer_engine.pytorch.distributed.rng import Snapshot, trackers
from transformer_engine.pytorch.graph.describe import PLAIN_TENSORS
from transformer_engine.pytorch.graph.memory.buffers import unexpanded, version_of
from transformer_engine.pytorch.graph.recorded.main_grads import fused_weights, main_grad_of
from transformer_engine.pytorch.graph.recorded.quantization import (
    our_modules,
    restore_fp8_tensors,
    save_fp8_tensors,
)


class TensorBackup:
    """The values of a tensor, to restore them; values that are all zero need no copy."""

    def __init__(self, t: torch.Tensor) -> None:
        plain = (
            type(t) in PLAIN_TENSORS and t.layout is torch.strided and not (t.is_nested or t.is_conj() or t.is_neg())
        )
        t, self.version = t.detach(), version_of(t)
        if plain:
            t = unexpanded(t)
        self.tensor, self.plain = t, plain
        self.values = None if plain and not _bits(t).any() else t.clone()

    def changed(self) -> bool:
        """True also after a write without a version bump, for example through .data."""
        if self.version is None or version_of(self.tensor) != self.version:
            return True
        if not self.plain:
            return False
        bits = _bits(self.tensor)
        return bool(bits.any()) if self.values is None else not torch.equal(bits, _bits(self.values))

    def restore(self) -> None:
        inference = (
            self.tensor.is_inference() or torch.is_inference_mode_enabled()
        )  # such tensors can be written only there
        with torch.inference_mode(inference):
            if self.values is None:
                self.tensor.zero_()
            else:
                self.tensor.copy_(self.values)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


@contextmanager
def values_restored(tensors: Iterable[torch.Tensor], undo: ExitStack) -> Iterator[None]:
    """Tensors that the block writes are restored by `undo`; copies of the others are dropped."""
    backups = [TensorBackup(t) for t in tensors]
    try:
        yield
    finally:
        for backup in backups:
            if backup.changed():
                undo.callback(backup.restore)


class StateGuard:
    """Around warm-up and captures. Inside, .grad is None, and gradients are always added to main_grad."""

    def __init__(self, modules: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        unique = {id(m): m for m in modules if isinstance(m, torch.nn.Module)}
        self.modules = list(unique.values())
        self.tensors = list(tensors)

    def __enter__(self) -> None:
        self.undo = ExitStack()  # runs all callbacks, the latest first, even if one raises
        self.failed = False
        set_capture_start()
        self.undo.callback(set_capture_end)
        try:
            self._note()
        except BaseException:
            self.failed = True
            self.undo.close()
            raise

    @torch.no_grad()
    def _note(self) -> None:
        undo = self.undo.callback
        undo(self._drop_references)
        parts = {id(part): part for module in self.modules for part in our_modules(module)}
        for part in parts.values():
            undo(part.runtime.quantization.leave)
            undo(self._if_failed, partial(part.runtime.restore, part.runtime.snapshot(part)))
        for part in parts.values():  # quantizes cached weights into new memory; the old memory stays valid
            undo(part.runtime.weights_anew())
        undo(restore_fp8_tensors, self.modules, save_fp8_tensors(self.modules, None))
        undo(Snapshot(self.tensors).restore)
        for tracker in trackers():
            undo(tracker.set_states, tracker.get_states())
        parameters = {id(p): p for m in self.modules for p in m.parameters()}.values()
        for p in parameters:
            undo(setattr, p, "grad", p.grad)
            p.grad = None
        for part in (part for module in self.modules for part in module.modules()):
            undo(self._if_failed, partial(_restore_entries, part._buffers, dict(part._buffers)))
        for buffer in {id(b): b for m in self.modules for b in m.buffers()}.values():
            undo(TensorBackup(buffer).restore)
        for weight in {id(w): w for m in self.modules for w in fused_weights(m)}.values():
            main_grad = main_grad_of(weight)
            if isinstance(main_grad, torch.Tensor):  # otherwise the module raises an error
                undo(TensorBackup(main_grad).restore)
            for name in ("grad_added_to_main_grad", "overwrite_main_grad"):
                if hasattr(weight, name):
                    undo(setattr, weight, name, getattr(weight, name))
                    setattr(weight, name, False)

    def _if_failed(self, restore: Callable[[], object]) -> None:
        """Restores state that graphs use after a successful capture."""
        if self.failed:
            restore()

    def _drop_references(self) -> None:
        self.tensors, self.modules = [], []

    @torch.no_grad()
    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.failed = error is not None
        self.undo.close()


def _restore_entries(entries: dict, before: dict) -> None:
    entries.clear()
    entries.update(before)
