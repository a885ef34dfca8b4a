"""Linear products as functions: plain, after a norm, after an activation. One autograd family serves all three."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypedDict

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.compiling import refuse

# The destination of a weight's gradient other than autograd: a module's gradient accumulator, or a function that the
# backward calls as grad_accumulator(product, with_bias) with product a _C.WgradTask, and that returns (dweight or None,
# dbias or None). Eager mode only.
GradAccumulator = _C.GradAccumulator | Callable[[_C.WgradTask, bool], tuple[torch.Tensor | None, torch.Tensor | None]]

# How the three products of a weight are quantized; torch.compile follows its `spec`, plain integers.
Quantization = _C.ProductQuantization | list[int] | None


class TracedGradAccumulator(NamedTuple):
    """A gradient accumulator for torch.compile: the main_grads of a product's weights, as its forward read them."""

    main_grads: list[torch.Tensor]
    targets: list[tuple[int, int]]  # each weight's rows, and 0: add to the next main_grad, 1: overwrite it, -1: none


class _Kept(torch.autograd.Function):
    """Tensors that may be written between a traced forward and its backward.

    torch.compile saves every tensor that a backward reads as if by save_for_backward, and refuses one whose version has
    changed: another microbatch's backward ran before, or that of a layer whose main_grad shares the buffer. An autograd
    function that stores tensors on ctx itself is not checked for versions."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.tensors = tensors
        return weight.new_empty(())

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[None, ...]:
        for tensor in ctx.tensors:  # a tensor that the backward does not read would not be saved
            tensor.detach()
        return (None,) * (1 + len(ctx.tensors))


def _traced(
    op: str,
    call: object,
    arguments: tuple,
    *products: tuple[torch.Tensor, GradAccumulator | TracedGradAccumulator | None],
):
    """call(*arguments), or its overload that adds to main_grads; products: each weight and its gradient accumulator."""
    main_grads: list[torch.Tensor] = []
    targets: list[int] = []
    for number, (weight, grad_accumulator) in enumerate(products):
        if grad_accumulator is None:
            continue
        if not isinstance(grad_accumulator, TracedGradAccumulator):
            refuse(
                f"{op}: delay_wgrad_compute and gradient accumulators that are functions are not available under "
                "torch.compile; build the module without them, or keep it out of the compiled region."
            )
        _Kept.apply(weight, *grad_accumulator.main_grads)
        main_grads.extend(grad_accumulator.main_grads)
        for rows, what in grad_accumulator.targets:
            targets.extend((number, rows, what))
    if not targets:
        return call(*arguments)
    return call.main_grad(*arguments, main_grads, targets)


class Parallel(NamedTuple):
    """How a product is divided over a group, in a form that torch.compile can follow: that of a _C.GroupTPComm."""

    spec: list[int]  # 1 (column) or 2 (row), sequence, recompute (2: of a checkpoint's second run), ranks
    group: str


# None: local. Of an MLP's two products the first one is a column layer, the second one a row layer.
TPComm = _C.GroupTPComm | Parallel | None


class ProductCall(TypedDict):
    """A product's arguments besides its tensors, by keyword: a module's runtime makes it for each call."""

    grad_accumulator: GradAccumulator | TracedGradAccumulator | None
    quantization: Quantization
    own_weight: _C.Quantized | None
    tp_comm: TPComm


def _parallel(tp_comm: TPComm) -> tuple[list[int], str]:
    return ([], "") if tp_comm is None else (tp_comm.spec, tp_comm.group)


def _spec(quantization: Quantization) -> list[int]:
    if quantization is None:
        return []
    return quantization if isinstance(quantization, list) else quantization.spec


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    grad_accumulator: GradAccumulator | TracedGradAccumulator | None = None,
    quantization: Quantization = None,
    own_weight: _C.Quantized | None = None,
    keep_input: bool = False,
    tp_comm: TPComm = None,
) -> torch.Tensor:
    """y = x weight^T + bias.

    Shapes: x [..., in_features], weight [out_features, in_features], bias [out_features] -> y [..., out_features].
    Dtypes: float32, float16, bfloat16, one for all (torch.autocast casts); float32 accumulation.
    quantization: the products are FP8. own_weight: an FP8 copy of the weight; weight then serves autograd alone.
    Saves: x for weight's gradient, weight for x's; neither if that gradient is not needed. Of FP8 operands the
    direction that the backward reads; with keep_input x unquantized, which the backward quantizes again.
    tp_comm: weight is this rank's part, and tokens or sums go over a process group (csrc/layer/tp_comm_group.h).
    Errors: ValueError naming the argument whose shape, dtype or device does not fit.
    """
    if torch.compiler.is_compiling():
        arguments = (x, weight, bias, keep_input, _spec(quantization), *_parallel(tp_comm))
        return _traced("linear", torch.ops.te.linear, arguments, (weight, grad_accumulator))
    return _C.linear(x, weight, bias, keep_input, (grad_accumulator, quantization, own_weight, tp_comm))


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
    grad_accumulator: GradAccumulator | TracedGradAccumulator | None = None,
    quantization: Quantization = None,
    own_weight: _C.Quantized | None = None,
    tp_comm: TPComm = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y = norm(h) weight^T + bias with h = x + residual (or x); RMSNorm when rms, else LayerNorm.

    Returns (y, norm output, h); h is an empty tensor if there was no residual, or x itself with return_input; the
    norm's output is empty if it is quantized and return_output is False.
    Gradients may arrive at all three: a gradient of h is added inside the norm's backward.
    Shapes: x, residual, norm output, h [..., in_features]; y [..., out_features].
    quantization, own_weight, tp_comm: as in linear.
    Saves: h, the norm's statistics and output, gamma, weight; less if gradients are not needed. recompute_output: not
    the norm's output, which the backward recomputes, to the same bits, at the cost of the norm's forward.
    """
    args = (x, residual, gamma, beta, weight, bias, eps, rms, zero_centered_gamma, return_output, recompute_output)
    if torch.compiler.is_compiling():
        op = torch.ops.te.normalization_linear
        arguments = (*args, _spec(quantization), *_parallel(tp_comm))
        y, norm_output, h = _traced("normalization_linear", op, arguments, (weight, grad_accumulator))
        # The compiler itself fuses the residual's gradient.
        return y, norm_output, x if return_input and residual is None else h
    return _C.normalization_linear(*args, return_input, (grad_accumulator, quantization, own_weight, tp_comm))


