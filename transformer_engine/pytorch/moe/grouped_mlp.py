"""GroupedMLP: an MLP for each group of rows, the experts of a mixture, in one autograd node. It sorts and sends
nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_size, check_tensor
from transformer_engine.pytorch.module.base import InitMethod, check_choice
from transformer_engine.pytorch.module.composite import Composite
from transformer_engine.pytorch.module.error_context import raise_for_module
from transformer_engine.pytorch.module.group_splits import Splits, splits_of
from transformer_engine.pytorch.module.grouped_linear import GroupedCall, GroupedLinear
from transformer_engine.pytorch.module.layernorm_mlp import activation_parameters
from transformer_engine.pytorch.module.submodules import calls_forward, has_no_global_hook
from transformer_engine.pytorch.moe.stacked_linear import StackedGroupedLinear
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


class GroupedMLP(Composite):
    """y[rows of g] = (act(x[rows of g] fc1.weight[g]^T) * row_scale[rows of g]) fc2.weight[g]^T for consecutive groups
    of rows. fc1 and fc2 are GroupedLinear without biases whose weights are one parameter each, [num_gemms,
    out_features, in_features] (under quantized_model_init `weight0`, `weight1`, ...); state dicts of either form load.
    A gated activation acts on the first half of fc1's features.

    Shapes: inp [rows, hidden_size] -> [rows, hidden_size]. m_splits: as GroupedLinear's; a tensor on inp's device
    stays there, and rows of no group are not read and give zeros. row_scale: float32 or inp's dtype [rows]; None: no
    scale.
    One autograd node computes both products, to the bits of fc1, functional.scaled_activation and fc2 one after the
    other, which run so if a client has put hooks or classes of its own there. Saved: inp, the pre-activation (with
    save_preactivation="fp8" as E4M3 with a scale for each 128 of a row) and row_scale; the activation is recomputed.
    row_map: inp is [tokens, hidden_size], and the rows are gathered from it by this map (functional.permute_routing;
    functional.grouped_mlp has its form); the backward gathers them again, or they are kept (keep_rows=True). sum_rows:
    the output is [tokens, hidden_size], the sum of each token's rows. zero_scale_tail: functional.grouped_mlp's.
    fuse_wgrad_accumulation, delay_wgrad_compute: as GroupedLinear's.
    """

    def __init__(
        self,
        num_gemms: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        save_preactivation: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        self._activation_values = activation_parameters(op, activation, activation_params)
        check_choice(op, "save_preactivation", save_preactivation, (None, "fp8"))
        check_size(op, "num_gemms", num_gemms, 1)
        check_size(op, "hidden_size", hidden_size)
        check_size(op, "ffn_hidden_size", ffn_hidden_size)
        self.num_gemms, self.hidden_size, self.ffn_hidden_size = num_gemms, hidden_size, ffn_hidden_size
        self.activation, self.activation_params = activation, activation_params
        self.save_preactivation = save_preactivation
        options = {
            "bias": False,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "delay_wgrad_compute": delay_wgrad_compute,
            "get_rng_state_tracker": get_rng_state_tracker,
            "rng_tracker_name": rng_tracker_name,
            "params_dtype": params_dtype,
            "device": device,
        }
        width = ffn_hidden_size * (2 if functional.activation_kinds[activation] else 1)
        part = "" if name is None else f"{name}."
        # Weights that exist in FP8 alone are tensors of their own.
        linear = GroupedLinear if current_state().parameters else StackedGroupedLinear
        self.fc1 = linear(num_gemms, hidden_size, width, init_method=init_method, name=f"{part}fc1", **options)
        self.fc2 = linear(
            num_gemms, ffn_hidden_size, hidden_size, init_method=output_layer_init_method, name=f"{part}fc2", **options
        )

    def forward(
        self,
        inp: torch.Tensor,
        m_splits: list[int] | torch.Tensor,
        row_scale: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        row_map: tuple[torch.Tensor, torch.Tensor] | None = None,
        keep_rows: bool = False,
        sum_rows: bool = False,
        zero_scale_tail: bool = True,
    ) -> torch.Tensor:
        op = type(self).__name__
        if type(inp) is not torch.Tensor:
            check_tensor(op, "inp", inp)
        if inp.dim() != 2:
            raise ValueError(f"{op}: argument 'inp' has shape {list(inp.shape)}, wanted [rows, {self.hidden_size}].")
        if type(row_scale) is not torch.Tensor and row_scale is not None:
            check_tensor(op, "row_scale", row_scale)
        splits = m_splits
        if type(m_splits) is not Splits:
            of_rows = inp if row_map is None else _checked_map(op, row_map)[0].unsqueeze(1)
            splits = splits_of(op, m_splits, of_rows, self.num_gemms)
        if not self._is_fused():
            return self._in_parts(inp, splits, row_scale, is_first_microbatch, row_map, sum_rows)
        fc1, fc2 = self._modules["fc1"], self._modules["fc2"]  # faster than the search of torch's __getattr__
        one, two = fc1.call_of(inp, splits, is_first_microbatch), fc2.call_of(inp, splits, is_first_microbatch)
        of_rows = {"row_map": row_map, "keep_rows": keep_rows, "sum_rows": sum_rows}
        try:
            out = self._product(inp, splits, row_scale, one, two, zero_scale_tail=zero_scale_tail, **of_rows)
        except ValueError as error:
            name = f"fc1.{fc1._product_names('')[0][0]}"
            raise_for_module(error, op, inp, self.hidden_size, name, one.weights[0])
            raise
        if one.quantizations:
            fc1.runtime.quantization.follow(out)
        if two.quantizations:
            fc2.runtime.quantization.follow(out)
        return out

    def _is_fused(self) -> bool:
        """Whether the parts are the library's own, without hooks, and record nothing of their inputs (calibration)."""
        fc1, fc2 = self._modules["fc1"], self._modules["fc2"]
        own = calls_forward(fc1, GroupedLinear) and calls_forward(fc2, GroupedLinear)
        return own and has_no_global_hook() and not is_calibrating()

    def _product(
        self,
        inp: torch.Tensor,
        splits: Splits,
        row_scale: torch.Tensor | None,
        one: GroupedCall,
        two: GroupedCall,
        **of_rows: object,
    ) -> torch.Tensor:
        return functional.grouped_mlp(
            inp,
            splits.offsets,
            one.weights,
            two.weights,
            row_scale,
            splits=splits.host,
            kind=self.activation,
            params=self._activation_values,
            fp8_pre_activation=self.save_preactivation == "fp8",
            grad_accumulators=(one.grad_accumulator, two.grad_accumulator),
            quantizations=(one.quantizations, two.quantizations),
            own_weights=(one.own_weights, two.own_weights),
            **of_rows,
        )

    def _in_parts(
        self,
        inp: torch.Tensor,
        splits: Splits,
        row_scale: torch.Tensor | None,
        is_first_microbatch: bool | None,
        row_map: tuple[torch.Tensor, torch.Tensor] | None,
        sum_rows: bool,
    ) -> torch.Tensor:
        if row_map is not None:
            inp, _ = functional.permute(inp, row_map[1], row_map[0].shape[0], of_mask=False)
        y = self._composed(inp, splits, row_scale, is_first_microbatch)
        return functional.unpermute(y, row_map[1], of_mask=False) if sum_rows else y

    def _composed(
        self, inp: torch.Tensor, splits: Splits, row_scale: torch.Tensor | None, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        if self.save_preactivation is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: save_preactivation={self.save_preactivation!r} with parts that have hooks, or "
                "are of another class, or calibrate, is not available in this version; leave it at None."
            )
        m_splits = splits.host if splits.offsets is None else splits.offsets.diff()  # cut once, and counted once
        hidden = self.fc1(inp, m_splits, is_first_microbatch)
        if row_scale is None:
            hidden = functional.activation(hidden, self.activation, self._activation_values)
        else:
            hidden = functional.scaled_activation(hidden, row_scale, self.activation, self._activation_values)
        return self.fc2(hidden, m_splits, is_first_microbatch)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for backward_dw(): the option delay_wgrad_compute."""
        return self.fc1.need_backward_dw() or self.fc2.need_backward_dw()

    def backward_dw(self) -> None:
        """Computes the weight gradients that the oldest backward() left: fc2's, then fc1's."""
        self.fc2.backward_dw()
        self.fc1.backward_dw()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As GroupedLinear's."""
        self.fc1.reset_parameters(defer_init)
        self.fc2.reset_parameters(defer_init)

    def extra_repr(self) -> str:
        return f"activation={self.activation}, save_preactivation={self.save_preactivation}"


def _checked_map(op: str, row_map: object) -> tuple[torch.Tensor, torch.Tensor]:
    """(token of each row, rows of each token), whose shapes and dtypes functional.grouped_mlp checks."""
    if not isinstance(row_map, tuple) or len(row_map) != 2:
        raise TypeError(
            f"{op}: argument 'row_map' is {row_map!r:.100}, wanted two tensors: the token of each row and the rows of "
            "each token, of functional.permute_routing."
        )
    for tensor in row_map:
        check_tensor(op, "row_map", tensor)
    if row_map[0].dim() != 1:
        raise ValueError(f"{op}: argument 'row_map' has first shape {list(row_map[0].shape)}, wanted [rows].")
    return row_map


def is_calibrating() -> bool:
    state = current_state()
    return state.calibrating and not state.enabled
