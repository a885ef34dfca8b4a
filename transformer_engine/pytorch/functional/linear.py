"""Linear products as functions: plain, behind a norm, behind an activation. One autograd family serves all three."""

from collections.abc import Callable, Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.compiling import refuse

# Where a weight's gradient goes when it is not simply returned: a module's sink, or what is called in backward as
# sink(product, with_bias), a _C.MatrixProduct, and returns (dweight or None, dbias or None). Eager mode only.
Sink = _C.WeightGradSink | Callable[[_C.MatrixProduct, bool], tuple[torch.Tensor | None, torch.Tensor | None]]

# How the three products of a weight are quantized; its `spec`, plain integers, is what torch.compile can follow.
Quantization = _C.ProductQuantization | list[int] | None


def _refuse_sinks(op: str, *sinks: Sink | None) -> None:
    if any(sink is not None for sink in sinks):
        refuse(
            f"{op}: fuse_wgrad_accumulation and delay_wgrad_compute are not available under torch.compile; build the "
            "module without them, or keep it out of the compiled region."
        )


def _spec(quantization: Quantization) -> list[int]:
    if quantization is None:
        return []
    return quantization if isinstance(quantization, list) else quantization.spec


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    sink: Sink | None = None,
    quantization: Quantization = None,
    own_weight: _C.Quantized | None = None,
    keep_input: bool = False,
) -> torch.Tensor:
    """y = x weight^T + bias.

    Shapes: x [..., in_features], weight [out_features, in_features], bias [out_features] -> y [..., out_features].
    Dtypes: float32, float16, bfloat16, one for all (torch.autocast casts); float32 accumulation.
    quantization: the products are FP8 ones. own_weight: weight's FP8 copy, made before; weight serves autograd alone.
    Saves: x for weight's gradient, weight for x's; neither where that gradient is not wanted. Of FP8 operands the one
    direction that the backward reads; with keep_input x as it is, which the backward quantizes again.
    Errors: ValueError naming the argument whose shape, dtype or device does not fit.
    """
    if torch.compiler.is_compiling():
        _refuse_sinks("linear", sink)
        return torch.ops.te.linear(x, weight, bias, keep_input, _spec(quantization))
    return _C.linear(x, weight, bias, keep_input, sink, quantization, own_weight)


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
    return_output: bool = True,
    recompute_output: bool = False,
    return_input: bool = False,
    sink: Sink | None = None,
    quantization: Quantization = None,
    own_weight: _C.Quantized | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = norm(h) weight^T + bias with h = x + residual (or x); RMSNorm when rms, else LayerNorm.

    Returns (y, norm output, h); h is an empty tensor where there was no residual, or x itself with return_input; the
    norm's output is empty where it is quantized and nobody asked for it (return_output=False).
    Gradients may arrive at all three: what arrives at h is added inside the norm's backward.
    Shapes: x, residual, norm output, h [..., in_features]; y [..., out_features].
    quantization, own_weight: as in linear.
    Saves: h, the norm's statistics and output, gamma, weight; less where gradients are not wanted. recompute_output:
    not the norm's output, which the backward computes again, to the same bits, at the cost of the norm's forward.
    """
    args = (x, residual, gamma, beta, weight, bias, eps, rms, zero_centered_gamma, return_output, recompute_output)
    if torch.compiler.is_compiling():
        _refuse_sinks("normalization_linear", sink)
        y, norm_output, h = torch.ops.te.normalization_linear(*args, _spec(quantization))
        # The compiler fuses the residual's gradient by itself.
        return y, norm_output, x if return_input and residual is None else h
    return _C.normalization_linear(*args, return_input, sink, quantization, own_weight)


def activation_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: str,
    params: Sequence[float] = (),
    sink: Sink | None = None,
    quantization: Quantization = None,
    own_weight: _C.Quantized | None = None,
) -> torch.Tensor:
    """y = act(x) weight^T + bias, the second half of an MLP. kind and params as in functional.activation.

    Saves: x (the pre-activation) and weight. The activation is not kept: the backward writes it again.
    """
    if torch.compiler.is_compiling():
        _refuse_sinks("activation_linear", sink)
        return torch.ops.te.activation_linear(x, weight, bias, kind, list(params), _spec(quantization))
    return _C.activation_linear(x, weight, bias, kind, list(params), sink, quantization, own_weight)


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
    return_output: bool = True,
    recompute_output: bool = False,
    recompute: bool = False,
    fp8_pre_activation: bool = False,
    sinks: tuple[Sink | None, Sink | None] = (None, None),
    quantizations: tuple[Quantization, Quantization] = (None, None),
    own_weights: tuple[_C.Quantized | None, _C.Quantized | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """activation_linear(normalization_linear(x)) as one node, to the same bits.

    Returns (y, norm output, h) as normalization_linear. Saves: h, statistics, the norm's output, the pre-activation and
    the parameters. recompute: h and the parameters alone, and the backward computes norm, first product and activation
    again, to the same bits; the second product is not repeated. fp8_pre_activation: the pre-activation as E4M3 in
    blocks of 1 x 128, and the backward takes the activation and its gradient of that.
    """
    args = (x, residual, gamma, beta, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    options = (eps, rms, zero_centered_gamma, kind, list(params))
    kept = (return_output, recompute_output, recompute, fp8_pre_activation)
    if torch.compiler.is_compiling():
        _refuse_sinks("layernorm_mlp", *sinks)
        return torch.ops.te.layernorm_mlp(*args, *options, *kept, *map(_spec, quantizations))
    return _C.layernorm_mlp(*args, *options, *kept, *sinks, *quantizations, *own_weights)


def noop_cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of several weights as one tensor; no copy where they lie one behind the other in one storage."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling():
        return torch.cat(tuple(parts))
    return _C.noop_cat(list(parts))
