"""What a capture must leave as it found it: random states, buffers, gradients, what modules know of quantization, and
the flag that says that a capture is under way. Everything is put back whether it succeeded or not."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType

import torch

from transformer_engine.pytorch._internal.capture_flag import set_capture_end, set_capture_start
from transformer_engine.pytorch.distributed.rng import Snapshot, trackers
from transformer_engine.pytorch.graph.describe import PLAIN
from transformer_engine.pytorch.graph.memory.buffers import distinct, version_of
from transformer_engine.pytorch.graph.recorded.main_grads import fused_weights, main_grad_of
from transformer_engine.pytorch.graph.recorded.quantization import (
    our_modules,
    restore_fp8_tensors,
    save_fp8_tensors,
)


class Kept:
    """A tensor's values, to be put back; memory for a copy is taken only where there is something to keep."""

    def __init__(self, t: torch.Tensor) -> None:
        plain = type(t) in PLAIN and t.layout is torch.strided and not (t.is_nested or t.is_conj() or t.is_neg())
        t, self.version = t.detach(), version_of(t)
        if plain:
            t = distinct(t)
        self.tensor, self.plain = t, plain
        self.values = None if plain and not _bits(t).any() else t.clone()

    def changed(self) -> bool:
        """Also where torch did not count a write, one by .data."""
        if self.version is None or version_of(self.tensor) != self.version:
            return True
        if not self.plain:
            return False
        bits = _bits(self.tensor)
        return bool(bits.any()) if self.values is None else not torch.equal(bits, _bits(self.values))

    def put_back(self) -> None:
        inference = self.tensor.is_inference() or torch.is_inference_mode_enabled()  # written to there alone
        with torch.inference_mode(inference):
            if self.values is None:
                self.tensor.zero_()
            else:
                self.tensor.copy_(self.values)


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


@contextmanager
def values_kept(tensors: Iterable[torch.Tensor], undo: ExitStack) -> Iterator[None]:
    """`undo` gets back what is written to inside; of the others no copy stays."""
    before = [Kept(t) for t in tensors]
    try:
        yield
    finally:
        for kept in before:
            if kept.changed():
                undo.callback(kept.put_back)


class Untouched:
    """Around warm-up and captures. Inside, gradients accumulate from nothing and into main_grad always."""

    def __init__(self, modules: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        unique = {id(m): m for m in modules if isinstance(m, torch.nn.Module)}
        self.modules = list(unique.values())
        self.tensors = list(tensors)

    def __enter__(self) -> None:
        self.undo = ExitStack()  # the latest first, and each of them even where another one raises
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
        undo(self._forget)
        parts = {id(part): part for module in self.modules for part in our_modules(module)}
        for part in parts.values():
            undo(part.runtime.quantization.leave)
            undo(self._where_failed, partial(part.runtime.restore, part.runtime.snapshot(part)))
        for part in parts.values():  # kept weights are made anew, in memory of their own: the old ones' stays
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
            undo(self._where_failed, partial(_entries_back, part._buffers, dict(part._buffers)))
        for buffer in {id(b): b for m in self.modules for b in m.buffers()}.values():
            undo(Kept(buffer).put_back)
        for weight in {id(w): w for m in self.modules for w in fused_weights(m)}.values():
            main_grad = main_grad_of(weight)
            if isinstance(main_grad, torch.Tensor):  # else the module itself says what is missing
                undo(Kept(main_grad).put_back)
            for name in ("grad_added_to_main_grad", "overwrite_main_grad"):
                if hasattr(weight, name):
                    undo(setattr, weight, name, getattr(weight, name))
                    setattr(weight, name, False)

    def _where_failed(self, put_back: Callable[[], object]) -> None:
        """What only a failure puts back: graphs go on using it."""
        if self.failed:
            put_back()

    def _forget(self) -> None:
        self.tensors, self.modules = [], []

    @torch.no_grad()
    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.failed = error is not None
        self.undo.close()


def _entries_back(entries: dict, before: dict) -> None:
    entries.clear()
    entries.update(before)
