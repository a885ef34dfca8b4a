"""Rewrites an error of the extension in the words of the module that was called. It checks nothing before an error."""

import re

import torch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NORM = {"gamma": "layer_norm_weight", "beta": "layer_norm_bias", "residual": "residual"}
# The modules' names of the arguments of the ops inside. An argument without a name here may be the activation of an MLP
# or either of its weights: the error keeps the op's own words, after the module's name.
_NAMES = {
    "LayerNorm": {"gamma": "weight", "beta": "bias", "x": "inp"},
    "RMSNorm": {"gamma": "weight", "x": "inp"},
    "LayerNormMLP": _NORM,
    "GroupedMLP": {"x": "inp", "scale": "row_scale", "row_scale": "row_scale"},
}
_OTHERS = {**_NORM, "x": "inp", "weight": "weight", "bias": "bias"}
_TOKENS = ", the first of them tokens, with sequence_parallel."  # such an error is about the module's input
_OPS = r"linear|grouped_linear|grouped_mlp|normalization|activation|scaled_activation|quantize|gemm\w*"
_SENTENCE = re.compile(rf"(?:{_OPS}): argument '(\w+)' ")


def raise_for_module(
    error: ValueError,
    op: str,
    value: torch.Tensor,
    width: int,
    name: str,
    parameter: torch.Tensor,
    same_dtype: bool = True,
) -> None:
    """Raises the extension's error again as an error of the module `op`, whose input 'inp' is `value`: the extension's
    checks do not refer to a module, and cost less than checks here. Returns for an error that did not come from the
    extension (a hook's, a quantizer's), which the caller raises unchanged. name: the name of `parameter`; same_dtype:
    as in _misfit."""
    if not _is_ours(error):
        return
    words = _misfit(value, width, name, parameter, same_dtype)
    if words is not None:
        raise ValueError(f"{op}: argument 'inp' {words}.") from None
    found = _SENTENCE.match(str(error))
    if found is not None:
        argument = "inp" if str(error).endswith(_TOKENS) else _NAMES.get(op, _OTHERS).get(found[1])
        words = f"argument '{argument}' {str(error)[found.end() :]}" if argument else str(error)
        raise ValueError(f"{op}: {words}") from None


def _is_ours(error: ValueError) -> bool:
    """Whether the extension raised it, and not Python code that the extension called: a hook, a quantizer."""
    trace = error.__traceback__.tb_next  # the frames below the module's forward
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "transformer_engine"):
            return False
        trace = trace.tb_next
    return True


def _misfit(value: torch.Tensor, width: int, name: str, parameter: torch.Tensor, same_dtype: bool) -> str | None:
    if value.dim() == 0 or value.shape[-1] != width:
        found = f"last dimension {value.shape[-1]}" if value.dim() else "no dimensions"
        return f"has {found}, wanted {width}; its shape is {list(value.shape)}"
    if value.device != parameter.device:
        return f"is on {value.device}, wanted {parameter.device} like '{name}'; move one of them with .to(device)"
    if value.dtype not in _DTYPES:
        return f"has dtype {value.dtype}, wanted float32, float16 or bfloat16; cast it with .to(dtype)"
    if same_dtype and value.dtype != parameter.dtype and not torch.is_autocast_enabled(value.device.type):
        return (
            f"has dtype {value.dtype}, but '{name}' has {parameter.dtype}; cast one of them, or run under "
            "torch.autocast"
        )
    return None
