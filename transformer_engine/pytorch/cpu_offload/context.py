"""The context around a layer that offloads its saved tensors, and the sync function that ends the layer.

- Saved-tensor hooks see the tensors, so the layer can be any module.
- The synchronizer decides which layers are offloaded, and when.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import ContextDecorator

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch._internal.torch_private import current_graph_task_id, execution_engine
from transformer_engine.pytorch.cpu_offload.arguments import check_flags, check_stream, is_int
from transformer_engine.pytorch.cpu_offload.schedule import DefaultOffloadSynchronizer, ManualOffloadSynchronizer
from transformer_engine.pytorch.cpu_offload.steps import LayerNumber, SharedByCopies, Synchronizer
from transformer_engine.pytorch.saved import Hooks
from transformer_engine.pytorch.saved.marks import checked
from transformer_engine.pytorch.saved.offload_scope import offload_scope


class _ThreadState(threading.local):
    """The synchronizer of the innermost context that this thread has entered."""

    synchronizer: Synchronizer | None = None


_thread = _ThreadState()


def start_offload(*tensors: torch.Tensor | None, offload_base_tensor: bool = False) -> None:
    """Declares these tensors complete: their copies need not wait for the rest of the layer. Outside of an offload
    context it does nothing. A storage is offloaded as a whole: for a tensor that is part of its storage the call has an
    effect only with offload_base_tensor, which declares the whole storage complete."""
    found = checked("start_offload", tensors)
    check_flags("start_offload", offload_base_tensor=offload_base_tensor)
    if _thread.synchronizer is not None:
        _thread.synchronizer.current_layer("start_offload").mark_ready(found, offload_base_tensor)


def mark_activation_offload(*tensors: torch.Tensor | None) -> None:
    """Accepted for code that marks tensors to offload. It changes nothing: all eligible tensors are offloaded."""
    checked("mark_activation_offload", tensors)


class OffloadContext(SharedByCopies, ContextDecorator):
    """`with context:` around a layer, or `@context` over it, once or in several parts, until the sync function ends the
    layer. It does nothing if no tensors are saved until a backward: under no_grad, in a backward, and inside of a
    checkpoint."""

    def __init__(self, synchronizer: Synchronizer) -> None:
        self.offload_synchronizer = synchronizer
        self._entered: list[tuple] = []

    @property
    def enabled(self) -> bool:
        return not self.offload_synchronizer.paused

    @property
    def inside_context(self) -> bool:
        """Whether a `with` block of it is open, even if it does nothing there."""
        return bool(self._entered)

    def disable(self) -> None:
        """Later layers stay on the device: a pre_warmup_hook of make_graphed_callables."""
        self.offload_synchronizer.paused = True
        self.offload_synchronizer.forget_step()

    def enable(self) -> None:
        """Layers are offloaded again: a post_warmup_hook of make_graphed_callables."""
        self.offload_synchronizer.paused = False

    def __deepcopy__(self, memo: dict) -> OffloadContext:
        """Returns itself: a copied model shares the context and the sync function, which ends layers of this
        context."""
        return self

    def __enter__(self) -> OffloadContext:
        active, hooks = self.offload_synchronizer.is_recording(), None
        if active:
            synchronizer = self.offload_synchronizer
            synchronizer.enter_layer()
            if synchronizer.offloads_layer(synchronizer.number):
                try:
                    hooks = Hooks(synchronizer.current_layer()).__enter__()
                except BaseException:  # torch accepts no hooks here
                    synchronizer.forget_step()
                    raise
        self._entered.append((active, hooks, _thread.synchronizer))
        offload_scope.depth += active
        if active:
            _thread.synchronizer = self.offload_synchronizer
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        active, hooks, _thread.synchronizer = self._entered.pop()
        offload_scope.depth -= active
        if hooks is not None:
            hooks.__exit__(kind, error, trace)
        if active and error is not None:
            self.offload_synchronizer.forget_step()


class _IdleContext(OffloadContext):
    """With enabled=False: has the methods of a context, which change nothing. It has no state, so several threads may
    enter it, and it can be pickled."""

    def __init__(self) -> None:
        super().__init__(DefaultOffloadSynchronizer(1, 0))
        self.offload_synchronizer.enabled, self.offload_synchronizer.paused = False, True

    def enable(self) -> None: ...

    def __enter__(self) -> OffloadContext:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None: ...

    def __reduce__(self) -> tuple:
        return _IdleContext, ()


class _BackwardHook:
    """A pre-hook on the last autograd node of a layer, which reports to the synchronizer that the backward reaches it.
    An identity node instead would make a second result in the same memory, whose graph would miss in-place writes to
    the first one."""

    __slots__ = ("__weakref__", "number", "synchronizer")

    def __init__(self, synchronizer: Synchronizer, number: LayerNumber) -> None:
        self.synchronizer, self.number = synchronizer, number

    def __call__(self, gradients: tuple) -> None:
        synchronizer, task = self.synchronizer, current_graph_task_id()
        synchronizer.bwd_step(self.number)
        if task != synchronizer.callback_task:  # once for each backward, also for one inside of another
            synchronizer.callback_task = task
            execution_engine.queue_callback(synchronizer.finish_part_of_bwd)

    def register(self, node: torch.autograd.graph.Node) -> None:
        """Registers the hook on `node` and removes those of finished steps: a node that outlives steps must not keep
        them alive."""
        hooks = node.metadata.setdefault(self.synchronizer, [])
        for entry in hooks[:]:
            number, handle = entry
            if number.step.backward_started or number.step.abandoned:
                handle.remove()
                hooks.remove(entry)
        hooks.append((self.number, node.register_prehook(self)))


def _base_with_node(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose node stays in the graph: an in-place write replaces the node of a view, but not that of its
    base."""
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def _sync_function(context: OffloadContext) -> Callable[[torch.Tensor], torch.Tensor]:
    def sync(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"sync_fn: argument 'tensor' is a {type(tensor).__name__}, wanted the layer's output, a tensor; pass "
                "the tensor that the next layer reads."
            )
        synchronizer = context.offload_synchronizer
        if not (synchronizer.is_recording() and synchronizer.layer_open):
            return tensor
        if tensor.grad_fn is None:  # no backward starts here
            synchronizer.end_layer()
            return tensor
        synchronizer.check_result(tensor)
        end, hook = _base_with_node(tensor), _BackwardHook(synchronizer, synchronizer.number)
        hook.register(end.grad_fn)
        synchronizer.end_layer(hook, _C.offload_node_of(end))
        return tensor

    return sync


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@functools.cache
def _warn_v1_path() -> None:
    """Once per process."""
    warnings.warn(
        "get_cpu_offload_context: NVTE_CPU_OFFLOAD_V1=1 selects another implementation of CPU offload, but there is "
        "only one. It has the same calls, and mark_not_offload() keeps tensors on the device; unset the variable.",
        UserWarning,
        stacklevel=4,  # the caller of check_keywords' wrapper
    )


