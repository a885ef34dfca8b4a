"""Quantization contexts and the questions that clients ask about them. Without FP8 in this version: switched off they
do nothing, switched on they are refused by name, and every question is answered so."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch._absent import absent, refusal

_FP8 = "FP8 is"
_OFF = "pass enabled=False, or compute in bfloat16"
_REASON = "FP8 is not available in this version."


def _deprecated(old: str, new: str) -> None:
    if not torch.compiler.is_compiling():  # which cannot follow a warning
        warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=3)


class autocast:
    """Modules called inside compute in the recipe's format. enabled=False: nothing changes."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: object | None = None,
        _graph: bool = False,
    ) -> None:
        if enabled or calibrating:
            raise refusal("autocast", "FP8 is" if enabled else "FP8 calibration is", _OFF)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: object | None = None,
    _graph: bool = False,
) -> autocast:
    """autocast under its older names."""
    _deprecated("fp8_autocast", "autocast")
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules built inside hold quantized parameters. enabled=False: nothing changes."""
    if enabled:
        raise refusal("quantized_model_init", "quantized parameters are", "pass enabled=False")
    yield


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> object:
    """quantized_model_init under its older name."""
    _deprecated("fp8_model_init", "quantized_model_init")
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def _availability(name: str) -> Callable:
    def is_available(return_reason: bool = False) -> bool | tuple[bool, str]:
        return (False, _REASON) if return_reason else False

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = "False, with return_reason (False, why)."
    return is_available


is_fp8_available = _availability("is_fp8_available")
is_mxfp8_available = _availability("is_mxfp8_available")
is_fp8_block_scaling_available = _availability("is_fp8_block_scaling_available")
is_nvfp4_available = _availability("is_nvfp4_available")


def check_fp8_support() -> tuple[bool, str]:
    """(whether, why not)."""
    return False, _REASON


def check_mxfp8_support() -> tuple[bool, str]:
    """(whether, why not)."""
    return False, _REASON


def get_default_recipe() -> Recipe:
    """What autocast uses when it is given none."""
    return DelayedScaling()


class FP8GlobalStateManager:
    """What is switched on around the code that asks. Nothing is, in this version."""

    @classmethod
    def reset(cls) -> None:
        """Forgets every scale and history; there are none."""

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return False

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        return False

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        return False

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> None:
        return None

    @classmethod
    def get_fp8_group(cls) -> None:
        return None

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        return check_mxfp8_support()

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Brings scales up to date; there are none."""

    @staticmethod
    @absent(_FP8)
    def set_skip_fp8_weight_update_tensor(skip: bool) -> None:
        """A flag on the device by which a graph skips the quantization of weights."""

    @staticmethod
    @absent(_FP8)
    def add_fp8_tensors_to_global_buffer(fp8_meta: dict) -> None:
        """Registers a module's scales and histories."""

    @staticmethod
    @absent(_FP8)
    def get_meta_tensor_key(forward: bool = True) -> str:
        """The key of fp8_meta that holds the scales of a direction."""

    @staticmethod
    @absent(_FP8)
    def copy_forward_fp8_meta_tensors_for_recompute(fp8_meta: dict) -> None:
        """Keeps the scales of a forward that will be recomputed."""

    @staticmethod
    @absent(_FP8)
    def get_old_fp8_meta_tensors_for_recompute(fp8_meta: dict) -> None:
        """Puts the scales of a forward in place for its recomputation."""


@absent("quantizer factories are")
class QuantizerRole:
    """What a quantizer is for: the argument of a CustomRecipe's factory."""


@absent("quantizer factories are")
class QuantizerRequest:
    """A factory's answer that leaves the making of a quantizer to the library."""


@absent("quantizer factories are")
class DelayedScalingRequest(QuantizerRequest):
    """A factory's answer that asks for delayed scaling."""
