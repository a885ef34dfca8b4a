"""The base of all modules: parameters and their initialisation, options, checkpoint state. Modules compute
elsewhere."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed.userbuffers import (
    UserBufferQuantizationMode as UserBufferQuantizationMode,  # clients import these three here
)
from transformer_engine.pytorch.distributed.userbuffers import destroy_ub as destroy_ub
from transformer_engine.pytorch.distributed.userbuffers import initialize_ub as initialize_ub
from transformer_engine.pytorch.module.atomic_checkpoints import AtomicCheckpoints, is_extra_state
from transformer_engine.pytorch.module.config import ParameterConfig, ProductConfig
from transformer_engine.pytorch.module.flat_params import (
    FlatParams,
    flat_params_of,
    flatten_moved,
    kept_flat,
    renumber_marks,
    row_marks,
)
from transformer_engine.pytorch.module.parallel import group_by_name
from transformer_engine.pytorch.module.runtime import Runtime
from transformer_engine.pytorch.module.weight_grad import WeightGradStore
from transformer_engine.pytorch.module.weight_grad import _dummy_wgrads as _dummy_wgrads  # clients import both here
from transformer_engine.pytorch.module.weight_grad import get_dummy_wgrad as get_dummy_wgrad
from transformer_engine.pytorch.quantization.module.api import QuantizedModule
from transformer_engine.pytorch.quantization.module.primary_weights import converted_in_place, primary_weights
from transformer_engine.pytorch.quantization.state.autocast_state import current_state
from transformer_engine.pytorch.tensor import QuantizedTensor
from transformer_engine.pytorch.utils import get_default_init_method, resolve_device

InitMethod = Callable[[torch.Tensor], object]


default_init: InitMethod = get_default_init_method()  # of weights without an init_method


def get_workspace() -> torch.Tensor:
    """For clients that pass a workspace to general_gemm: empty, because the GEMMs here allocate their own."""
    return torch.empty(0, dtype=torch.uint8, device=resolve_device(None))


def refuse(op: str, capability: str, **arguments: object) -> None:
    """Raises for an argument that requests a capability which this version lacks and which would change the result."""
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(
                f"{op}: argument '{name}' is {value!r}, but {capability} is not available in this version; "
                f"leave '{name}' at its default."
            )


def check_choice(
    op: str, argument: str, value: object, available: tuple[object, ...], later: tuple[object, ...] = ()
) -> None:
    """Raises unless `value` is one of `available`; those of `later` are refused as not available yet."""
    if value in later:
        raise NotImplementedError(
            f"{op}: argument '{argument}' is {value!r}, which is not available in this version; "
            f"use {' or '.join(map(repr, available))}."
        )
    if value not in available:
        raise ValueError(f"{op}: argument '{argument}' is {value!r}, wanted one of {available + later}.")


class TransformerEngineBaseModule(QuantizedModule, AtomicCheckpoints):
    """Base of the modules. A subclass declares its parameters with `_declare`, then calls `reset_parameters`.

    runtime: state between calls that is neither a parameter, a buffer nor an option (module/runtime.py)."""

    tp_size: int = 1
    _tp_group_name: str | None = None
    tp_group = group_by_name

    def __init__(self) -> None:
        super().__init__()
        self._initializers: dict[str, InitMethod] = {}
        self._tags: dict[str, dict[str, object]] = {}
        self.fuse_wgrad_accumulation = False
        self.name: str | None = None
        # quantized_model_init around the construction; the parameters themselves may come later (device="meta")
        state = current_state()
        self.primary_weights_in_fp8 = state.parameters and bool(self._products)
        self.preserve_high_precision_init_val = self.primary_weights_in_fp8 and state.preserve_high_precision
        self.runtime = Runtime(len(self._products))

    def _setup(self, parameters: ParameterConfig) -> None:
        self.name = parameters.name
        dtype = torch.get_default_dtype() if parameters.params_dtype is None else parameters.params_dtype
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(
                f"{type(self).__name__}: argument 'params_dtype' is {dtype!r}, wanted torch.float32, torch.float16 or "
                "torch.bfloat16."
            )
        self.params_dtype = dtype
        self.device = resolve_device(parameters.device)
        self.get_rng_state_tracker = parameters.get_rng_state_tracker
        self.rng_tracker_name = parameters.rng_tracker_name

    def _declare(self, name: str, shape: Iterable[int], init: InitMethod, **tags: object) -> None:
        """Registers a parameter; `tags` become attributes on it (tensor_model_parallel, sequence_parallel, ...)."""
        self._declare_rows({name: None}, tuple(shape), init, **tags)

    def _declare_rows(
        self, splits: dict[str, int | None], shape: tuple[int, ...], init: InitMethod, **tags: object
    ) -> None:
        """Registers parameters that are consecutive rows of one buffer, so that noop_cat joins them without a copy.
        Each has a mark that names its flat parameter (`row_unit`)."""
        buffer = torch.empty(shape, dtype=self.params_dtype, device=self.device)
        first = 0
        for (name, rows), mark in zip(splits.items(), row_marks(len(splits)), strict=True):
            part = buffer if rows is None else buffer[first : first + rows]
            first += 0 if rows is None else rows
            self.register_parameter(name, torch.nn.Parameter(part))
            self._initializers[name] = init
            self._tags[name] = tags | mark
            self._tag(name)

    def _tag(self, name: str) -> None:
        for tag, value in self._tags[name].items():
            setattr(getattr(self, name), tag, value)

    def _tag_missing(self, *names: str) -> None:
        """Of these parameters, or all, which torch may have replaced. Marks that are there stay: users may have changed
        them."""
        for name in names or self._tags:
            parameter = self._parameters.get(name)
            for tag, value in self._tags[name].items() if parameter is not None else ():
                if not hasattr(parameter, tag):
                    setattr(parameter, tag, value)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialises the parameters in their order; those on the meta device are first allocated on a real one. With
        defer_init nothing happens, so that a meta module stays meta."""
        with kept_flat(self):
            if not defer_init:
                self._initialize()

    def _initialize(self) -> None:
        for name, init in self._initializers.items():
            parameter = getattr(self, name)
            if parameter.device.type == "meta":
                target = resolve_device(None) if self.device.type == "meta" else self.device
                parameter = torch.nn.Parameter(torch.empty_like(parameter, device=target), parameter.requires_grad)
                setattr(self, name, parameter)
            self._tag_missing(name)  # parameters that to_empty() made have no marks
            if isinstance(parameter, QuantizedTensor):
                parameter._values_to_come()
            fork = nullcontext()
            if self.get_rng_state_tracker is not None and init is not torch.nn.init.zeros_:
                tracker = self.get_rng_state_tracker()
                fork = tracker.fork() if self.rng_tracker_name is None else tracker.fork(self.rng_tracker_name)
            with fork, torch.no_grad():
                init(parameter)
        self.runtime.quantization.quantize_parameters(self)

    def _setup_linear(self, parameters: ParameterConfig, products: ProductConfig, prefixes: Sequence[str]) -> None:
        """Options of every module with products. prefixes: of the products ("" of Linear, "fc1", "fc2"), in the order
        in which backward() meets them."""
        self._setup(parameters)
        self.fuse_wgrad_accumulation = products.fuse_wgrad_accumulation
        if products.delay_wgrad_compute:  # before the parameters are declared, because they carry a mark of it
            self.runtime.stores = {prefix: WeightGradStore(delay_wgrad_compute=True) for prefix in prefixes}
        self.use_bias, self.return_bias = products.bias, products.return_bias
        self.apply_bias = self.use_bias and not self.return_bias

    # Weight gradients that a backward does not return.

    def _product_tags(self) -> dict[str, bool]:
        """Marks on a product's parameters: gradient hooks do not wait for backward() if gradients come later."""
        return {"skip_backward_post_hook": True} if self.runtime.stores else {}

    def _product_names(self, product: str) -> tuple[list[str], list[str]]:
        """The names of the weights and of the biases of a product, which are rows of one matrix."""
        raise NotImplementedError

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for backward_dw(): the option delay_wgrad_compute."""
        return bool(self.runtime.stores)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], object]) -> None:
        """hook() runs at the end of each backward_dw(), in the order of registration."""
        self.runtime.hooks.append(hook)

    def backward_dw(self) -> None:
        """Computes the weight (and bias) gradients that the oldest backward() left, then calls the registered hooks.

        The gradients equal those of an immediate backward bit for bit: .grad is set where it is None and added to
        otherwise, or main_grad is accumulated. Does nothing without delay_wgrad_compute. DistributedDataParallel
        reduces in backward(), before these gradients exist: reduce them in a registered hook.
        Errors: RuntimeError if no backward() has left any, if a tensor that a gradient is computed from was changed in
        place since, or if the parameter was replaced; ValueError for an unfit main_grad. Nothing is changed then, and
        the gradients still wait."""
        self.runtime.backward_dw(self)

    def drop_backward_dw(self) -> None:
        """Drops the gradients that wait for backward_dw(): for a step that is abandoned."""
        for store in self.runtime.stores.values():
            store.clear()

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Stores the group: a module without products communicates nothing over it."""
        self.tp_group = tp_group

    # Moves of parameters, files and copies.

    def row_units(self) -> list[FlatParams]:
        """The flat parameters of this module, without its submodules; a parameter in one piece is not among them."""
        return flat_params_of(self)

    def _unit_names(self) -> list[list[str]]:
        return [names for product in self._products for names in self._product_names(product)]

    def _settle(self, before: dict[tuple[str, ...], list[object]]) -> None:
        """Runs after anything that may have moved parameters. before: the places of flat parameters until then."""
        flatten_moved(self, before)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True):
        with kept_flat(self), converted_in_place(self, fn):
            super()._apply(fn, recurse)
        self._tag_missing()
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if keep_vars or torch.compiler.is_compiling():
            return
        # Savers look at storages: safetensors' and accelerate's keep one tensor of each, torch.save writes all of it.
        for key in map(prefix.__add__, self._parameters):
            value = destination.get(key)
            if type(value) is torch.Tensor:
                destination[key] = _C.own_storage(value)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        for _, name, weight in primary_weights(self):
            given = state_dict.get(prefix + name)
            if isinstance(given, torch.Tensor) and given.shape == weight.shape:
                weight._values_to_come()  # loaded values bring their own scale, however many steps the module has run
        before = dict(self._parameters)
        with kept_flat(self):  # assign=True replaces parameters
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        self.runtime.quantization.parameters_loaded(self)
        # Checkpoints of plain modules have no extra state, and load as well.
        key = prefix + "_extra_state"
        if key in missing:
            missing.remove(key)
        # Checkpoints of other versions have extra states of further parts, which hold no parameters.
        unexpected[:] = [key for key in unexpected if not (key.startswith(prefix) and is_extra_state(key))]
        for name in self._tags:
            if self._parameters.get(name) is not before.get(name):
                self._tag(name)  # the marks of another module may be on it
        self._tag_missing()

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, **self.runtime.in_files()}
        del state["runtime"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.runtime = Runtime.of_file(state := dict(state))
        super().__setstate__(state)
        renumber_marks(self._tags.values())
        for name, tags in self._tags.items():  # a copied parameter has its former number, or no mark
            if "row_unit" in tags and self._parameters.get(name) is not None:
                self._parameters[name].row_unit = tags["row_unit"]
        self._tag_missing()
        self._settle({})

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica.runtime = self.runtime.shared()
        return replica
