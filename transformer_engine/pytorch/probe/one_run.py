"""One run of a module while the extension records saved tensors and the path of each op, for te.memory_plan,
te.explain and te.tune.

- The module, its gradients and the random states are unchanged afterwards, except parameters that a forward writes to.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.submodules import only_watches
from transformer_engine.pytorch.probe.undo import gradients_restored, state_restored


@dataclass
class Recording:
    """The rows of the extension, set when the block ends."""

    kept: list[tuple] = field(default_factory=list)
    paths: list[tuple] = field(default_factory=list)


class _Labels:
    """Reports the running submodule to the extension."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.names = {m: name or type(module).__name__ for name, m in module.named_modules()}
        self.at_work: list[str] = []

    @only_watches
    def enter(self, module: torch.nn.Module, _) -> None:
        self.at_work.append(self.names[module])
        _C.set_recording_label(self.at_work[-1])

    @only_watches
    def leave(self, *_) -> None:
        self.at_work.pop()
        _C.set_recording_label(self.at_work[-1] if self.at_work else "")


def _check(op: str, module: object) -> None:
    if not isinstance(module, torch.nn.Module) or _is_compiled(module):
        raise TypeError(
            f"{op}: argument 'module' is a {type(module).__name__}, wanted a torch.nn.Module that is not compiled; "
            "pass the module before torch.compile."
        )
    compiled = [name for name, part in module.named_modules() if _is_compiled(part)]
    if compiled:
        raise TypeError(
            f"{op}: argument 'module' is a {type(module).__name__} whose submodule '{compiled[0]}' is compiled, "
            "wanted one without: a compiled graph reports nothing. Pass it before torch.compile."
        )


def _is_compiled(module: torch.nn.Module) -> bool:
    """Whether it was compiled, by torch.compile(module) or in place by module.compile()."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def recording(op: str, module: torch.nn.Module) -> Iterator[tuple[Recording, _Labels]]:
    _check(op, module)
    record, labels = Recording(), _Labels(module)
    with ExitStack() as stack:
        stack.enter_context(state_restored(module))
        for part in module.modules():
            stack.callback(part.register_forward_pre_hook(labels.enter, prepend=True).remove)
            stack.callback(part.register_forward_hook(labels.leave, always_call=True).remove)
        _C.start_recording()
        try:
            yield record, labels
        finally:
            record.kept, record.paths = _C.stop_recording()


def sample_for(op: str, module: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """16 tokens for a module of this library with in_features or hidden_size; in other modules these names may have
    another meaning. An empty sample for a module whose forward can be called without arguments."""
    ours = any(kind.__module__.startswith("transformer_engine.") for kind in type(module).__mro__)
    like = next(module.parameters(), None)
    width = next((getattr(module, n) for n in ("in_features", "hidden_size") if ours and hasattr(module, n)), None)
    if like is not None and isinstance(width, int):
        return (torch.randn(16, 1, width, dtype=like.dtype, device=like.device, requires_grad=True),)
    try:
        inspect.signature(module.forward).bind()
    except TypeError:
        raise TypeError(
            f"{op}: the input of a {type(module).__name__} is unknown; pass one: te.{op}(module, *sample)."
        ) from None
    return ()


@contextmanager
def gradients_returned(module: torch.nn.Module) -> Iterator[None]:
    """Inside, weight gradients are returned to autograd, not added to main_grad (which need not exist) or delayed."""
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, TransformerEngineBaseModule):
                stack.enter_context(part.runtime.divert_gradients())
        yield


def run_with_gradients(module: torch.nn.Module, sample: Sequence[object], options: Mapping[str, object]) -> None:
    """One forward and backward whose gradients are discarded: .grad, main_grad and delayed weight gradients stay.

    Hooks on parameters and on the sample do not run. A reentrant checkpoint inside works only in a backward that
    accumulates; then hooks on AccumulateGrad nodes run (those of DistributedDataParallel; its no_sync() disables them).
    """
    leaves: dict[int, torch.Tensor] = {}

    def leaf(t: torch.Tensor) -> torch.Tensor:  # the backward ends there, not in the graph of the caller's tensor
        return leaves.setdefault(id(t), t.detach().requires_grad_()) if t.requires_grad else t

    given, named = pytree.tree_map_only(torch.Tensor, leaf, (list(sample), dict(options)))
    with gradients_returned(module), torch.enable_grad():
        result = module(*given, **named)
        outputs = [t for t in tensors_in(result) if t.requires_grad]
        wanted = [t for t in (*tensors_in([given, named]), *module.parameters()) if t.requires_grad]
        if not (outputs and wanted):
            return
        ones, nodes = [torch.ones_like(t) for t in outputs], list(nodes_behind(outputs))
        met = [node.variable for node in nodes if hasattr(node, "variable")]
        with gradients_restored({id(t): t for t in (*met, *wanted) if t.is_leaf}.values()):
            if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
                torch.autograd.backward(outputs, ones)
            else:
                torch.autograd.grad(outputs, wanted, ones, allow_unused=True)


def nodes_behind(outputs: Sequence[torch.Tensor]) -> Iterator[torch.autograd.graph.Node]:
    """Each node of the autograd graph once."""
    seen, todo = set(), [t.grad_fn for t in outputs if t.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions if following is not None]
            yield node


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
