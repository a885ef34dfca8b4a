"""Options of the modules' constructors, in groups that several modules have. A constructor spells its signature out,
because clients inspect it, and hands groups on. Fields have the names of the arguments. Nothing is checked here."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ParameterConfig:
    """How parameters are made."""

    params_dtype: torch.dtype | None
    device: torch.device | str | int | None
    get_rng_state_tracker: Callable | None = None
    rng_tracker_name: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a module is divided over the ranks of a group. parallel_mode: of a module with one product."""

    tp_group: object | None
    tp_size: int
    sequence_parallel: bool
    parallel_mode: str | None = None
    tp_overlap: str = "auto"
    tp_recompute_allgather: bool = True
    symmetric_ar_type: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProductConfig:
    """Biases of a module's products, and the destination of their weight gradients."""

    bias: bool
    return_bias: bool
    fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """The norm inside a fused module."""

    normalization: str
    eps: float
    zero_centered_gamma: bool
