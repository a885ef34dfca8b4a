"""Linear products as functions: plain, behind a norm, behind an activation. One autograd family serves all three."""

from collections.abc import Callable, Sequence

import torch

from transformer_engine.pytorch import _C

# Where a weight's gradient goes when it is not simply returned: called in backward as sink(dy, operand, with_bias), it
# returns (dweight or None, dbias or None). Eager mode only.
Sink = Callable[[torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor | None, torch.Tensor | None]]


def _refuse_sinks(op: str, *sinks: Sink | None) -> None:
    if any(sink is not None for sink in sinks):
        raise NotImplementedError(
            f"{op}: fuse_wgrad_accumulation and delay_wgrad_compute are not available under torch.compile; build the "
            "module without them, or keep it out of the compiled region."
        )


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, sink: Sink | None = None
) -> torch.Tensor:
    """y = x weight^T + bias.

    Shapes: x [..., in_features], weight [out_features, in_features], bias [out_features] -> y [..., out_features].
    Dtypes: float32, float16, bfloat16, one for all (torch.autocast casts); float32 accumulation.
    Saves: x for weight's gradient, weight for x's; neither where that gradient is not wanted.
    Errors: ValueError naming the argument whose shape, dtype or device does not fit.
    """
    if torch.compiler.is_compiling():
        _refuse_sinks("linear", sink)
        return torch.ops.te.linear(x, weight, bias)
    return _C.linear(x, weight, bias, sink)


def normalization_linear(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rms: bool,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    recompute_output: bool = False,
    return_input: bool = False,
    sink: Sink | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = norm(h) weight^T + bias with h = x + residual (or x); RMSNorm when rms, else LayerNorm.

    Returns (y, norm output, h); h is an empty tensor where there was no residual, or x itself with return_input.
    Gradients may arrive at all three: what arrives at h is added inside the norm's backward.
    Shapes: x, residual, norm output, h [..., in_features]; y [..., out_features].
    Saves: h, the norm's statistics and output, gamma, weight; less where gradients are not wanted. recompute_output:
    not the norm's output, which the backward computes again, to the same bits, at the cost of the norm's forward.
    """
    args = (x, residual, gamma, beta, weight, bias, eps, rms, zero_centered_gamma, recompute_output)
    if torch.compiler.is_compiling():
        _refuse_sinks("normalization_linear", sink)
        y, norm_output, h = torch.ops.te.normalization_linear(*args)
        # The compiler fuses the residual's gradient by itself.
        return y, norm_output, x if return_input and residual is None else h
    return _C.normalization_linear(*args, return_input, sink)


def activation_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: str,
    params: Sequence[float] = (),
    sink: Sink | None = None,
) -> torch.Tensor:
    """y = act(x) weight^T + bias, the second half of an MLP. kind and params as in functional.activation.

    Saves: x (the pre-activation) and weight. The activation is not kept: the backward writes it again.
    """
    if torch.compiler.is_compiling():
        _refuse_sinks("activation_linear", sink)
        return torch.ops.te.activation_linear(x, weight, bias, kind, list(params))
    return _C.activation_linear(x, weight, bias, kind, list(params), sink)


def layernorm_mlp(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    fc1_weight: torch.Tensor,
    fc1_bias: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc2_bias: torch.Tensor | None,
    *,
    rms: bool,
    kind: str,
    eps: float = 1e-5,
    zero_centered_gamma: bool = False,
    params: Sequence[float] = (),
    residual: torch.Tensor | None = None,
    sinks: tuple[Sink | None, Sink | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """activation_linear(normalization_linear(x)), keeping only its input: the backward computes norm, first product and
    activation again, to the same bits. The second product is not repeated.

    Returns (y, norm output, h) as normalization_linear. Saves: h and the parameters.
    """
    args = (x, residual, gamma, beta, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    options = (eps, rms, zero_centered_gamma, kind, list(params))
    if torch.compiler.is_compiling():
        _refuse_sinks("layernorm_mlp", *sinks)
        return torch.ops.te.layernorm_mlp(*args, *options)
    return _C.layernorm_mlp(*args, *options, *sinks)


def linear_wgrad(dy: torch.Tensor, x: torch.Tensor, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(dweight = dy^T x, dbias = column sums of dy, or empty), the product that a linear node's backward runs."""
    return _C.linear_wgrad(dy, x, with_bias)


def noop_cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of several weights as one tensor; no copy where they lie one behind the other in one storage."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling():
        return torch.cat(tuple(parts))
    return _C.noop_cat(list(parts))