def activation_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: str,
    params: Sequence[float] = (),
    grad_accumulator: GradAccumulator | TracedGradAccumulator | None = None,
    quantization: Quantization = None,
    own_weight: _C.Quantized | None = None,
    tp_comm: TPComm = None,
) -> torch.Tensor:
    """y = act(x) weight^T + bias, the second half of an MLP. kind and params as in functional.activation.

    Saves: x (the pre-activation) and weight. The activation is not saved: the backward recomputes it.
    """
    if torch.compiler.is_compiling():
        arguments = (x, weight, bias, kind, list(params), _spec(quantization), *_parallel(tp_comm))
        return _traced("activation_linear", torch.ops.te.activation_linear, arguments, (weight, grad_accumulator))
    return _C.activation_linear(
        x, weight, bias, kind, list(params), (grad_accumulator, quantization, own_weight, tp_comm)
    )


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
    grad_accumulators: tuple[
        GradAccumulator | TracedGradAccumulator | None, GradAccumulator | TracedGradAccumulator | None
    ] = (None, None),
    quantizations: tuple[Quantization, Quantization] = (None, None),
    own_weights: tuple[_C.Quantized | None, _C.Quantized | None] = (None, None),
    tp_comms: tuple[TPComm, TPComm] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """activation_linear(normalization_linear(x)) as one node, to the same bits.

    Returns (y, norm output, h) as normalization_linear. Saves: h, statistics, the norm's output, the pre-activation and
    the parameters. recompute: h and the parameters alone, and the backward recomputes norm, first product and
    activation, to the same bits; the second product is not repeated. fp8_pre_activation: the pre-activation as E4M3 in
    blocks of 1 x 128; the backward computes the activation and its gradient from these values.
    """
    args = (x, residual, gamma, beta, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
    options = (eps, rms, zero_centered_gamma, kind, list(params))
    kept = (return_output, recompute_output, recompute, fp8_pre_activation)
    if torch.compiler.is_compiling():
        arguments = (*args, *options, *kept, *map(_spec, quantizations), *_parallel(tp_comms[0]))
        products = zip((fc1_weight, fc2_weight), grad_accumulators, strict=True)
        return _traced("layernorm_mlp", torch.ops.te.layernorm_mlp, arguments, *products)
    return _C.layernorm_mlp(*args, *options, *kept, *zip(grad_accumulators, quantizations, own_weights, tp_comms))


def noop_cat(parts: Sequence[torch.Tensor], names: Sequence[str] = ()) -> torch.Tensor:
    """The rows of several weights as one tensor; no copy if they are consecutive in one storage. names: of the weights,
    for te.explain."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_compiling():
        return torch.cat(tuple(parts))
    if _C.is_recording() and not _C.rows_in_order(parts):
        why = f"{', '.join(names)} are not consecutive in one storage: row_units() can place them"
        _C.record_path("noop_cat", f"copies {sum(p.nbytes for p in parts):,} bytes", why)
    return _C.noop_cat(list(parts))
