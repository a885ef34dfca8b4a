"""A callable over static tensors: the forward, backward and delayed weight gradients that graphs are captured from.

- The schedule decides the order; nothing is kept that a graph does not need.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from transformer_engine.pytorch._internal.capture_flag import as_captured
from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.describe import OP, describe_tensor
from transformer_engine.pytorch.graph.memory.buffers import version_of
from transformer_engine.pytorch.graph.recorded.quantization import Quantization, our_modules
from transformer_engine.pytorch.graph.replay.signature import Signature
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.weight_grad import Pending, WeightGradStore, accumulation_noted


class CallModes:
    """The present modes that a call depends on: torch.autocast, grad mode and inference mode."""

    def __init__(self, device: str) -> None:
        self.device, self.grad = device, torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        enabled, dtype = self.autocast
        with (
            as_captured(),
            torch.inference_mode(self.inference),  # a replay of the CPU backend may run in another mode
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device, dtype=dtype, enabled=enabled, cache_enabled=False),
        ):
            yield


def _drain(store: WeightGradStore) -> list[Pending]:
    drained = []
    while store.oldest() is not None:
        drained.append(store.pop())
    return drained


@contextmanager
def _tensor_hooks_disabled(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Hooks of Tensor.register_hook() run when a gradient leaves the node of the replay, so they must not run
    inside."""
    hooked = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in hooked:
            hooks.update(before)


def _restore_stores(drained: list[tuple[WeightGradStore, list[Pending]]]) -> None:
    """Each store gets its previous entries back, and loses all others."""
    for store, entries in drained:
        store.clear()
        for pending in entries:
            store.put(pending)


class StaticCallable:
    """A callable with its static inputs. forward(), backward() and wgrad() return the tensors that they make, which the
    graph keeps. The CPU backend calls them at each replay."""

    def __init__(
        self,
        function: Callable,
        module: object,
        signature: Signature,
        inputs: list[torch.Tensor],
        modes: CallModes,
        quantization: Quantization,
    ) -> None:
        self.function, self.signature, self.inputs, self.modes = function, signature, inputs, modes
        self.module, self.quantization = module, quantization
        self.parts = our_modules(module)
        self.stores = [store for part in self.parts for store in part.runtime.stores.values()]
        parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
        self.parameters = [p for p in parameters if p.requires_grad]
        self.frozen = [p for p in parameters if not p.requires_grad]
        self.inputs_requiring_grad = [i for i, t in enumerate(inputs) if t.requires_grad]  # indices
        self.grad_outputs: list[torch.Tensor] = []
        self.static_outputs_with_grad: list[torch.Tensor] = []  # the static tensors of outputs_with_grad
        self.retain_graph = False
        self.guarded_inputs: list[int] = []  # which a caller must not write before the backward
        self.guarded_results: list[int] = []
        self.guarded_module_tensors: list[torch.Tensor] = []  # the same for parameters and buffers
        self.result_leaves: list[object] = []
        self.outputs_with_grad: list[torch.Tensor] = []  # with their autograd graph
        self.pending: list[tuple[WeightGradStore, Pending]] = []  # delayed by backward
        self.delayed_modules: list[TransformerEngineBaseModule] = []
        # Parameters, by id, whose gradients backward, or wgrad, adds to main_grad. Code of a module that is not
        # captured may compute those of others.
        self.accumulated_by_backward: set[int] = set()
        self.accumulated_by_wgrad: set[int] = set()
        # Taken here, since a captured module has another backward_dw.
        self.eager_backward_dw = {id(part): part.backward_dw for part in self.parts}

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """The same parameters require gradients as at the capture; the CPU backend runs this again later."""
        changed = [p for p in self.parameters if not p.requires_grad] + [p for p in self.frozen if p.requires_grad]
        for p in changed:
            p.requires_grad_(not p.requires_grad)
        try:
            yield
        finally:
            for p in changed:
                p.requires_grad_(not p.requires_grad)

    def forward(self) -> list[torch.Tensor]:
        args, kwargs = self.signature.unflatten(self.inputs)
        versions = [version_of(t) for t in self.inputs]
        with self._as_captured(), self.modes.restored(), self.quantization(self.parts):
            leaves, self.result_spec = pytree.tree_flatten(self.function(*args, **kwargs))
        self.mutated_inputs = [i for i, t in enumerate(self.inputs) if version_of(t) != versions[i]]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.result_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.differentiable = [t.requires_grad for t in tensors]
        self.outputs_with_grad = [t for t in tensors if t.requires_grad]
        return tensors

    def has_backward(self) -> bool:
        return bool(self.outputs_with_grad) and bool(self.inputs_requiring_grad or self.parameters)

    def delayed_params(self) -> set[int]:
        """The parameters (by id) whose gradients the last backward delayed until backward_dw()."""
        products = [pending.product for _, pending in self.pending]
        return {id(p) for product in products for p in (*product.weights, *product.biases)}

    def backward(self) -> list[torch.Tensor | None]:
        """Gradients of the inputs that require one, then of the parameters."""
        surface = [self.inputs[i] for i in self.inputs_requiring_grad] + self.parameters
        drained = [(store, _drain(store)) for store in self.stores]
        try:
            accumulation, outputs = accumulation_noted(), self.outputs_with_grad
            with (
                self._as_captured(),
                _tensor_hooks_disabled(self.parameters),
                accumulation as self.accumulated_by_backward,
            ):
                grads = torch.autograd.grad(
                    outputs, surface, self.grad_outputs, retain_graph=self.retain_graph, allow_unused=True
                )
            self.pending = [(store, pending) for store in self.stores for pending in _drain(store)]
        finally:
            _restore_stores(drained)
        self._check_layouts(grads)
        if not self.retain_graph:
            self.outputs_with_grad = []
        filled = {id(store) for store, _ in self.pending}
        self.delayed_modules = [
            part for part in self.parts if any(id(s) in filled for s in part.runtime.stores.values())
        ]
        return list(grads)

    def _check_layouts(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        for i, grad in enumerate(grads):
            if grad is not None and (grad.layout is not torch.strided or grad.is_nested):
                if i < len(self.inputs_requiring_grad):
                    name = self.signature.names[self.signature.tensor_indices[self.inputs_requiring_grad[i]]]
                else:
                    name = f"a parameter of shape {list(self.parameters[i - len(self.inputs_requiring_grad)].shape)}"
                raise ValueError(
                    f"{OP}: the gradient of {name} of {self.signature.label} is {describe_tensor(grad)}, but a graph "
                    "can write only to dense memory; make the gradient dense (sparse=False of an embedding)."
                )

    def wgrad(self) -> list[torch.Tensor | None]:
        """The gradients that backward_dw() adds to each .grad; those of main_grad are added here."""
        grads = [p.grad for p in self.parameters]
        drained = [(store, _drain(store)) for store in self.stores]
        try:
            for p in self.parameters:
                p.grad = None
            for store, pending in self.pending:
                store.put(pending)
            with ExitStack() as hooks_off, self._as_captured(), accumulation_noted() as self.accumulated_by_wgrad:
                for part in self.delayed_modules:
                    hooks_off.enter_context(part.runtime.hooks_silent())
                for part in self.delayed_modules:
                    self.eager_backward_dw[id(part)]()
            return [p.grad for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, grads, strict=True):
                p.grad = grad
            _restore_stores(drained)
            self.pending = []

    def drop_tensors(self) -> None:
        """Drops every tensor except parameters."""
        self.inputs, self.grad_outputs, self.outputs_with_grad, self.result_leaves, self.pending = [], [], [], [], []
        self.guarded_module_tensors = []
