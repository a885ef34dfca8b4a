"""The context in which a layer's saved tensors are seen, and the function that ends the layer. Saved-tensor hooks see
them, so any module's leave; which and when is the synchronizer's."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.keywords import tells_keywords
from transformer_engine.pytorch._internal.torch_private import current_graph_task_id, execution_engine
from transformer_engine.pytorch.cpu_offload.arguments import check_flags, check_stream, is_count
from transformer_engine.pytorch.cpu_offload.schedule import DefaultOffloadSynchronizer, ManualOffloadSynchronizer
from transformer_engine.pytorch.cpu_offload.steps import LayerNumber, Shared, Synchronizer
from transformer_engine.pytorch.saved import Hooks
from transformer_engine.pytorch.saved.marks import checked
from transformer_engine.pytorch.saved.offload_scope import offload_scope


class _Here(threading.local):
    """The synchronizer of the innermost context that this thread is in."""

    synchronizer: Synchronizer | None = None


_here = _Here()


def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """What these tensors hold is complete: their copy need not wait for the rest of the layer. Outside of an offload
    context it does nothing. A tensor leaves as the whole of its memory: for one that is a part of it, this counts only
    with offload_base_tensor, which says that all of that memory is complete."""
    found = checked("start_offload", tensors)
    check_flags("start_offload", offload_base_tensor=offload_base_tensor)
    if _here.synchronizer is not None:
        _here.synchronizer.current_layer("start_offload").mark_ready(found, offload_base_tensor)


def mark_activation_offload(*tensors: torch.Tensor | None) -> None:
    """Accepted for code that marks what may be moved. Everything eligible is, so this changes nothing."""
    checked("mark_activation_offload", tensors)


class OffloadContext(Shared, ContextDecorator):
    """`with context:` around a layer, or `@context` over it, once or in several pieces, until the sync function ends
    it. Where nothing is recorded (no_grad), in a backward, and inside of a checkpoint, whose tensors are not kept, it
    does nothing."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        self.offload_synchronizer = synchronizer
        self._entered: list[tuple] = []

    @property
    def enabled(self) -> bool:
        return not self.offload_synchronizer.paused

    @property
    def inside_context(self) -> bool:
        """Whether a `with` of it is under way, whatever it does there."""
        return bool(self._entered)

    def disable(self) -> None:
        """Layers from the next one on stay where they are: a pre_warmup_hook of make_graphed_callables."""
        self.offload_synchronizer.paused = True
        self.offload_synchronizer.forget_step()

    def enable(self) -> None:
        """Layers leave again: a post_warmup_hook of make_graphed_callables."""
        self.offload_synchronizer.paused = False

    def __deepcopy__(self, memo: dict) -> OffloadContext:
        """Itself: a copied model shares it, as it shares the sync function, which ends this one's layers."""
        return self

    def __enter__(self) -> OffloadContext:
        works, hooks = self.offload_synchronizer.records(), None
        if works:
            synchronizer = self.offload_synchronizer
            synchronizer.enter_layer()
            if synchronizer.wants_tensors(synchronizer.number):
                try:
                    hooks = Hooks(synchronizer.current_layer()).__enter__()
                except BaseException:  # torch takes no hooks here
                    synchronizer.forget_step()
                    raise
        self._entered.append((works, hooks, _here.synchronizer))
        offload_scope.depth += works
        if works:
            _here.synchronizer = self.offload_synchronizer
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        works, hooks, _here.synchronizer = self._entered.pop()
        offload_scope.depth -= works
        if hooks is not None:
            hooks.__exit__(kind, error, trace)
        if works and error is not None:
            self.offload_synchronizer.forget_step()


class _IdleContext(OffloadContext):
    """With enabled=False: the calls of a context are there and change nothing. It has no state, so that any number of
    threads may be in it, and it can be pickled."""

    def __init__(self) -> None:
        super().__init__(DefaultOffloadSynchronizer(1, 0))
        self.offload_synchronizer.enabled, self.offload_synchronizer.paused = False, True

    def enable(self) -> None: ...

    def __enter__(self) -> OffloadContext:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None: ...

    def __reduce__(self) -> tuple:
        return _IdleContext, ()


class _Reached:
    """A hook on the node that a layer ends in: in the backward it says that the layer is reached. A node of our own
    would be a second result in the same memory: what is written to one in place, the other's graph would not know."""

    __slots__ = ("__weakref__", "number", "synchronizer")

    def __init__(self, synchronizer: Synchronizer, number: LayerNumber) -> None:
        self.synchronizer, self.number = synchronizer, number

    def __call__(self, gradients: tuple) -> None:
        synchronizer, task = self.synchronizer, current_graph_task_id()
        synchronizer.bwd_step(self.number)
        if task != synchronizer.queued_in:  # once a backward, and once more around one inside of it
            synchronizer.queued_in = task
            execution_engine.queue_callback(synchronizer.finish_part_of_bwd)

    def listen(self, node: torch.autograd.graph.Node) -> None:
        """Be a hook of `node`, in the place of those whose steps are over: a node that outlives steps has one of each
        that is under way, and keeps no other alive."""
        hooks = node.metadata.setdefault(self.synchronizer, [])
        for entry in hooks[:]:
            number, handle = entry
            if number.step.over or number.step.abandoned:
                handle.remove()
                hooks.remove(entry)
        hooks.append((self.number, node.register_prehook(self)))


