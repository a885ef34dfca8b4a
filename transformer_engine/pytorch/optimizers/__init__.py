"""Fused optimizers and the multi-tensor functions: the names that clients import. None is here yet."""

from collections.abc import Callable, Iterable

import torch

from transformer_engine.pytorch._absent import absent

_OPTIMIZERS = "fused optimizers are"
_FUNCTIONS = "multi-tensor functions are"
_FOREACH = "use torch._foreach_mul and its like"


@absent(_OPTIMIZERS, "use torch.optim.AdamW(fused=True)")
class FusedAdam(torch.optim.Optimizer):
    """Adam in one launch."""

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None: ...


@absent(_OPTIMIZERS, "use torch.optim.SGD(fused=True)")
class FusedSGD(torch.optim.Optimizer):
    """SGD in one launch."""

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None: ...


@absent(_FUNCTIONS, _FOREACH)
def multi_tensor_applier(op: Callable, noop_flag_buffer: torch.Tensor, tensor_lists: list, *args: object) -> object:
    """Calls a multi-tensor function on lists of tensors."""


@absent(_FUNCTIONS, "use torch.nn.utils.get_total_norm")
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors, and of each."""


@absent(_FUNCTIONS, "use torch.nn.utils.get_total_norm")
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, inv_scale: torch.Tensor, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """As multi_tensor_l2norm, of the tensors times a scale."""


@absent(_FUNCTIONS, _FOREACH)
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, scale: float) -> None:
    """Copies tensors, scaled."""


@absent(_FUNCTIONS, _FOREACH)
def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, scale: torch.Tensor
) -> None:
    """Copies tensors, scaled by a number on the device."""


@absent(_FUNCTIONS, "use torch.optim.AdamW(fused=True)")
def multi_tensor_adam(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, *args: object) -> None:
    """One step of Adam."""


@absent(_FUNCTIONS, "use torch.optim.SGD(fused=True)")
def multi_tensor_sgd(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: list, *args: object) -> None:
    """One step of SGD."""
