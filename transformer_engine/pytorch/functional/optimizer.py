"""Steps of optimizers, scaling and norms over lists of tensors, many tensors a launch. Formulas, dtypes, and the
arguments that may be on the device: transformer_engine/optimizer.h. Nothing is differentiable; outputs change in
place."""

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C

Tensors = Sequence[torch.Tensor]


def _call(name: str, lists: dict[str, Tensors], *rest: object) -> object:
    """The op `name` on these lists and the rest of its arguments."""
    given = [list(tensors) for tensors in lists.values()]
    if torch.compiler.is_compiling():
        return getattr(torch.ops.te, name)(*given, *rest)
    try:
        return getattr(_C, name)(*given, *rest)
    except TypeError as error:  # the binding's own message prints every element
        for argument, tensors in zip(lists, given):
            for i, t in enumerate(tensors):
                if not isinstance(t, torch.Tensor):
                    raise ValueError(f"{name}: '{argument}' {i} is {t!r}, wanted a tensor.") from error
        raise


def optimizer_adam(
    grads: Tensors,
    params: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    masters: Tensors = (),
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | torch.Tensor,
    decoupled: bool = True,
    bias_correction: bool = True,
    noop: torch.Tensor | None = None,
    inv_scale: torch.Tensor | None = None,
    clip: torch.Tensor | None = None,
    fp8: tuple[Tensors, Tensors, Tensors] | None = None,
    e5m2: bool = False,
) -> None:
    """m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g g; p -= lr (m / c1) / (sqrt(v / c2) + eps), c = 1 -
    beta^step or 1; weight decay in the update (decoupled) or in the gradient.

    Shapes: any; a tensor of each list has the shape and the strides of its parameter.
    Dtypes: grads, params float32, float16, bfloat16; moments float32, bfloat16; masters float32, or int16 remainders of
        bfloat16 params. lr, step: numbers, or float32 and int32 tensors of one element.
    noop: int32 or float32 [1]; if it is not 0, nothing is written. inv_scale, clip: float32 [1], multiply the
        gradients; with inv_scale the gradients are written back. fp8: scales, amaxes, inverse scales of params that are
        FP8 bytes (uint8), with float32 masters.
    Errors: ValueError naming the list and the mismatch; nothing is written then.
    """
    if not grads:
        return
    lr_tensor = lr if isinstance(lr, torch.Tensor) else None
    step_tensor = step if isinstance(step, torch.Tensor) else None
    scales, amaxes, scale_invs = ((), (), ()) if fp8 is None else fp8
    lists = {"grads": grads, "params": params, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "masters": masters}
    _call(
        "optimizer_adam",
        lists | {"scales": scales, "amaxes": amaxes, "scale_invs": scale_invs},
        *(noop, lr_tensor, step_tensor, inv_scale, clip),
        *(0.0 if lr_tensor is not None else lr, beta1, beta2, eps, weight_decay),
        *(0 if step_tensor is not None else step, decoupled, bias_correction, e5m2),
    )


def optimizer_sgd(
    grads: Tensors,
    params: Tensors,
    momentums: Tensors = (),
    copies: Tensors = (),
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    first_run: bool = False,
    wd_after_momentum: bool = False,
    scale: float = 1.0,
    noop: torch.Tensor | None = None,
) -> None:
    """b = momentum b + (1 - dampening) g, g in the first run; p -= lr b, nesterov: p -= lr (g + momentum b).

    Shapes, errors: as optimizer_adam. Dtypes: float32, float16, bfloat16, each list its own. scale multiplies the
    gradients as they are read. copies: the new params once more, in another dtype.
    """
    if not grads:
        return
    lists = {"grads": grads, "params": params, "momentums": momentums, "copies": copies}
    options = (noop, lr, weight_decay, momentum, dampening, nesterov, first_run, wd_after_momentum, scale)
    _call("optimizer_sgd", lists, *options)


def optimizer_scale(
    inputs: Tensors, outputs: Tensors, scale: float | torch.Tensor, *, noop: torch.Tensor | None = None
) -> None:
    """out = in * scale; `noop` (int32 or float32 [1]) becomes 1 if a product is Inf or NaN. A tensor of `outputs`
    may be the one in `inputs`. Dtypes: float32, float16, bfloat16, each list its own; scale: a number or float32 [1].
    """
    if not inputs:
        return
    on_device = isinstance(scale, torch.Tensor)
    lists = {"inputs": inputs, "outputs": outputs}
    _call("optimizer_scale", lists, noop, 1.0 if on_device else scale, scale if on_device else None)


def optimizer_l2norm(
    tensors: Tensors,
    *,
    noop: torch.Tensor,
    inv_scale: torch.Tensor | None = None,
    per_tensor: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(sqrt of the sum of squares of all tensors times inv_scale, float32 [1]; that of each, [n], or [0]).

    Sums in float64, in an order that depends on sizes alone. `noop` becomes 1 if the norm is Inf or NaN.
    Dtypes: float32, float16, bfloat16. Errors: ValueError for tensors that are not contiguous or on several devices.
    """
    return _call("optimizer_l2norm", {"tensors": tensors}, noop, inv_scale, per_tensor)


def optimizer_compute_scales(
    amaxes: Tensors,
    scales: Tensors,
    scale_invs: Tensors,
    *,
    max_fp8: float,
    force_pow_2_scales: bool = False,
    epsilon: float = 0.0,
) -> None:
    """scale = max_fp8 / max(amax, epsilon), by the rules of transformer_engine/quantize.h, and 1 / scale. float32."""
    if not amaxes:
        return
    lists = {"amaxes": amaxes, "scales": scales, "scale_invs": scale_invs}
    _call("optimizer_compute_scales", lists, max_fp8, force_pow_2_scales, epsilon)


def optimizer_count_step(step: torch.Tensor, noop: torch.Tensor | None = None) -> None:
    """step (int32 [1]) += 1, unless noop is set."""
    _call("optimizer_count_step", {}, step, noop)
