"""Checks of a captured forward for what replays would get wrong without an error.

- They run after a forward, while its autograd graph exists.
- They change nothing; the checks of a call are in replay/.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.graph.capture.static_callable import StaticCallable
from transformer_engine.pytorch.graph.describe import OP
from transformer_engine.pytorch.graph.memory.buffers import is_dense, spans_overlap

# Types of results that are the same in each call and hold no tensor.
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def _leaves(results: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaf tensors that a backward from the results would reach."""
    yield from (t for t in results if t.grad_fn is None)
    waiting = [t.grad_fn for t in results if t.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def check_gradient_leaves(name: str, func: StaticCallable) -> None:
    """Each leaf of the results has to be an input or a parameter of the module."""
    known = {id(t) for t in (*func.inputs, *func.parameters)}
    lost = [t for t in _leaves(func.outputs_with_grad) if id(t) not in known]
    if lost:
        raise ValueError(
            f"{OP}: the result of {name} depends on tensors that require a gradient and are neither its arguments nor "
            f"parameters of a module that was passed, of shapes {[list(t.shape) for t in lost]}: a replay would give "
            "them none. Pass the module itself in place of a function that calls it, pass such a tensor as an "
            "argument, or detach it."
        )


def check_result_types(name: str, func: StaticCallable) -> None:
    """Values other than tensors in a result have to be constants: a replay returns the same objects."""
    for leaf, is_tensor in zip(func.result_leaves, func.is_tensor):
        if not is_tensor and not isinstance(leaf, _CONSTANTS):
            raise ValueError(
                f"{OP}: the result of {name} has a {type(leaf).__qualname__}; if it holds tensors, a replay would not "
                "write them. Return tensors in tuples, lists or dicts, or register the class with "
                "torch.utils._pytree."
            )


@contextmanager
def buffers_unchanged(name: str, module: object) -> Iterator[None]:
    """Around a captured forward: it must not replace buffers, since a graph reads and writes those of the capture."""

    def found() -> dict[str, torch.Tensor]:
        return dict(module.named_buffers(remove_duplicate=False)) if isinstance(module, torch.nn.Module) else {}

    before = found()
    yield
    after = found()
    replaced = [key for key in (before | after) if before.get(key) is not after.get(key)]
    if replaced:
        last = replaced[0].rpartition(".")[2]
        raise ValueError(
            f"{OP}: the forward of {name} replaces its buffers {replaced} by other tensors, but a graph keeps using "
            f"those of its capture; write to them in place (self.{last}.copy_(...) or self.{last}.add_(1) instead of "
            f"self.{last} = ...)."
        )


@contextmanager
def _saved_addresses() -> Iterator[set[int]]:
    """Yields a set that has, after the block, the storage addresses of all tensors saved for the backward inside."""
    kept, found = [], set()

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.detach())  # kept alive to the end: otherwise its memory may be reused
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found
    found.update(t.untyped_storage().data_ptr() for t in kept if type(t) is torch.Tensor)


def _record_guards(func: StaticCallable, results: Sequence[torch.Tensor], saved: set[int]) -> None:
    """Records the arguments, parameters, buffers and results that must not be written before the backward: those that
    it reads, and results that share elements with an argument, a parameter or another result, since autograd would not
    see such a write."""

    def plain(t: torch.Tensor) -> bool:  # a subclass may have no memory of its own
        return type(t) in (torch.Tensor, torch.nn.Parameter)

    def read(t: torch.Tensor) -> bool:
        return t.numel() > 0 and t.untyped_storage().data_ptr() in saved

    def shares(i: int) -> bool:
        others = (*func.inputs, *func.parameters, *func.frozen, *results[:i], *results[i + 1 :])
        t = results[i]
        return any(spans_overlap(t, other) and (is_dense(t) or is_dense(other)) for other in others if plain(other))

    func.guarded_inputs = [i for i, t in enumerate(func.inputs) if plain(t) and read(t)]
    func.guarded_results = [i for i, t in enumerate(results) if plain(t) and (read(t) or shares(i))]
    if isinstance(func.module, torch.nn.Module):
        held = (*func.module.parameters(), *func.module.buffers())
        strided = [t for t in held if plain(t) and t.layout is torch.strided and not t.is_nested]
        func.guarded_module_tensors = [t for t in strided if not t.is_inference() and read(t)]


def record_guards_once(func: StaticCallable) -> Callable[[], list[torch.Tensor]]:
    """The forward of `func`. Its first call records the guarded tensors; the CPU backend calls it at each replay."""
    called = []

    def forward() -> list[torch.Tensor]:
        if called:
            return func.forward()
        called.append(None)
        with _saved_addresses() as saved:
            results = func.forward()
        _record_guards(func, results, saved)
        return results

    return forward
