"""MultiTensorApply and the functions that it is called with, by the optimizer ops. They take (chunk_size, noop_flag,
tensor_lists, ...); the ops choose their own chunks, so chunk_size changes nothing. No optimizer is here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.functional import optimizer as ops
from transformer_engine.pytorch.tensor.arguments import fp8_dtype_of

TensorLists = Sequence[Sequence[torch.Tensor]]

CHUNK_SIZE = 2048 * 32


class MultiTensorApply:
    """apply(op, noop_flag, tensor_lists, *args) -> op(chunk_size, noop_flag, tensor_lists, *args), without the tensors
    that are empty in all lists; None if all of them are. Errors: ValueError for no lists."""

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = _chunk_size("MultiTensorApply", chunk_size)

    def __call__(self, op: Callable, noop_flag: torch.Tensor, tensor_lists: TensorLists, *args: object) -> object:
        lists = [list(each) for each in tensor_lists]
        if not lists:
            raise ValueError("multi_tensor_applier: argument 'tensor_lists' is empty, wanted a list of lists.")
        if len({len(each) for each in lists}) == 1:  # op raises for other lists
            kept = [row for row in zip(*lists) if any(not _is_empty(t) for t in row)]
            if not kept:
                return None
            lists = [list(each) for each in zip(*kept)]
        return op(self.chunk_size, noop_flag, lists, *args)


def _is_empty(t: object) -> bool:
    return isinstance(t, torch.Tensor) and t.numel() == 0


def _chunk_size(op: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{op}: argument 'chunk_size' is {value!r}, wanted a number of elements.")
    return value


def _checked(op: str, chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, *names: str) -> TensorLists:
    """The lists, one for each name; a name in brackets may be missing. The flag is checked even if the function does
    not read it."""
    _chunk_size(op, chunk_size)
    if (
        not isinstance(noop_flag, torch.Tensor)
        or noop_flag.numel() != 1
        or noop_flag.dtype not in (torch.int32, torch.float32)
    ):
        raise ValueError(
            f"{op}: argument 'noop_flag' is {noop_flag!r}, wanted an int32 or float32 tensor of one element."
        )
    wanted = [name for name in names if not name.startswith("[")]
    if not len(wanted) <= len(tensor_lists) <= len(names):
        raise ValueError(f"{op}: argument 'tensor_lists' has {len(tensor_lists)} lists, wanted {', '.join(names)}.")
    return tensor_lists


def _is_decoupled(op: str, mode: int) -> bool:
    if mode not in (0, 1):
        raise ValueError(f"{op}: argument 'mode' is {mode!r}, wanted 0 (weight decay in the gradient) or 1 (AdamW).")
    return bool(mode)


def _tensor(op: str, argument: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{op}: argument '{argument}' is {value!r}, wanted a tensor of one element on the device.")
    return value


multi_tensor_applier = MultiTensorApply(CHUNK_SIZE)


# ---- scaling and norms ----


@torch.no_grad()
def multi_tensor_scale(chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """out = in * scale over [in, out]; noop_flag becomes 1 if a product is Inf or NaN."""
    given = _checked("multi_tensor_scale", chunk_size, noop_flag, tensor_lists, "in", "out")
    ops.optimizer_scale(*given, float(scale), noop=noop_flag)


@torch.no_grad()
def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, scale: torch.Tensor
) -> None:
    """As multi_tensor_scale; scale: float32 [1] on the device."""
    op = "multi_tensor_scale_tensor"
    given = _checked(op, chunk_size, noop_flag, tensor_lists, "in", "out")
    ops.optimizer_scale(*given, _tensor(op, "scale", scale), noop=noop_flag)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: torch.Tensor, tensor_lists: TensorLists, per_tensor: bool | None = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of all tensors of [x], float32 [1]; of each, [n], or [0]). noop_flag becomes 1 if it is Inf or NaN."""
    (given,) = _checked("multi_tensor_l2norm", chunk_size, noop_flag, tensor_lists, "x")
    return ops.optimizer_l2norm(given, noop=noop_flag, per_tensor=bool(per_tensor))


