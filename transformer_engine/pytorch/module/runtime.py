"""A module's state between calls that is neither a parameter, a buffer nor an option: quantization with FP8 copies of
weights, weight gradients that wait, their observers, and the TPComms of its products. Graphs, probes and copies of
modules use it (`snapshot`, `restore`, `forget`, `divert_gradients`). Nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional.linear import ProductCall, TracedGradAccumulator
from transformer_engine.pytorch.module.parallel import tp_comm_of
from transformer_engine.pytorch.module.weight_grad import WeightGradStore, traced_grad_accumulator
from transformer_engine.pytorch.quantization.module.quantization import ModuleQuantization, Snapshot

# Names of these fields in the files of modules, for it and for its quantization. The lower ones are empty in files.
_QUANTIZATION = {
    "fp8_meta": "meta",
    "_parameters_recipe": "parameters_recipe",
    "fp8": "fp8",
    "fp8_calibration": "fp8_calibration",
    "_own": "own",
    "_token": "token",
    "_seen_region": "seen_region",
    "_unfollowed": "unfollowed",
}
_RUNTIME = {
    "_wgrad_stores": "stores",
    "_wgrad_hooks": "hooks",
    "_wgrad_products": "_described",
    "_exchanges": "tp_comms",
}


class Runtime:
    """Methods take the module as an argument; the runtime holds no reference to it, so that it does not keep it alive.

    stores: by product, the weight gradients that wait for backward_dw(). hooks: called after backward_dw(). tp_comms:
    the communication of products with other ranks, by the options that differ between them (module/parallel.py)."""

    def __init__(self, products: int) -> None:
        self.quantization = ModuleQuantization(products)
        self.stores: dict[str, WeightGradStore] = {}
        self.hooks: list[Callable[[], object]] = []
        self.diverted = False
        self._forget_made()

    def _forget_made(self) -> None:
        self.tp_comms: dict[tuple, _C.GroupTPComm] = {}
        self._described: dict[str, _C.WeightGradProduct] = {}  # filled at a product's first call

    # ---- for graphs, probes and copies ----

    def snapshot(self, module: torch.nn.Module, *, values: bool = True) -> Snapshot:
        """The argument of restore(): the module's state of quantization, with the values of its scales unless the
        caller keeps them. Weight gradients that wait are not in it."""
        return self.quantization.snapshot(module, values)

    def restore(self, snapshot: Snapshot) -> None:
        """As if the module had not run since the snapshot: the same objects, with the values that they had."""
        self.quantization.restore(snapshot)

    def forget(self) -> None:
        """The state of a new copy: everything that calls recompute is dropped; the recipe, scales, hooks and whether
        weight gradients wait stay."""
        self.quantization.forget()
        self._forget_made()

    @contextmanager
    def divert_gradients(self) -> Iterator[None]:
        """Inside, weight gradients go to autograd, not to main_grad (which need not exist) or to backward_dw()."""
        before = self.stores, self.diverted
        try:
            self.stores, self.diverted = {}, True
            yield
        finally:
            self.stores, self.diverted = before

    @contextmanager
    def hooks_silent(self) -> Iterator[None]:
        """Inside, backward_dw() calls no hooks."""
        hooks, self.hooks = self.hooks, []
        try:
            yield
        finally:
            self.hooks = hooks

    def weights_anew(self) -> Callable[[], None]:
        """Calls quantize weights again, into memory of their own, until the returned function is called: then the
        earlier copies are used again."""
        return self.quantization.weights.set_aside()

    def scaling_states(self) -> dict:
        """The module's fp8_meta: its scaling states by direction; the same dict while the module has them."""
        return self.quantization.meta

    def reads(self) -> tuple | None:
        """For a module that ran under autocast: the state that its products read besides the parameters."""
        quantization = self.quantization
        if quantization.token is None or not quantization.fp8:
            return None
        return quantization.own, dict(quantization.weights.kept)

    # ---- weight gradients that a backward does not return ----

    def grad_accumulator(
        self, module: torch.nn.Module, product: str, is_first_microbatch: bool | None
    ) -> _C.GradAccumulator | WeightGradStore | TracedGradAccumulator | None:
        """The destination of a product's weight gradient in this call; None: autograd."""
        store = self.stores.get(product)
        if not (module.fuse_wgrad_accumulation or store) or self.diverted or not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():
            weights = {name: getattr(module, name) for name in module._product_names(product)[0]}
            if not any(weight.requires_grad for weight in weights.values()):
                return None
            # The traced product refuses a store by name.
            return (
                store
                if store is not None
                else traced_grad_accumulator(type(module).__name__, weights, is_first_microbatch)
            )
        described = self._described.get(product)
        if described is None:
            described = self._described[product] = _C.WeightGradProduct(*module._product_names(product))
        return described.grad_accumulator(module, bool(module.fuse_wgrad_accumulation), is_first_microbatch, store)

    def call(
        self,
        module: torch.nn.Module,
        product: str,
        weight: torch.Tensor,
        inp: torch.Tensor,
        is_first_microbatch: bool | None,
        parallel_mode: str | None,
    ) -> ProductCall:
        """The arguments of a product of this call besides its tensors, for the functions of functional/linear.py."""
        quantization, own_weight = self.quantization.of_call(module, product, weight, is_first_microbatch)
        return {
            "grad_accumulator": self.grad_accumulator(module, product, is_first_microbatch),
            "quantization": quantization,
            "own_weight": own_weight,
            "tp_comm": None if module.tp_size == 1 else tp_comm_of(module, parallel_mode, inp),
        }

    def backward_dw(self, module: torch.nn.Module) -> None:
        due: list[tuple[WeightGradStore, list[torch.Tensor | None]]] = []
        for product, store in self.stores.items():
            weights = [getattr(module, name) for name in module._product_names(product)[0]]
            oldest = store.oldest()
            if oldest is not None:
                due.append((store, oldest.check(weights)))
            elif any(weight.requires_grad for weight in weights):
                raise RuntimeError(
                    f"{type(module).__name__}: backward_dw() was called, but no weight gradient of "
                    f"'{module._product_names(product)[0][0]}' is left to compute; call it once after each backward() "
                    "of a step that wanted that gradient."
                )
        for store, main_grads in due:
            store.oldest().compute(main_grads)
            store.pop()
        if self.stores:
            self.call_hooks()

    def call_hooks(self) -> None:
        for hook in self.hooks:
            hook()

    # ---- copies and files ----

    def shared(self) -> Runtime:
        """For another module with the same parameters: it continues from the same state, independently."""
        twin = Runtime.__new__(Runtime)
        twin.__dict__.update(vars(self))
        twin.quantization = self.quantization.shared()
        return twin

    def in_files(self) -> dict[str, object]:
        """The entries of a module's file, or of a copy of it, for this state: under the module's own names."""
        twin = self.shared()
        twin.forget()
        quantization = twin.quantization
        quantization.meta = {**quantization.meta, "fp8_group": None}
        quantization.meta.pop("scales_for_recompute", None)
        state = {name: getattr(quantization, field) for name, field in _QUANTIZATION.items()}
        state |= {name: getattr(twin, field) for name, field in _RUNTIME.items()}
        return state | {"_cached_weights": quantization.weights.kept}

    @classmethod
    def of_file(cls, state: dict[str, object]) -> Runtime:
        """The runtime of in_files(), whose names are removed from `state`."""
        runtime = cls(0)
        for names, owner in ((_QUANTIZATION, runtime.quantization), (_RUNTIME, runtime)):
            for name, field in names.items():
                if name in state:
                    setattr(owner, field, state.pop(name))
        state.pop("_cached_weights", None)
        return runtime

    def __getstate__(self) -> dict[str, object]:
        """For a copy that bypasses the module's own, as torch's parametrizations make them."""
        return self.in_files()

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(vars(Runtime.of_file(dict(state))))
