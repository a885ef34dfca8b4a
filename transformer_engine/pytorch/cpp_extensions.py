"""Products by the names that frameworks use, on plain and on quantized tensors. Without autograd; the gemm op
(functional/gemm.py) and the engine's FP8 products compute."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from transformer_engine.pytorch import _C
from transformer_engine.pytorch._internal.absent import absent
from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch.functional import gemm, gemm_accumulate
from transformer_engine.pytorch.module.base import refuse
from transformer_engine.pytorch.module.group_splits import whole_numbers

# Layout -> the direction of A's and of B's data that an FP8 product reads.
COLUMNWISE = {"TN": (False, False), "NN": (True, False), "NT": (True, True)}


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    quantization_params: object = None,
    *,
    gelu: bool | None = False,
    gelu_in: torch.Tensor | None = None,
    alpha: float | None = 1.0,
    beta: float | None = None,
    accumulate: bool | None = False,
    layout: str = "TN",
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_split_accumulator: bool | None = False,
    grad: bool | None = False,
    ub: object | None = None,
    ub_type: object | None = None,
    extra_output: torch.Tensor | None = None,
    bulk_overlap: bool | None = False,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, None]:
    """Layouts TN: B A^T (fprop: A = weight), NN: B A (dgrad: B = output gradient), NT: B^T A (wgrad: A = input, B =
    output gradient). A and B are both plain or both quantized, with the data that the layout reads: columnwise for an N
    of A or a T of B.

    alpha: a factor of the product. bias: added; with grad (layout NT) its gradient, the sum of B's rows, is returned in
    its dtype instead. gelu: of that, and its input is returned too; with grad the product is multiplied by the gelu's
    derivative at gelu_in. out: written in place, or with accumulate multiplied by beta (1) and added to.
    quantization_params: a quantizer for the result. use_split_accumulator: sums in float32 for per-tensor FP8; blocks
    and plain tensors always have it. Everything is computed in float32 and rounded once. A flag that is None is False.
    Returns (out, bias gradient or None, gelu's input or None, None); with TN and NN out has B's leading dimensions.
    Errors: ValueError for one plain and one quantized operand, accumulate without out, grad with bias in another layout
    than NT, gelu with accumulate, gelu_in without gelu and grad or missing with them, beta without accumulate;
    NotImplementedError for ub, ub_type, extra_output and bulk_overlap.
    """
    op = "general_gemm"
    gelu, accumulate, grad = bool(gelu), bool(accumulate), bool(grad)
    overlap = {"ub": ub, "ub_type": ub_type, "extra_output": extra_output, "bulk_overlap": bulk_overlap or None}
    refuse(op, "overlap of tensor-parallel communication", **{n: v is not None for n, v in overlap.items()})
    if layout not in COLUMNWISE:
        raise ValueError(f"{op}: argument 'layout' is {layout!r}, wanted 'TN', 'NN' or 'NT'.")
    quantized = [hasattr(t, "_native") for t in (A, B)]
    for name, t, is_quantized in zip("AB", (A, B), quantized):
        if not is_quantized:
            check_tensor(op, name, t)
    if quantized[0] != quantized[1]:
        which = "AB"[quantized[1]]
        raise ValueError(f"{op}: argument '{which}' alone is quantized, wanted both or neither: dequantize() it.")
    if accumulate and out is None:
        raise ValueError(f"{op}: argument 'accumulate' is True without 'out', wanted the tensor to add to.")
    if grad and bias is not None and layout != "NT":
        raise ValueError(f"{op}: argument 'bias' with grad in layout {layout}, wanted NT, where B is a gradient.")
    _check_gelu(gelu, gelu_in, accumulate=accumulate, grad=grad)
    alpha, beta = _checked_factors(alpha, beta, accumulate=accumulate)
    with torch.no_grad():
        wanted = out.dtype if out is not None else A.dtype if out_dtype is None else out_dtype
        product, added = _quantized if quantized[0] else _plain, None if grad else bias
        if gelu or alpha != 1.0 or beta not in (0.0, 1.0):
            d = product(A, B, layout, torch.float32, None, None, False, use_split_accumulator)
            d, before = _finished(d, wanted, alpha=alpha, bias=added, beta=beta, out=out, gelu=gelu, gelu_in=gelu_in)
            result = _into(out, d, False)
        else:
            result = product(A, B, layout, wanted, added, out, beta == 1.0, use_split_accumulator)
            before = None
        bias_grad = None
        if grad and bias is not None:
            rows = B.dequantize(dtype=torch.float32) if quantized[1] else B
            bias_grad = rows.flatten(0, -2).sum(0, dtype=torch.float32).to(bias.dtype)
        if layout != "NT":
            leading = B.shape[:-1]
            result = result.view(*leading, result.shape[-1]) if out is None else result
            before = before.view(*leading, before.shape[-1]) if before is not None and not grad else before
        if quantization_params is not None:
            result = quantization_params(result)
        return result, bias_grad, before, None


def general_grouped_gemm(
    A: Sequence[torch.Tensor],
    B: Sequence[torch.Tensor],
    out: Sequence[torch.Tensor],
    quantization_params: Sequence[object] | None,
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: Sequence[int] | None = None,
    gelu: bool | None = False,
    grad: bool | None = False,
    accumulate: bool | None = False,
    bias: Sequence[torch.Tensor] | None = None,
    use_bias: bool | None = False,
    use_split_accumulator: bool | None = False,
    D_dtype: torch.dtype | None = None,
    single_output: bool | None = False,
) -> tuple[Sequence[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor | None]]:
    """general_gemm(A[i], B[i]) of each group into out[i], to the same bits.

    single_output: out has one tensor, whose consecutive rows belong to the groups, with m_splits rows each. use_bias:
    bias has one for each group, which is added, or with grad (layout NT) the shape and dtype of its gradient. gelu: as
    general_gemm's; with grad `bias` is not read, and gelu's inputs are required: NotImplementedError. D_dtype: of out,
    if that differs from out_dtype. A group without rows gives zeros, or adds nothing. A flag that is None is False.
    workspace: get_workspace()'s, which is not needed.
    Returns (out, bias gradients, gelu inputs), the last two a list of one for each group, None if there is none.
    Errors: ValueError for lists of different lengths, and if m_splits does not add up to the rows of out.
    """
    op = "general_grouped_gemm"
    refuse(op, "the gradient of a gelu in products of groups", gelu=gelu and grad)
    groups = len(A)
    places = _rows_of_groups(op, out, m_splits, groups) if single_output else list(out)
    if use_bias and bias is None:
        raise ValueError(f"{op}: argument 'use_bias' is True without 'bias', wanted one for each group.")
    biases = list(bias) if use_bias else [None] * groups
    quantizers = [None] * groups if quantization_params is None else list(quantization_params)
    for name, given in (("B", B), ("out", places), ("bias", biases), ("quantization_params", quantizers)):
        if len(given) != groups:
            raise ValueError(f"{op}: argument '{name}' has {len(given)} entries, wanted {groups}, as many as A.")
    if any(quantizer is not None for quantizer in quantizers):
        refuse(op, "a quantized result of products of groups", quantization_params=quantizers)
    gradients, inputs = [], []
    for a, b, place, one in zip(A, B, places, biases, strict=True):
        _, gradient, before, _ = general_gemm(
            a,
            b,
            D_dtype or out_dtype,
            out=place,
            layout=layout,
            gelu=gelu,
            grad=grad,
            accumulate=accumulate,
            bias=one,
            use_split_accumulator=use_split_accumulator,
        )
        gradients.append(gradient)
        inputs.append(before)
    return out, gradients, inputs


def _rows_of_groups(
    op: str, out: Sequence[torch.Tensor], m_splits: Sequence[int] | None, groups: int
) -> list[torch.Tensor]:
    if len(out) != 1:
        raise ValueError(f"{op}: argument 'single_output' is True with {len(out)} tensors in 'out', wanted one.")
    m_splits = whole_numbers(op, m_splits, groups)
    if sum(m_splits) != out[0].shape[0]:
        raise ValueError(
            f"{op}: argument 'm_splits' is {list(m_splits)}, which adds up to {sum(m_splits)}, wanted out's "
            f"{out[0].shape[0]} rows."
        )
    return list(out[0].split(list(m_splits)))


@absent("products of grouped tensors are", "call general_grouped_gemm with lists")
def general_grouped_gemm_for_grouped_tensor(*args: object, **options: object) -> None:
    """A name that clients import."""


def _check_gelu(gelu: bool, gelu_in: torch.Tensor | None, *, accumulate: bool, grad: bool) -> None:
    op = "general_gemm"
    if gelu and accumulate:
        raise ValueError(f"{op}: arguments 'gelu' and 'accumulate' are both True; wanted one of them alone.")
    if (gelu and grad) != (gelu_in is not None):
        got = "missing" if gelu_in is None else "given"
        wanted = "what gelu was of" if gelu_in is None else "None, unless gelu and grad are True"
        raise ValueError(f"{op}: argument 'gelu_in' is {got}, wanted {wanted}.")


def _checked_factors(alpha: object, beta: object, *, accumulate: bool) -> tuple[float, float]:
    for name, value in (("alpha", alpha), ("beta", beta)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"general_gemm: argument '{name}' is {value!r}, wanted a number.")
    if beta and not accumulate:
        raise ValueError(
            f"general_gemm: argument 'beta' is {beta} without 'accumulate', wanted None, or accumulate=True."
        )
    return 1.0 if alpha is None else float(alpha), float(accumulate if beta is None else beta)


def _finished(
    d: torch.Tensor,
    dtype: torch.dtype,
    *,
    alpha: float,
    bias: torch.Tensor | None,
    beta: float,
    out: torch.Tensor | None,
    gelu: bool,
    gelu_in: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The epilogue of a product in float32, and gelu's input, both in dtype."""
    d = d * alpha
    if bias is not None:
        d += bias
    if beta:
        d.add_(out.reshape(d.shape), alpha=beta)
    if not gelu:
        return d.to(dtype), None
    if gelu_in is None:
        return torch.nn.functional.gelu(d, approximate="tanh").to(dtype), d.to(dtype)
    if gelu_in.numel() != d.numel() or gelu_in.shape[-1] != d.shape[-1]:
        raise ValueError(
            f"general_gemm: argument 'gelu_in' has shape {tuple(gelu_in.shape)}, wanted that of the product, "
            f"{tuple(d.shape)}."
        )
    return torch.ops.aten.gelu_backward(d, gelu_in.reshape(d.shape).float(), approximate="tanh").to(dtype), gelu_in


def _plain(A, B, layout, dtype, bias, out, accumulate, split):
    if out is not None and bias is None:
        gemm_accumulate(A, B, layout, out, overwrite=not accumulate)
        return out
    d, _ = gemm(A, B, layout, epilogue="none" if bias is None else "bias", bias=bias, out_dtype=dtype)
    return _into(out, d, accumulate)


def _quantized(A, B, layout, dtype, bias, out, accumulate, split):
    (a, b), (a_columnwise, b_columnwise) = (A._native(), B._native()), COLUMNWISE[layout]
    fast = a.scaling == 0 and b.scaling == 0 and not split
    if out is not None and bias is None:
        _C.gemm_fp8_accumulate(a, a_columnwise, b, b_columnwise, out, not accumulate, fast)
        return out
    return _into(out, _C.gemm_fp8(a, a_columnwise, b, b_columnwise, dtype, bias, fast), accumulate)


def _into(out, d, accumulate):
    if out is None:
        return d
    d = d.view(out.shape)
    return out.add_(d) if accumulate else out.copy_(d)