@torch.no_grad()
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    inv_scale: torch.Tensor,
    per_tensor: bool | None = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As multi_tensor_l2norm, of x * inv_scale (float32 [1]); x is unchanged."""
    op = "multi_tensor_unscale_l2norm"
    (given,) = _checked(op, chunk_size, noop_flag, tensor_lists, "x")
    inv_scale = _tensor(op, "inv_scale", inv_scale)
    return ops.optimizer_l2norm(given, noop=noop_flag, inv_scale=inv_scale, per_tensor=bool(per_tensor))


@torch.no_grad()
def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    max_fp8: float,
    force_pow_2_scales: bool = False,
    epsilon: float = 0.0,
) -> None:
    """scale = max_fp8 / max(amax, epsilon), scale_inv = 1 / scale over [amax, scale, scale_inv]."""
    op = "multi_tensor_compute_scale_and_scale_inv"
    given = _checked(op, chunk_size, noop_flag, tensor_lists, "amax", "scale", "scale_inv")
    ops.optimizer_compute_scales(*given, max_fp8=max_fp8, force_pow_2_scales=force_pow_2_scales, epsilon=epsilon)


# ---- steps ----


@torch.no_grad()
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """A step of Adam over [g, p, m, v] or [g, p, m, v, master]. mode: 0 L2, 1 AdamW. Infs and NaNs pass; the flag is
    not read."""
    op = "multi_tensor_adam"
    given = _checked(op, chunk_size, noop_flag, tensor_lists, "g", "p", "m", "v", "[master]")
    _adam(op, given, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)


def _adam(
    op: str,
    given: TensorLists,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: int | torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    **device: object,
) -> None:
    ops.optimizer_adam(
        *given,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        decoupled=_is_decoupled(op, mode),
        bias_correction=bool(bias_correction),
        **device,
    )


@torch.no_grad()
def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """As multi_tensor_adam over [g, p, m, v, remainder]: bfloat16 weights, the low halves of their masters (int16)."""
    op = "multi_tensor_adam_param_remainder"
    given = _checked(op, chunk_size, noop_flag, tensor_lists, "g", "p", "m", "v", "remainder")
    for i, t in enumerate(given[4]):
        if t.dtype is not torch.int16:
            raise ValueError(f"{op}: 'remainder' {i} has dtype {t.dtype}, wanted int16.")
    _adam(op, given, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay)


@torch.no_grad()
def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: DType,
) -> None:
    """As multi_tensor_adam over [g, p, m, v, master, scale, amax, scale_inv]: p are the bytes of FP8 weights, written
    by the given scale; amax is raised, and scale_inv computed."""
    op = "multi_tensor_adam_fp8"
    names = ("g", "p", "m", "v", "master", "scale", "amax", "scale_inv")
    *given, scales, amaxes, scale_invs = _checked(op, chunk_size, noop_flag, tensor_lists, *names)
    e5m2 = fp8_dtype_of(op, fp8_dtype) is DType.kFloat8E5M2
    fp8 = (scales, amaxes, scale_invs)
    _adam(op, given, lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, fp8=fp8, e5m2=e5m2)


@torch.no_grad()
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """As multi_tensor_adam over [g, p, m, v], with lr (float32 [1]) and step (int32 [1]) on the device. g = g *
    inv_scale, in place. A flag that holds anything but 0 skips the whole step."""
    op = "multi_tensor_adam_capturable"
    given = _checked(op, chunk_size, noop_flag, tensor_lists, "g", "p", "m", "v")
    numbers = beta1, beta2, eps, mode, bias_correction, weight_decay
    _capturable(op, given, noop_flag, lr, step, inv_scale, *numbers)


@torch.no_grad()
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    lr: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: torch.Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: torch.Tensor,
) -> None:
    """As multi_tensor_adam_capturable over [g, p, m, v, master]."""
    op = "multi_tensor_adam_capturable_master"
    given = _checked(op, chunk_size, noop_flag, tensor_lists, "g", "p", "m", "v", "master")
    numbers = beta1, beta2, eps, mode, bias_correction, weight_decay
    _capturable(op, given, noop_flag, lr, step, inv_scale, *numbers)


def _capturable(
    op: str, given: TensorLists, noop_flag: torch.Tensor, lr: object, step: object, inv_scale: object, *numbers: float
) -> None:
    """numbers: beta1, beta2, eps, mode, bias_correction, weight_decay."""
    lr, step = _tensor(op, "lr", lr), _tensor(op, "step", step)
    on_device = {"noop": noop_flag, "inv_scale": _tensor(op, "inv_scale", inv_scale)}
    _adam(op, given, lr, *numbers[:3], step, *numbers[3:], **on_device)


@torch.no_grad()
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """A step of SGD over [g, p, momentum] or [g, p, momentum, copy]: copy becomes p in its own dtype. scale multiplies
    g as it is read. A flag that holds anything but 0 skips the step."""
    given = _checked("multi_tensor_sgd", chunk_size, noop_flag, tensor_lists, "g", "p", "momentum", "[copy]")
    ops.optimizer_sgd(
        *given,
        lr=lr,
        weight_decay=wd,
        momentum=momentum,
        dampening=dampening,
        nesterov=bool(nesterov),
        first_run=bool(first_run),
        wd_after_momentum=bool(wd_after_momentum),
        scale=scale,
        noop=noop_flag,
    )