def _check_options(num_layers: object, model_layers: object, activations: bool, manual: bool) -> None:
    op = "get_cpu_offload_context"
    if not activations:
        raise ValueError(f"{op}: argument 'offload_activations' is {activations!r}; pass enabled=False instead.")
    if not is_int(model_layers) or model_layers < 1:
        raise ValueError(f"{op}: argument 'model_layers' is {model_layers!r}, wanted the number of the model's layers.")
    if manual and num_layers is None:
        return
    if not is_int(num_layers) or not (manual or 0 <= num_layers < model_layers):
        raise ValueError(
            f"{op}: argument 'num_layers' is {num_layers!r} and 'model_layers' {model_layers!r}, wanted fewer layers "
            "to offload than the model has: the backward reads the last one as soon as it is complete."
        )


@check_keywords()
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

    The first num_layers of model_layers are offloaded (DefaultOffloadSynchronizer describes when). Eligible are tensors
    of 256 Ki elements and more (cpu_offload.layer.MIN_ELEMENTS) except parameters and those marked by
    mark_not_offload(). A storage is copied once and as a whole, and its tensors are restored as the same views.
    Gradients have the bits of a run without offload.
    manual_synchronization: the third result offloads, releases and reloads each layer by its number.
    retain_pinned_cpu_buffers: a layer keeps its pinned memory from one step to the next.
    offload_stream: the stream of the copies in both directions; by default each direction has a stream of its own.
    double_buffering changes nothing: reloaded tensors always have memory of their own.
    offload_weights only raises a UserWarning: parameters stay on the device, since their module holds them.
    enabled=False, or offload_weights without offload_activations: context and sync_fn change nothing, and the third
    result is None.
    context.disable() and context.enable() can be warmup hooks of make_graphed_callables. context.offload_synchronizer
    reports sizes (get_offloaded_total_size_mb, pinned_usage) and allocates or frees pinned memory (reserve_pinned,
    release_pinned).
    Errors: ValueError for num_layers not below model_layers, TypeError for an argument other than a bool or a stream.
    If pinned memory is exhausted, there is a RuntimeWarning, and the layer stays on the device.
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
            f"{op}: argument 'offload_weights' is True, which has no effect: parameters stay on the device, since "
            "their module holds them. Pass False; FSDP2 shards and offloads parameters.",
            UserWarning,
            stacklevel=3,
        )
    if not enabled or (offload_weights and not offload_activations):
        return (_IdleContext(), _identity, None) if manual_synchronization else (_IdleContext(), _identity)
    if os.environ.get("NVTE_CPU_OFFLOAD_V1", "0") == "1":
        _warn_v1_path()
    _check_options(num_layers, model_layers, offload_activations, manual_synchronization)
    if manual_synchronization:
        synchronizer = ManualOffloadSynchronizer(model_layers, retain_pinned_cpu_buffers, offload_stream)
    else:
        synchronizer = DefaultOffloadSynchronizer(model_layers, num_layers, retain_pinned_cpu_buffers, offload_stream)
    context = OffloadContext(synchronizer)
    sync = _sync_function(context)
    return (context, sync, synchronizer) if manual_synchronization else (context, sync)
