"""The common part of LayerNorm and RMSNorm: parameters, options and the call. They differ in a mean and a bias."""

from collections.abc import Iterable, Mapping

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_tensor
from transformer_engine.pytorch.distributed.regions import add_up_gradient
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.config import ParameterConfig
from transformer_engine.pytorch.module.error_context import raise_for_module

NormalizedShape = int | Iterable[int] | None


def _one_of(op: str, new: str, value: object, old: str, alias: object) -> object:
    """The value of an argument with two names."""
    if alias is None:
        return value
    if value is not None and value != alias:
        raise ValueError(f"{op}: arguments '{new}' ({value!r}) and '{old}' ({alias!r}) differ; pass '{new}' alone.")
    return alias


def _check_sm_margin(op: str, sm_margin: int | Mapping[str, int] | None) -> None:
    """A margin changes nothing, because kernels here leave other streams' work to the scheduler; a wrong one raises."""
    margins = sm_margin if isinstance(sm_margin, Mapping) else {"forward": sm_margin or 0}
    for name, value in margins.items():
        known = name in ("forward", "backward", "inference")
        if not known or isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(
                f"{op}: argument 'sm_margin' is {sm_margin!r}, wanted an int >= 0, or a dict of them by 'forward', "
                "'backward' and 'inference'."
            )


BEYOND = ("device", "dtype", "sm_margin")  # keywords of a norm that are not in its signature


class Normalization(TransformerEngineBaseModule):
    """A norm over the trailing dimensions `normalized_shape`, with parameters of that shape."""

    _rms: bool

    def _build(
        self,
        normalized_shape: NormalizedShape,
        eps: float,
        sequence_parallel: bool | None,
        params_dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        hidden_size: NormalizedShape,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | Mapping[str, int] | None = None,
    ) -> None:
        op = type(self).__name__
        shape = _one_of(op, "normalized_shape", normalized_shape, "hidden_size", hidden_size)
        if shape is None:
            raise ValueError(f"{op}: argument 'normalized_shape' is missing, wanted an int or a sequence of them.")
        self.normalized_shape = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
        if not self.normalized_shape or min(self.normalized_shape) < 1:
            raise ValueError(f"{op}: argument 'normalized_shape' is {shape!r}, wanted sizes of at least 1.")
        _check_sm_margin(op, sm_margin)
        params_dtype = _one_of(op, "params_dtype", params_dtype, "dtype", dtype)
        self._setup(ParameterConfig(params_dtype=params_dtype, device=device))
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.sequence_parallel = bool(sequence_parallel)
        tags = {} if sequence_parallel is None else {"sequence_parallel": sequence_parallel}
        init = torch.nn.init.zeros_ if zero_centered_gamma else torch.nn.init.ones_
        self._declare("weight", self.normalized_shape, init, **tags)
        if not self._rms:
            self._declare("bias", self.normalized_shape, torch.nn.init.zeros_, **tags)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        """Shapes: inp [..., *normalized_shape]; the result has inp's shape and dtype."""
        if type(inp) is not torch.Tensor:
            check_tensor(type(self).__name__, "inp", inp)
        weight, bias, x = self._of_all(self.weight), None if self._rms else self._of_all(self.bias), inp
        folded = len(self.normalized_shape) > 1
        if folded:
            if tuple(inp.shape[-len(self.normalized_shape) :]) != self.normalized_shape:
                raise ValueError(
                    f"{type(self).__name__}: argument 'inp' has shape {tuple(inp.shape)}, wanted the last dimensions "
                    f"{self.normalized_shape}."
                )
            x = inp.flatten(-len(self.normalized_shape))
            weight, bias = weight.flatten(), None if bias is None else bias.flatten()
        try:
            y, _ = functional.normalization(
                x, weight, bias, rms=self._rms, eps=self.eps, zero_centered_gamma=self.zero_centered_gamma
            )
        except ValueError as error:
            raise_for_module(error, type(self).__name__, x, weight.numel(), "weight", weight, same_dtype=False)
            raise
        return y.unflatten(-1, self.normalized_shape) if folded else y

    def _of_all(self, parameter: torch.Tensor) -> torch.Tensor:
        """With tp_size ranks, each of which applies the parameter to a part of the tensor (some of the heads), its
        gradient is the sum over all of them."""
        return parameter if self.tp_size == 1 else add_up_gradient(parameter, self._tp_group_name, self.tp_size)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
