"""What a graph would get wrong without a word: looked for behind a forward of what is captured, while its history is
there. Changes nothing, and checks no call."""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from transformer_engine.pytorch.graph.capture.work import Work
from transformer_engine.pytorch.graph.describe import OP
from transformer_engine.pytorch.graph.memory.buffers import dense, overlap

# What stays the same from call to call, and can hold no tensor.
_CONSTANTS = (
    *(type(None), bool, int, float, complex, str, bytes, enum.Enum, slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def _leaves(results: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors in whose .grad a backward from the results would end."""
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


def check_leaves(name: str, work: Work) -> None:
    """Every gradient of the results has somewhere to go: an input, or a parameter of the module."""
    known = {id(t) for t in (*work.inputs, *work.parameters)}
    lost = [t for t in _leaves(work.live) if id(t) not in known]
    if lost:
        raise ValueError(
            f"{OP}: the result of {name} depends on tensors that want a gradient and are neither its arguments nor "
            f"parameters of a module that was passed, of shapes {[list(t.shape) for t in lost]}: a replay would give "
            "them none. Pass the module itself in place of a function that calls it, such a tensor as an argument, or "
            "detach it."
        )


def check_result(name: str, work: Work) -> None:
    """What is no tensor in a result is a constant: a replay returns the very same."""
    for leaf, is_tensor in zip(work.result, work.is_tensor):
        if not is_tensor and not isinstance(leaf, _CONSTANTS):
            raise ValueError(
                f"{OP}: the result of {name} has a {type(leaf).__qualname__}, whose tensors, if it holds any, no "
                "replay would write; return tensors in tuples, lists or dicts, or register the class with "
                "torch.utils._pytree."
            )


@contextmanager
def buffers_stay(name: str, module: object) -> Iterator[None]:
    """Around the forward that is captured: a graph reads and writes the buffers that it found."""

    def found() -> dict[str, torch.Tensor]:
        return dict(module.named_buffers(remove_duplicate=False)) if isinstance(module, torch.nn.Module) else {}

    before = found()
    yield
    after = found()
    replaced = [key for key in (before | after) if before.get(key) is not after.get(key)]
    if replaced:
        last = replaced[0].rpartition(".")[2]
        raise ValueError(
            f"{OP}: the forward of {name} replaces its buffers {replaced} by other tensors, and a graph goes on with "
            f"those that it was captured with; write to them in place (self.{last}.copy_(...) or self.{last}.add_(1) "
            f"in place of self.{last} = ...)."
        )


@contextmanager
def _noting_saved() -> Iterator[set[int]]:
    """The memory (where it begins) of all that a forward inside saves for its backward, there when it is left."""
    kept, found = [], set()

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.detach())  # alive to the end, or its memory may be another's
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield found
    found.update(t.untyped_storage().data_ptr() for t in kept if type(t) is torch.Tensor)


def _note_guarded(work: Work, results: Sequence[torch.Tensor], saved: set[int]) -> None:
    """Which arguments, parameters, buffers and results nobody may write to before the backward: those that it reads,
    and results that share elements with an argument, a parameter or another result, whose gradients would not know of
    it."""

    def plain(t: torch.Tensor) -> bool:  # one of a class of its own may lie nowhere
        return type(t) in (torch.Tensor, torch.nn.Parameter)

    def read(t: torch.Tensor) -> bool:
        return t.numel() > 0 and t.untyped_storage().data_ptr() in saved

    def shares(i: int) -> bool:
        others = (*work.inputs, *work.parameters, *work.frozen, *results[:i], *results[i + 1 :])
        t = results[i]
        return any(overlap(t, other) and (dense(t) or dense(other)) for other in others if plain(other))

    work.guarded_inputs = [i for i, t in enumerate(work.inputs) if plain(t) and read(t)]
    work.guarded_results = [i for i, t in enumerate(results) if plain(t) and (read(t) or shares(i))]
    if isinstance(work.module, torch.nn.Module):
        held = (*work.module.parameters(), *work.module.buffers())
        strided = [t for t in held if plain(t) and t.layout is torch.strided and not t.is_nested]
        work.guarded_held = [t for t in strided if not t.is_inference() and read(t)]


def noted_once(work: Work) -> Callable[[], list[torch.Tensor]]:
    """The work's forward, which notes what is guarded when it is called first: the CPU calls it again and again."""
    calls = []

    def forward() -> list[torch.Tensor]:
        if calls:
            return work.forward()
        calls.append(None)
        with _noting_saved() as saved:
            results = work.forward()
        _note_guarded(work, results, saved)
        return results

    return forward
