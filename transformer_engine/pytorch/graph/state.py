"""What a capture must leave as it found it: random states, buffers, gradients, and the flag that says that a capture is
under way, and quantization state. Everything is put back whether it succeeded or not."""

from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType

import torch

from transformer_engine.pytorch.capturing import set_capture_end, set_capture_start
from transformer_engine.pytorch.distributed.rng import Snapshot, trackers
from transformer_engine.pytorch.graph.quantized import noted, our_modules, restore_fp8_tensors, save_fp8_tensors
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule


def fused_weights(module: object) -> list[torch.nn.Parameter]:
    """The parameters whose gradients the modules of this library add to main_grad themselves."""
    return [p for part in our_modules(module) for p in own_fused(part)]


def own_fused(part: TransformerEngineBaseModule) -> list[torch.nn.Parameter]:
    """As above, of one module without its submodules: there every matrix is a product's weight."""
    if not part.fuse_wgrad_accumulation:
        return []
    return [p for p in part.parameters(recurse=False) if p.dim() == 2 and p.requires_grad]


def main_grad_of(weight: torch.nn.Parameter) -> torch.Tensor | None:
    return weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)


def _restorer(t: torch.Tensor) -> Callable[[], object]:
    """Puts t's values back; memory for a copy is taken only where there is something to keep."""
    if t.numel() == 0 or (t.is_contiguous() and not t.view(-1).view(torch.uint8).any()):
        return t.zero_
    kept = t.clone()
    return lambda: t.copy_(kept)


class Untouched:
    """Around warm-up and captures. Inside, gradients accumulate from nothing and into main_grad always."""

    def __init__(self, modules: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        unique = {id(m): m for m in modules if isinstance(m, torch.nn.Module)}
        self.modules = list(unique.values())
        self.tensors = list(tensors)

    def __enter__(self) -> None:
        set_capture_start()
        self.undo: list[Callable[[], object]] = []
        self.undo_failed: list[Callable[[], object]] = []  # what only a failure puts back: graphs go on using it
        self.kept_weights: list[tuple[TransformerEngineBaseModule, dict]] = []
        try:
            self._note()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    @torch.no_grad()
    def _note(self) -> None:
        parts = {id(part): part for module in self.modules for part in our_modules(module)}
        self.undo_failed = [noted(part) for part in parts.values()]
        for part in parts.values():  # kept weights are made anew, in memory of their own: the old ones' stays
            self.kept_weights.append((part, part._cached_weights))
            part._cached_weights = {}
        self.undo.append(partial(restore_fp8_tensors, self.modules, save_fp8_tensors(self.modules, None)))
        self.undo.append(Snapshot(self.tensors).restore)
        for tracker in trackers():
            self.undo.append(partial(tracker.set_states, tracker.get_states()))
        parameters = {id(p): p for m in self.modules for p in m.parameters()}.values()
        for p in parameters:
            self.undo.append(partial(setattr, p, "grad", p.grad))
            p.grad = None
        for buffer in {id(b): b for m in self.modules for b in m.buffers()}.values():
            self.undo.append(_restorer(buffer))
        for weight in {id(w): w for m in self.modules for w in fused_weights(m)}.values():
            main_grad = main_grad_of(weight)
            if isinstance(main_grad, torch.Tensor):  # else the module itself says what is missing
                self.undo.append(_restorer(main_grad))
            for name in ("grad_added_to_main_grad", "overwrite_main_grad"):
                if hasattr(weight, name):
                    self.undo.append(partial(setattr, weight, name, getattr(weight, name)))
                    setattr(weight, name, False)

    @torch.no_grad()
    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self.undo:
            self.undo.pop()()
        for part, kept in self.kept_weights:
            part._cached_weights = {**kept, **part._cached_weights}
        for put_back in self.undo_failed if error is not None else ():
            put_back()
        for part in (part for module in self.modules for part in our_modules(module)):
            part._leave()
        self.tensors, self.modules = [], []
        set_capture_end()
