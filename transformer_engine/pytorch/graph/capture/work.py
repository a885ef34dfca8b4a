"""What graphs are captured from: one pass of a callable over static tensors, forward, backward and delayed weight
gradients. Decides nothing about when, and keeps nothing that a graph does not need."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from transformer_engine.pytorch._internal.capture_flag import as_captured
from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.describe import OP, form_of
from transformer_engine.pytorch.graph.memory.buffers import version_of
from transformer_engine.pytorch.graph.recorded.quantization import Quantization, our_modules
from transformer_engine.pytorch.graph.replay.arguments import Signature
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.weight_grad import Pending, WeightGradStore, accumulation_noted


class Ambient:
    """The modes that a call depends on, as they are now: autocast, whether gradients are recorded, inference mode."""

    def __init__(self, device: str) -> None:
        self.device, self.grad = device, torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        enabled, dtype = self.autocast
        with (
            as_captured(),
            torch.inference_mode(self.inference),  # the CPU's call may come in another mode
            torch.set_grad_enabled(self.grad),
            torch.autocast(self.device, dtype=dtype, enabled=enabled, cache_enabled=False),
        ):
            yield


def _emptied(store: WeightGradStore) -> list[Pending]:
    left = []
    while store.oldest() is not None:
        left.append(store.pop())
    return left


@contextmanager
def _without_hooks(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """Hooks of Tensor.register_hook() are called where a gradient leaves the replay's node, not inside too."""
    hooked = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in hooked:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in hooked:
            hooks.update(before)


def _put_back(others: list[tuple[WeightGradStore, list[Pending]]]) -> None:
    """Each store has what it had before, and nothing beside."""
    for store, left in others:
        store.clear()
        for pending in left:
            store.put(pending)


class Work:
    """A callable with its static inputs. `forward`, `backward` and `wgrad` return the tensors that they made, for the
    graph to keep; they run again each time on a CPU, where they stand in for a graph."""

    def __init__(
        self,
        function: Callable,
        module: object,
        signature: Signature,
        inputs: list[torch.Tensor],
        ambient: Ambient,
        quantization: Quantization,
    ) -> None:
        self.function, self.signature, self.inputs, self.ambient = function, signature, inputs, ambient
        self.module, self.quantization = module, quantization
        self.parts = our_modules(module)
        self.stores = [store for part in self.parts for store in part.runtime.stores.values()]
        parameters = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
        self.parameters = [p for p in parameters if p.requires_grad]
        self.frozen = [p for p in parameters if not p.requires_grad]
        self.wanted = [i for i, t in enumerate(inputs) if t.requires_grad]  # inputs with gradients
        self.grad_outputs: list[torch.Tensor] = []
        self.static_live: list[torch.Tensor] = []  # the static tensors of `live`
        self.retain = False
        self.guarded_inputs: list[int] = []  # not to be written to before the backward, where a caller holds them
        self.guarded_results: list[int] = []
        self.guarded_held: list[torch.Tensor] = []  # parameters and buffers, as guarded inputs
        self.result: list[object] = []
        self.live: list[torch.Tensor] = []  # outputs that want gradients, with their history
        self.pending: list[tuple[WeightGradStore, Pending]] = []  # (store, what backward left there)
        self.delaying: list[TransformerEngineBaseModule] = []
        # Parameters, by id, whose gradients backward, or wgrad, adds to main_grad; others may be left to what is not
        # captured of their module.
        self.accumulated: set[int] = set()
        self.accumulated_later: set[int] = set()
        self.backward_dw = {id(part): part.backward_dw for part in self.parts}  # a captured module has another one

    @contextmanager
    def _as_captured(self) -> Iterator[None]:
        """The same parameters want gradients: the CPU runs this again when they were frozen, or no longer are."""
        changed = [p for p in self.parameters if not p.requires_grad] + [p for p in self.frozen if p.requires_grad]
        for p in changed:
            p.requires_grad_(not p.requires_grad)
        try:
            yield
        finally:
            for p in changed:
                p.requires_grad_(not p.requires_grad)

    def forward(self) -> list[torch.Tensor]:
        args, kwargs = self.signature.filled(self.inputs)
        versions = [version_of(t) for t in self.inputs]
        with self._as_captured(), self.ambient.restored(), self.quantization(self.parts):
            leaves, self.form = pytree.tree_flatten(self.function(*args, **kwargs))
        self.written = [i for i, t in enumerate(self.inputs) if version_of(t) != versions[i]]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.result = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self.differentiable = [t.requires_grad for t in tensors]
        self.live = [t for t in tensors if t.requires_grad]
        return tensors

    def has_backward(self) -> bool:
        return bool(self.live) and bool(self.wanted or self.parameters)

    def left_for_later(self) -> set[int]:
        """The parameters (by id) whose gradients the last backward left to backward_dw()."""
        products = [left.product for _, left in self.pending]
        return {id(p) for product in products for p in (*product.weights, *product.biases)}

    def backward(self) -> list[torch.Tensor | None]:
        """Gradients of the wanted inputs, then of the parameters."""
        surface = [self.inputs[i] for i in self.wanted] + self.parameters
        others = [(store, _emptied(store)) for store in self.stores]
        try:
            noted = accumulation_noted()
            with self._as_captured(), _without_hooks(self.parameters), noted as self.accumulated:
                grads = torch.autograd.grad(
                    self.live, surface, self.grad_outputs, retain_graph=self.retain, allow_unused=True
                )
            self.pending = [(store, left) for store in self.stores for left in _emptied(store)]
        finally:
            _put_back(others)
        self._check_layouts(grads)
        if not self.retain:
            self.live = []
        mine = {id(store) for store, _ in self.pending}
        self.delaying = [part for part in self.parts if any(id(s) in mine for s in part.runtime.stores.values())]
        return list(grads)

    def _check_layouts(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        for i, grad in enumerate(grads):
            if grad is not None and (grad.layout is not torch.strided or grad.is_nested):
                if i < len(self.wanted):
                    name = self.signature.names[self.signature.slots[self.wanted[i]]]
                else:
                    name = f"a parameter of shape {list(self.parameters[i - len(self.wanted)].shape)}"
                raise ValueError(
                    f"{OP}: the gradient of {name} of {self.signature.label} is {form_of(grad)}, and a graph writes to "
                    "memory that stays, which such a tensor has not; make it dense (sparse=False of an embedding)."
                )

    def wgrad(self) -> list[torch.Tensor | None]:
        """What backward_dw() adds to each parameter's .grad; main_grads are added to here."""
        grads = [p.grad for p in self.parameters]
        others = [(store, _emptied(store)) for store in self.stores]
        try:
            for p in self.parameters:
                p.grad = None
            for store, left in self.pending:
                store.put(left)
            with ExitStack() as silent, self._as_captured(), accumulation_noted() as self.accumulated_later:
                for part in self.delaying:
                    silent.enter_context(part.runtime.hooks_silent())
                for part in self.delaying:
                    self.backward_dw[id(part)]()
            return [p.grad for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, grads, strict=True):
                p.grad = grad
            _put_back(others)
            self.pending = []

    def forget(self) -> None:
        """Drops every tensor that is no parameter."""
        self.inputs, self.grad_outputs, self.live, self.result, self.pending = [], [], [], [], []
        self.guarded_held = []
