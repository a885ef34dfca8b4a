"""GroupedLinear: the name that clients import and subclass. It is not here yet."""

from collections.abc import Callable

import torch

from transformer_engine.pytorch._absent import absent
from transformer_engine.pytorch.module.base import InitMethod, TransformerEngineBaseModule

_GROUPED = "grouped linear layers are"
_LOOP = "use a ModuleList of Linear"


@absent(_GROUPED, _LOOP)
class GroupedLinear(TransformerEngineBaseModule):
    """A linear layer for each group of rows."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: object | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: torch.device | str | int | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_ag: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        name: str | None = None,
        use_grouped_tensor: bool | None = None,
    ) -> None: ...

    @absent(_GROUPED, _LOOP)
    def forward(
        self,
        inp: torch.Tensor,
        m_splits: list[int] | torch.Tensor,
        is_first_microbatch: bool | None = None,
        out: torch.Tensor | None = None,
        dgrad_out: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """Shapes: inp [sum(m_splits), in_features] -> [sum(m_splits), out_features]."""