def _end_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose node stays in the graph: where a view is written to in place its own is replaced, and its
    base's is not."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def _sync_function(context: OffloadContext) -> Callable[[torch.Tensor], torch.Tensor]:
    def sync(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"sync_fn: argument 'tensor' is a {type(tensor).__name__}, wanted the layer's output, a tensor; pass "
                "the one that the next layer reads."
            )
        synchronizer = context.offload_synchronizer
        if not (synchronizer.records() and synchronizer.layer_open):
            return tensor
        if tensor.grad_fn is None:  # no backward goes on from here
            synchronizer.end_layer()
            return tensor
        synchronizer.check_result(tensor)
        end, reached = _end_of(tensor), _Reached(synchronizer, synchronizer.number)
        reached.listen(end.grad_fn)
        synchronizer.end_layer(reached, _C.offload_node_of(end))
        return tensor

    return sync


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def _warn_of_the_other_path() -> None:
    """Once a process: whoever asks for it relies on its marks, as long as there are two."""
    warnings.warn(
        "get_cpu_offload_context: NVTE_CPU_OFFLOAD_V1=1 asks for another path of CPU offload, and there is one alone. "
        "Its layers leave by the same calls, and what mark_not_offload() names stays; unset the variable.",
        UserWarning,
        stacklevel=4,  # the caller's line, behind tells_keywords
    )


def _refuse_options(num_layers: object, model_layers: object, activations: bool, manual: bool) -> None:
    op = "get_cpu_offload_context"
    if not activations:
        raise ValueError(f"{op}: argument 'offload_activations' is {activations!r}: pass enabled=False instead.")
    if not is_count(model_layers) or model_layers < 1:
        raise ValueError(f"{op}: argument 'model_layers' is {model_layers!r}, wanted the number of the model's layers.")
    if manual and num_layers is None:
        return
    if not is_count(num_layers) or not (manual or 0 <= num_layers < model_layers):
        raise ValueError(
            f"{op}: argument 'num_layers' is {num_layers!r} and 'model_layers' {model_layers!r}, wanted fewer layers "
            "to offload than the model has: the last one is wanted again as soon as it is complete."
        )


@tells_keywords()
def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: torch.cuda.Stream | None = None,
) -> tuple:
    """(context, sync_fn), or (context, sync_fn, ManualOffloadSynchronizer): saved tensors move to the CPU and back.

        for layer in layers:
            with context:
                x = layer(x)
            x = sync_fn(x)

    num_layers of model_layers leave, the first ones (DefaultOffloadSynchronizer says when). Eligible: tensors of 256 Ki
    elements and more (cpu_offload.layer.MIN_ELEMENTS), no parameters, not marked by mark_not_offload(); a storage moves
    once and as a whole, and its tensors come back as the views they were. Gradients are those of a run without, to the
    bit.
    manual_synchronization: the third result says when each layer leaves, is released and comes back, by its number.
    retain_pinned_cpu_buffers: a layer's pinned memory stays its own from one step to the next.
    offload_stream: copies run there, both ways; otherwise each way has a stream of its own.
    double_buffering changes nothing: what comes back has memory of its own in any case.
    offload_weights: a UserWarning, and nothing else: a parameter that its module holds stays, whatever a graph keeps.
    enabled=False, or offload_weights without offload_activations: neither result changes anything, and the third is
    None.
    context.disable() and enable() fit make_graphed_callables' warmup hooks. context.offload_synchronizer tells sizes
    (get_offloaded_total_size_mb, pinned_usage) and makes or frees pinned memory (reserve_pinned, release_pinned).
    Errors: ValueError for num_layers not below model_layers, TypeError for what is no truth value or no stream. Pinned
    memory that is exhausted: a RuntimeWarning, and the layer stays.
    """
    op = "get_cpu_offload_context"
    check_flags(
        op,
        enabled=enabled,
        offload_activations=offload_activations,
        offload_weights=offload_weights,
        double_buffering=double_buffering,
        manual_synchronization=manual_synchronization,
        retain_pinned_cpu_buffers=retain_pinned_cpu_buffers,
    )
    check_stream(op, offload_stream)
    if enabled and offload_weights:
        warnings.warn(
            f"{op}: argument 'offload_weights' is True, which has no effect: a parameter that its module holds stays "
            "on the device whatever a graph keeps. Leave it at False; FSDP2 shards and offloads parameters.",
            UserWarning,
            stacklevel=3,
        )
    if not enabled or (offload_weights and not offload_activations):
        return (_IdleContext(), _unchanged, None) if manual_synchronization else (_IdleContext(), _unchanged)
    if os.environ.get("NVTE_CPU_OFFLOAD_V1", "0") == "1":
        _warn_of_the_other_path()
    _refuse_options(num_layers, model_layers, offload_activations, manual_synchronization)
    if manual_synchronization:
        synchronizer = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
    else:
        synchronizer = DefaultOffloadSynchronizer(model_layers, num_layers, retain_pinned_cpu_buffers, offload_stream)
    context = OffloadContext(synchronizer)
    sync = _sync_function(context)
    return (context, sync, synchronizer) if manual_synchronization else (context, sync)
